"""Tasks that a worker refuses before it starts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainwright.cluster import Emulation
from trainwright.families import Custom, CustomKind, Gpt
from trainwright.model import Model
from trainwright.operator_shardings import LayerSpecs, OperatorSpecs, SpanSpecs
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.strategy import Strategy
from trainwright.worker_api import FailureReason, GangNode, LayerCheck, LinkTask, ProfilingTask, TrialTask
from trainwright_worker.gang.errors import WorkerError
from trainwright_worker.gang.rank_assignment import RankAssignment, gang_devices
from trainwright_worker.measure.link_bench import _repeats
from trainwright_worker.run_task import task_devices
from trainwright_worker.validation import check_task


def with_other_operators(stage: Stage) -> Stage:
    """Return the stage with shardings of operators that the model does not have."""
    operator = OperatorSpecs("convolution", "replicated", "R", ())
    layers = (LayerSpecs(layer, "block", (operator,)) for layer in range(stage.first, stage.end))
    return replace(stage, operators=SpanSpecs((1, len(stage.devices)), tuple(layers)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda m, t: replace(t, plan=t.plan.map_stages(with_other_operators)),
            "layer 0: expected a embedding of operators tokens, positions, got a block of convolution",
        ),
        (lambda m, t: replace(t, gang=m.gang(1, 2)), "device node-b:1 is in the gang, but not in the plan"),
        (lambda m, t: replace(t, gang=m.gang(1)), "device node-b:0 is in the plan, but not in the gang"),
        (lambda m, t: replace(t, iterations=0), "iterations must be at least 1"),
        (lambda m, t: replace(t, model=replace(m.model, layers=m.model.layers[:-1])), "not those that family gpt"),
        (lambda m, t: replace(t, model=Model.of(Gpt(2, 32, 4, 16, 64, dropout=True))), "gpt.dropout cannot be run"),
        (lambda m, t: replace(t, gang=m.gang()), "at least one node"),
        (lambda m, t: replace(t, gang=m.gang(1, 1, deadline_seconds=0)), "must be above 0"),
        (lambda m, t: m.trial(m.gang(3), tensor=3), "does not divide 4, the highest"),
        (lambda m, t: ProfilingTask(m.gang(1), m.model, 3, (1,)), "does not divide 4, the highest"),
        (lambda m, t: ProfilingTask(m.gang(1), m.model, 1, ()), "rows must name"),
        (lambda m, t: ProfilingTask(m.gang(2), m.model, 1, (1,)), "the gang has 2"),
        (lambda m, t: ProfilingTask(m.gang(1), m.model, 1, (1,), kinds=("head", "tail")), "of the model, got tail"),
        (lambda m, t: replace(t, checks=(LayerCheck("cpu", "tail", 1),)), "got tail and 1"),
        (lambda m, t: replace(t, checks=(LayerCheck("cpu", "block", 0),)), "got block and 0"),
        (lambda m, t: LinkTask(m.gang(1)), "no link to measure"),
        (lambda m, t: LinkTask(m.gang(1, 1), pairs=()), "no link to measure"),
        (lambda m, t: LinkTask(m.gang(1, 1), pairs=(("node-a", "node-c"),)), "two nodes of the gang"),
        (lambda m, t: LinkTask(m.gang(1, 1), pairs=(("node-a", "node-a"),)), "two nodes of the gang"),
        (lambda m, t: LinkTask(m.gang(1, 1), pairs=(("node-a", "node-b"), ("node-b", "node-a"))), "each two once"),
        (lambda m, t: LinkTask(m.gang(2), message_bytes=(1, 2)), "three ascending sizes"),
    ],
)
def test_impossible_tasks_are_refused_with_a_sentence(make, change, words: str) -> None:
    good = make.trial(make.gang(1, 1))
    check_task(good)
    with pytest.raises(WorkerError, match=words) as refusal:
        check_task(change(make, good))
    assert refusal.value.reason is FailureReason.ORDER_INVALID
    assert "\n" not in refusal.value.message


@pytest.mark.parametrize(
    ("fields", "rows", "words"),
    [
        ({"min_rows": 3}, (2, 2), r"stage 0, layers 0…0: a replica computes 2 at once, but custom.min_rows asks every replica"),
        ({"whole_batch": True}, (2, 2), "a replica computes 2 at once, but custom.whole_batch asks one replica to compute all 8"),
        ({"whole_batch": True}, (4,), "a replica computes 4 at once, but custom.whole_batch asks one replica to compute all 8"),
    ],
)  # fmt: skip
def test_plans_that_compute_fewer_rows_at_once_than_a_model_needs_are_refused(make, fields, rows, words: str) -> None:
    """Two micro-batches of four rows, on two replicas or on one."""
    gang = make.gang(len(rows))
    stage = Stage(gang_devices(gang), (LayerRun(0, 1, Strategy(1, len(rows)), rows),))
    model = Model.of(Custom("own:model", (CustomKind("Head", 1, 0.0, 1, 0.0),), ("Head",), **fields))
    with pytest.raises(WorkerError, match=words):
        check_task(TrialTask(gang, model, Plan(1, 8, (Pipeline(2, 4, (stage,)),))))


def test_layers_are_not_measured_with_fewer_rows_than_a_model_needs(make) -> None:
    model = Model.of(Custom("own:model", (CustomKind("Head", 1, 0.0, 1, 0.0),), ("Head",), min_rows=3))
    check_task(ProfilingTask(make.gang(1), model, 1, (3, 4)))
    with pytest.raises(WorkerError, match=r"custom.min_rows asks for 3 rows or more at once, .* measured with 2"):
        check_task(ProfilingTask(make.gang(1), model, 1, (2, 4)))
    stage = Stage(gang_devices(make.gang(1)), (LayerRun(0, 1, Strategy(1, 1), (4,)),))
    task = TrialTask(
        make.gang(1), model, Plan(1, 8, (Pipeline(2, 4, (stage,)),)), checks=(LayerCheck("cpu", "Head", 2),)
    )
    with pytest.raises(WorkerError, match=r"custom.min_rows asks for 3 rows or more at once, .* measured with 2"):
        check_task(task)


def test_pacing_is_refused_on_a_real_gpu_and_needed_on_an_emulated_device(make) -> None:
    node = GangNode("node-a", (0,), "emulated-x")
    gang = replace(make.gang(1), nodes=(node,))
    with pytest.raises(WorkerError, match="needs a device table"):
        check_task(make.trial(gang))
    table = (("emulated-x", Emulation(1e9, 0, 1e9)),)
    check_task(make.trial(replace(gang, emulations=table)))
    with pytest.raises(WorkerError, match="backend nccl means a real GPU"):
        check_task(make.trial(replace(gang, emulations=table, backend="nccl")))
    with pytest.raises(WorkerError, match="is real and must have no device table"):
        check_task(make.trial(replace(make.gang(1), emulations=(("cpu", Emulation(1e9, 0, 1e9)),))))


def environment(node: str, rank: int, local: int, world: int) -> dict[str, str]:
    return {
        "TRAINWRIGHT_NODE_NAME": node,
        "RANK": str(rank),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(world),
    }


def test_a_process_finds_its_logical_rank_by_its_device(make) -> None:
    gang = make.gang(1, 2)
    a, b, c = gang_devices(gang)
    order = replace(make.trial(gang), plan=make.plan((c, a, b)))
    seats = [
        RankAssignment.from_environment(gang, task_devices(order), environment(*place, 3))
        for place in (("node-a", 0, 0), ("node-b", 1, 0), ("node-b", 2, 1))
    ]
    assert [seat.device for seat in seats] == [a, b, c]
    assert [seat.rank for seat in seats] == [1, 2, 0]
    assert [seat.is_main_process for seat in seats] == [True, False, False]


@pytest.mark.parametrize(
    "place", [("node-z", 0, 0, 3), ("node-b", 0, 0, 3), ("node-a", 0, 0, 2), ("node-a", 1, 1, 3), ("", 0, 0, 3)]
)
def test_process_at_an_unexpected_place_is_refused(make, place: tuple) -> None:
    order = make.trial(make.gang(1, 2))
    with pytest.raises(WorkerError) as refusal:
        RankAssignment.from_environment(order.gang, task_devices(order), environment(*place))
    assert refusal.value.reason is FailureReason.PLACEMENT_NOT_MET


@pytest.mark.parametrize(("seconds", "expected"), [(0.1, 5), (2.0, 2), (100.0, 1), (0.02, 10), (0.0001, 50)])
def test_repeats_bound_the_time_of_a_round(seconds: float, expected: int) -> None:
    assert _repeats(5, seconds) == expected
