"""Number formats: `auto` on devices of one kind and of several, and the price of a format that is emulated."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from flow_reports import report_of
from flow_world import World, node, spec_of

from trainwright import documents
from trainwright.accelerators import FormatChoice
from trainwright.cluster import Accelerator, Node
from trainwright.layer import Dtype
from trainwright.plan import Plan
from trainwright.profiles import Profiles
from trainwright.worker_api import ProfilingReport, ProfilingTask, TrialSeriesTask, TrialTask, WorkerTask
from trainwright_operator.flow.actions import StoredRole
from trainwright_operator.flow.documents.discovered_devices import DiscoveredDevices
from trainwright_operator.flow.documents.number_formats import formats_to_profile
from trainwright_operator.flow.documents.planned_trials import PlannedTrials, plan_digest
from trainwright_operator.flow.names import Names

A100, V100, T4 = "NVIDIA-A100-SXM4-40GB", "Tesla-V100-SXM2-16GB", "Tesla-T4"
LARGER = {"layers": 4, "hiddenSize": 1024, "heads": 8, "sequenceLength": 512, "vocabularySize": 8192}
SLOW = {Dtype.FLOAT32: 4.0, Dtype.BFLOAT16: 1.0, Dtype.FLOAT16: 1.0}


class Recorded(World):
    """World that records the worker's tasks; layers take as long as their number format does."""

    def __init__(
        self, dtype: str, *products: str, slow: dict[Dtype, float] = SLOW, runs: bool = True, **changes: Any
    ) -> None:
        self.tasks: list[WorkerTask] = []

        def report(task: WorkerTask) -> Any:
            self.tasks.append(task)
            found = report_of(task)
            if not isinstance(found, ProfilingReport) or not isinstance(task, ProfilingTask):
                return found
            ratio = slow[task.model.dtype]
            return ProfilingReport(
                tuple(
                    dataclasses.replace(
                        one, forward_seconds=ratio * one.forward_seconds, backward_seconds=ratio * one.backward_seconds
                    )
                    for one in found.layers
                )
            )

        search = {"planner": "Amp", "limits": {"maxTensorDegree": 1}}
        super().__init__(
            spec=spec_of(training={"globalBatchSize": 8, "dtype": dtype}, search=search, **changes),
            nodes=tuple(node(f"n{number}", product) for number, product in enumerate(products, 1)),
            report=report,
        )
        if runs:
            self.run()

    def run_again(self) -> None:
        """Record what a spec's edit, which changes neither measurements nor search, lets the plan run anew."""
        self.tasks.clear()
        self.generation += 1
        self.run()

    @property
    def profiled(self) -> set[tuple[str, Dtype]]:
        """Accelerators with the formats in which their layers were profiled."""
        tasks = [task for task in self.tasks if isinstance(task, ProfilingTask)]
        return {(task.gang.nodes[0].accelerator, task.model.dtype) for task in tasks}

    def document(self, name: str, noun: Any) -> Any:
        return documents.loads(self.stored[name].data["document.json"], noun)

    @property
    def planned(self) -> PlannedTrials:
        assert self.status.candidates_ref is not None
        found: PlannedTrials = self.document(self.status.candidates_ref.config_map, PlannedTrials)
        return found


@pytest.mark.parametrize(
    ("products", "dtype"),
    [
        ((A100, A100), Dtype.BFLOAT16),
        ((V100, T4), Dtype.FLOAT16),
        (("emulated-v100", "emulated-t4"), Dtype.FLOAT32),
    ],
)
def test_auto_profiles_only_the_format_that_is_fastest_on_all_devices(products: tuple[str, ...], dtype: Dtype) -> None:
    world = Recorded("auto", *products)
    assert world.succeeded == "True", world.status.dump()
    assert world.profiled == {(product, dtype) for product in products}
    assert world.status.winner is not None
    assert world.status.winner.dtype == dtype
    assert documents.parse(world.status.winner.plan, Plan).dtype is dtype
    assert {trial.plan.dtype for trial in world.planned.trials} == {None}, "the trial itself states it"
    assert {trial.dtype for trial in world.status.trials} == {dtype}
    assert f" in {dtype}" in world.condition("Planned").message
    assert f" in {dtype}" in world.condition("Profiled").message


def test_the_winners_plan_states_the_format_that_the_spec_names() -> None:
    world = Recorded("float16", V100)
    assert world.status.winner is not None
    assert world.status.winner.dtype is None
    assert documents.parse(world.status.winner.plan, Plan).dtype is Dtype.FLOAT16


def test_formats_of_a_plan_in_flight_stay_when_data_sheets_change(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Recorded("auto", A100, runs=False)
    world.run(until=lambda: world.condition("NodesDiscovered").status == "True")

    def changed(accelerators: tuple[str, ...]) -> tuple[FormatChoice, ...]:
        return (FormatChoice(Dtype.FLOAT32, accelerators),)

    monkeypatch.setattr("trainwright_operator.flow.documents.number_formats.format_choices", changed)
    world.run()
    assert world.profiled == {(A100, Dtype.BFLOAT16)}


def test_type_without_a_data_sheet_is_profiled_in_every_format() -> None:
    world = Recorded("auto", "New-GPU", V100, trials={"topK": 0})
    assert world.succeeded == "True", world.status.dump()
    assert world.profiled == {("New-GPU", dtype) for dtype in Dtype} | {(V100, Dtype.FLOAT32), (V100, Dtype.FLOAT16)}


def test_only_formats_of_the_trainer_are_profiled() -> None:
    search = {"planner": "Amp", "expressibleBy": "Torchtitan"}
    spec = spec_of(training={"globalBatchSize": 8}, search=search)
    nodes = tuple(Node(name, product, 1) for name, product in (("n1", V100), ("n2", T4)))
    found = DiscoveredDevices(nodes, tuple(Accelerator(product, 2**34) for product in (V100, T4)))
    assert [choice.dtype for choice in formats_to_profile(spec, found)] == [Dtype.FLOAT32]
    of_former_spec = dataclasses.replace(found, formats=(FormatChoice(Dtype.FLOAT16, (V100, T4)),))
    assert [choice.dtype for choice in formats_to_profile(spec, of_former_spec)] == [Dtype.FLOAT32]


def test_format_that_the_trainer_lacks_is_refused() -> None:
    search = {"planner": "Amp", "expressibleBy": "Torchtitan"}
    world = World(spec=spec_of(training={"globalBatchSize": 8, "dtype": "float16"}, search=search), nodes=(node("n1"),))
    world.run()
    assert world.condition("Accepted").reason == "SpecInvalid"
    assert (
        "Torchtitan (search.expressibleBy) has bfloat16 and float32, got float16" in world.condition("Accepted").message
    )


def test_types_that_need_different_formats_get_plans_for_each() -> None:
    slow = Recorded("auto", "emulated-v100", A100, A100, trials={"topK": 0})
    assert slow.profiled == {("emulated-v100", Dtype.FLOAT32), (A100, Dtype.FLOAT32), (A100, Dtype.BFLOAT16)}
    best = slow.planned.best
    assert best.dtype is Dtype.BFLOAT16
    assert {device.node for device in best.plan.devices} <= {"n2", "n3"}
    names = Names.of("demo", "uid-1", slow.spec)
    first, second = slow.document(names.profiles, Profiles), slow.document(names.profiles_in(Dtype.FLOAT32), Profiles)
    assert {one.accelerator for one in first.layers} == {A100}
    assert {one.accelerator for one in second.layers} == {"emulated-v100", A100}


def test_candidates_of_both_formats_are_compared_and_tried_in_their_own() -> None:
    alike = dict.fromkeys(Dtype, 1.0)
    world = Recorded("auto", "emulated-v100", A100, slow=alike, trials={"topK": 12, "perGang": 4})
    assert world.succeeded == "True", world.status.dump()
    dtypes = {trial.plan: trial.dtype for trial in world.planned.trials}
    assert set(dtypes.values()) == {Dtype.FLOAT32, Dtype.BFLOAT16}
    tried = [(task.model.dtype, task.plan) for task in world.tasks if isinstance(task, TrialTask)]
    series = [task for task in world.tasks if isinstance(task, TrialSeriesTask)]
    tried += [(task.model.dtype, plan) for task in series for plan in task.plans]
    assert len(tried) == len(dtypes)
    assert all(dtypes[plan] is dtype for dtype, plan in tried)
    assert all(dtype is Dtype.FLOAT32 for dtype, plan in tried if "n1" in plan.nodes)
    seconds = [trial.predicted_seconds for trial in world.planned.trials if trial.role == "Candidate"]
    assert seconds == sorted(seconds)


def test_auto_answers_in_float32_when_only_its_state_fits() -> None:
    labels = {"nvidia.com/gpu.product": V100, "nvidia.com/gpu.memory": "1098"}  # 1010 without the head-room
    found = {}
    for dtype in ("auto", "float16", "float32"):
        training = {"globalBatchSize": 8, "dtype": dtype}
        spec = spec_of(training=training, model={"gpt": LARGER}, trials={"topK": 0})
        world = World(spec=spec, nodes=(node("n1", V100, 1, labels=labels),))
        world.run()
        found[dtype] = world
    assert found["float16"].condition("Planned").reason == "NoFeasiblePlan"
    assert found["float32"].succeeded == "True"
    assert found["auto"].status.winner is not None
    assert found["auto"].status.winner.dtype == Dtype.FLOAT32


def test_status_states_the_price_of_a_format_that_is_emulated() -> None:
    world = Recorded("bfloat16", V100, T4, model={"gpt": LARGER}, trials={"topK": 0})
    message = world.condition("Planned").message
    assert "; bfloat16 is emulated on V100 and T4: " in message
    assert "; float16 would take " in message
    assert world.planned.best.dtype is None
    assert world.status.winner is not None
    assert world.status.winner.dtype is None
    assert "emulated" not in Recorded("float16", V100, T4, trials={"topK": 0}).condition("Planned").message


@pytest.mark.parametrize(("speedup", "says"), [(0.8, True), (8.0, False)])
def test_condition_names_a_format_that_measured_products_show_to_be_emulated(speedup: float, says: bool) -> None:
    def report(task: WorkerTask) -> Any:
        found = report_of(task)
        return dataclasses.replace(found, format_speedup=speedup) if isinstance(found, ProfilingReport) else found

    training = {"globalBatchSize": 8, "dtype": "bfloat16"}
    world = World(
        spec=spec_of(training=training, trials={"topK": 0}), nodes=(node("n1", "Unlisted-GPU"),), report=report
    )
    world.run(until=lambda: world.status.profiles_ref is not None)
    told = "matrix products in bfloat16 are 0.8 times as fast as in float32 on Unlisted-GPU, which emulates them"
    assert (told in world.condition("Profiled").message) == says


def test_status_says_when_the_plan_leaves_out_those_that_emulate() -> None:
    world = Recorded("bfloat16", A100, T4, runs=False, trials={"topK": 0}, model={"gpt": LARGER})
    world.run()
    message = world.condition("Planned").message
    used = {node for trial in world.planned.trials[:1] for node in trial.plan.nodes}
    assert "; bfloat16 is emulated on T4" in message
    assert (", which the plan leaves out" in message) == (used == {"n1"})


def test_names_of_stored_plans_do_not_depend_on_the_former_default() -> None:
    names = {dtype: Names.of("demo", "uid-1", spec_of(training={"globalBatchSize": 8, "dtype": dtype})).base
             for dtype in ("auto", "float32", "float16", "bfloat16")}  # fmt: skip
    assert names["float32"] == "demo-d632f730"
    assert names["float16"] == "demo-344e6248"
    assert len(set(names.values())) == 4


def change_trial(world: Recorded, name: str, **changes: Any) -> None:
    """Store the planned trials with another plan or format of one of them, as after an edit that changes the search."""
    assert world.status.candidates_ref is not None
    stored, before = world.stored[world.status.candidates_ref.config_map], world.planned
    trials = tuple(dataclasses.replace(trial, **changes) if trial.name == name else trial for trial in before.trials)
    data = {"document.json": documents.dumps(dataclasses.replace(before, trials=trials))}
    world.stored[stored.name] = dataclasses.replace(stored, data=data)


def test_result_of_one_format_does_not_count_for_the_same_plan_in_another() -> None:
    world = Recorded("auto", A100, A100)
    tried = world.planned.trials[0]
    assert tried.dtype is Dtype.BFLOAT16
    change_trial(world, tried.name, dtype=Dtype.FLOAT16)
    world.run_again()
    (task,) = world.tasks
    assert isinstance(task, TrialTask)
    assert (task.plan, task.model.dtype) == (tried.plan, Dtype.FLOAT16)


def name_former_digests(world: Recorded) -> None:
    """Store the trials' results with digests that name no format, as operators before 0.2.0 did."""
    for trial in world.planned.trials:
        for stored in [
            one for one in world.stored.values() if one.gang.startswith(trial.name) and one.role == StoredRole.RESULT
        ]:
            outcome = json.loads(stored.data["outcome.json"]) | {"tried": plan_digest(trial.plan)}
            world.stored[stored.name] = dataclasses.replace(
                stored, data=dict(stored.data) | {"outcome.json": json.dumps(outcome)}
            )


def test_results_without_a_format_count_for_the_only_trial_of_their_plan() -> None:
    world = Recorded("auto", A100, A100)
    name_former_digests(world)
    world.run_again()
    assert not world.tasks
    first, second, *_ = world.planned.trials
    change_trial(world, second.name, plan=first.plan, dtype=Dtype.FLOAT16)
    world.run_again()
    tried = [(task.plan, task.model.dtype) for task in world.tasks if isinstance(task, TrialTask)]
    assert sorted(dtype for _, dtype in tried) == [Dtype.BFLOAT16, Dtype.FLOAT16]
    assert {plan for plan, _ in tried} == {first.plan}


def test_gang_that_runs_a_plan_in_a_former_format_is_ended() -> None:
    world = Recorded("auto", A100, A100, trials={"topK": 1}, runs=False)
    world.run(until=lambda: any("candidate" in name for name in world.jobs))
    for trial in world.planned.trials:
        change_trial(world, trial.name, dtype=Dtype.FLOAT16)
    world.run()
    assert {trial.dtype for trial in world.status.trials} == {Dtype.FLOAT16}
    assert {task.model.dtype for task in world.tasks if isinstance(task, TrialTask)} == {Dtype.FLOAT16}
