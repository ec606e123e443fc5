"""The command line with preferences, kept plans, the work bound, and plans of unequal stages."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
from quick_planner import quickly
from typer.testing import CliRunner, Result

from trainwright import documents
from trainwright.answer import Stop
from trainwright.cli import app
from trainwright.cluster import Accelerator, Cluster, Device
from trainwright.cost.estimate import estimate_with_context
from trainwright.cost.work_bound import work_bound_seconds
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.report.comparison import ComparisonRow, comparison_table, work_bound
from trainwright.report.explanation import Explanation
from trainwright.report.plan_summary import degrees, lines, short_names, strategies
from trainwright.report.tables import candidate_table
from trainwright.report.units import seconds
from trainwright.runtime import Runtime
from trainwright.search import Candidate, Problem, run
from trainwright.search.candidates import candidate_of, fitting_candidate
from trainwright.strategy import Sharding, Strategy

MODEL = """
gpt: {layers: 6, hidden_size: 128, heads: 4, sequence_length: 64, vocabulary_size: 1000}
global_batch_size: 16
"""
MakeProblem = Callable[..., Problem]
MakeCluster = Callable[..., Cluster]
MakePlan = Callable[..., Plan]

runner = CliRunner()


@pytest.fixture(scope="module")
def problem(make_problem: MakeProblem, make_cluster: MakeCluster) -> Problem:
    """Six fast devices and two slow ones, with prices."""
    bare = make_problem(make_cluster((("fast", 4), ("slow", 2), ("fast", 2))), layers=6, batch=16)
    accelerators = tuple(
        replace(one, price_per_hour=price) for one, price in zip(bare.cluster.accelerators, (2.0, 0.25), strict=True)
    )
    return replace(bare, cluster=replace(bare.cluster, accelerators=accelerators))


@pytest.fixture
def files(tmp_path: Path, problem: Problem) -> Path:
    (tmp_path / "cluster.json").write_text(documents.dumps(problem.cluster))
    (tmp_path / "model.yaml").write_text(MODEL)
    (tmp_path / "profiles.json").write_text(documents.dumps(problem.profiles))
    return tmp_path


FILES = {"cluster": "cluster.json", "model": "model.yaml", "profiles": "profiles.json"}


def call(folder: Path, command: str, *more: str) -> Result:
    given_files = [part for kind, name in FILES.items() for part in (f"--{kind}", name)]
    arguments = [str(folder / a) if a.endswith((".json", ".yaml")) else a for a in (*given_files, *more)]
    return runner.invoke(app, [*quickly(command), *arguments])


def answered(result: Result) -> str:
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(result: Result) -> str:
    assert result.exit_code == 2, result.output
    assert not result.stdout
    assert result.stderr.count("\n") == 1
    return result.stderr


def unequal(problem: Problem) -> Plan:
    """Two pipelines; in the first, stages of three kinds."""
    devices = problem.cluster.devices
    first = Pipeline(
        2,
        6,
        (
            Stage(devices[:2], (LayerRun(0, 4, Strategy(1, 2), (4, 2)),)),
            Stage(
                devices[2:4],
                (LayerRun(4, 2, Strategy(2, 1, recompute=True), (6,)), LayerRun(6, 1, Strategy(1, 2), (3, 3))),
            ),
            Stage(devices[4:5], (LayerRun(7, 1, Strategy(1, 1), (6,)),)),
        ),
    )
    second = Pipeline(1, 4, (Stage(devices[6:8], (LayerRun(0, 8, Strategy(1, 2, sharding=Sharding.ZERO1), (2, 2)),)),))
    return Plan(8, 16, (first, second))


def test_summary_lists_every_stage_when_stages_differ(problem: Problem) -> None:
    plan = unequal(problem)
    assert plan.summary() == ("pp3 mb2–6×2 [4 dp2 tp1 | 3 dp1–2 tp1–2 | 1 dp1 tp1] + pp1 dp2 tp1 mb2×1 [8]")
    assert degrees(plan) == "pp3 dp2 tp1 | dp1–2 tp1–2 | dp1 tp1 + pp1 dp2 tp1"
    assert lines(plan, problem.cluster) == (
        "pp3 dp2 tp1 rows 2–4 fast\n    dp1–2 tp1–2 fast\n    dp1 tp1 slow\npp1 dp2 tp1 fast",
        "2–6×2\n\n\n2×1",
        "4\n3\n1\n8",
        "node-1:0–1\nnode-1:2–3\nnode-2:0\nnode-3",
        "0: 12 of 16 rows\n\n\n1: 4 of 16 rows",
    )
    told = [strategies(stage) for stage in plan.pipelines[0].stages]
    assert told == ["dp2 tp1 rows 4 2", "2 × dp1 tp2 recompute\n1 × dp2 tp1", "dp1 tp1"]
    assert strategies(plan.pipelines[1].stages[0]) == "dp2 tp1 zero1"


def test_stages_that_differ_in_their_accelerators_alone_take_a_line_each(problem: Problem) -> None:
    fast, slow = problem.cluster.devices[:3], problem.cluster.devices[4:7]

    def plan(*devices: Device) -> Plan:
        runs = [LayerRun(2 * number, 2, Strategy(1, 1), (1,)) for number in range(len(devices))]
        stages = tuple(Stage((device,), (run,)) for device, run in zip(devices, runs, strict=True))
        return Plan(2 * len(devices), 1, (Pipeline(1, 1, stages),))

    told = [lines(plan(*devices), problem.cluster) for devices in ((fast[0], slow[0]), (slow[0], fast[0]), fast[:1])]
    assert [one.degrees for one in told] == [
        "pp2 dp1 tp1 fast\n    dp1 tp1 slow",
        "pp2 dp1 tp1 slow\n    dp1 tp1 fast",
        "pp1 dp1 tp1",
    ]
    in_turn = lines(plan(*chain.from_iterable(zip(fast, slow, strict=True))), problem.cluster)
    assert in_turn == ("pp6 dp1 tp1", "1×1", "2 2 2 2 2 2", "node-1:0–2, node-2, node-3:0", "0: 1 of 1 rows")


def test_summary_stays_short_when_many_stages_differ(problem: Problem) -> None:
    devices = problem.cluster.devices
    sizes = (1, 2, 1, 2, 1)
    stages, used = [], 0
    for number, size in enumerate(sizes):
        count = 4 if number == 4 else 1
        stages.append(
            Stage(devices[used : used + size], (LayerRun(number, count, Strategy(1, size), (4 // size,) * size),))
        )
        used += size
    plan = Plan(8, 16, (Pipeline(4, 4, tuple(stages)),))
    assert degrees(plan) == "pp5 dp1–2 tp1"
    assert plan.summary() == "pp5 mb2–4×4 [1 dp1 tp1 | 1 dp2 tp1 | 1 dp1 tp1 | 1 dp2 tp1 | 4 dp1 tp1]"


def test_accelerators_have_short_names_when_these_are_unique(make_cluster: MakeCluster) -> None:
    def named(*names: str) -> dict[str, str]:
        cluster = make_cluster((("fast", 1),))
        return short_names(replace(cluster, accelerators=(*cluster.accelerators, *(Accelerator(n, 1) for n in names))))

    assert named("NVIDIA-A100-SXM4-40GB", "Tesla-V100-SXM2-16GB", "Tesla-T4", "Gaudi") == {
        "emulated-fast": "fast",
        "NVIDIA-A100-SXM4-40GB": "A100",
        "Tesla-V100-SXM2-16GB": "V100",
        "Tesla-T4": "T4",
        "Gaudi": "Gaudi",
    }
    assert named("A100-40GB", "A100-80GB")["A100-40GB"] == "A100-40GB"


def test_explain_covers_a_plan_of_unequal_stages(problem: Problem) -> None:
    plan = unequal(problem)
    told = Explanation.of(problem, plan, estimate_with_context(plan, problem.cost_context)).sentences()
    assert told[1] == ("2 pipelines share the batch: 12 rows (75.0%) on 5 devices, 4 rows (25.0%) on 2 devices.")


def test_table_keeps_the_lines_of_an_unequal_plan_together(
    problem: Problem, capsys: pytest.CaptureFixture[str]
) -> None:
    from trainwright.cli.output import show

    show(candidate_table([candidate_of(problem, unequal(problem))], problem, planner="ours", searched=1.0))
    lines_of_table = capsys.readouterr().out.splitlines()
    first = next(number for number, line in enumerate(lines_of_table) if "pp3" in line)
    assert "6×2" in lines_of_table[first]
    assert lines_of_table[first + 2].split()[:4] == ["dp1", "tp1", "slow", "1"]
    assert " ".join(lines_of_table[first + 3].split()).startswith("1: 4 of 16 rows pp1 dp2 tp1 fast 2×1")


def test_tolerance_prefers_the_simpler_plan_and_reports_the_trade(files: Path, problem: Problem) -> None:
    # Where gradients are reduced after the backward, the fastest plan is not the simplest one.
    (files / "runtime.json").write_text(documents.dumps(Runtime(overlaps_gradients=False)))
    asked = ("--planner", "megatron", "--runtime", "runtime.json")
    fastest = json.loads(answered(call(files, "plan", *asked, "--output", "json")))["candidates"][0]
    found = json.loads(answered(call(files, "plan", *asked, "--tolerance", "0.3", "--output", "json")))["candidates"][0]
    assert "traded" not in fastest
    assert fastest["predicted_seconds"] < found["predicted_seconds"] <= 1.3 * fastest["predicted_seconds"]
    assert "slower by the estimate than the fastest, which needs" in found["traded"]
    for command in ("plan", "explain"):
        said = answered(call(files, command, *asked, "--tolerance", "0.3"))
        assert found["traded"].split(",")[0] in " ".join(said.split())
    assert ": --tolerance must be 0 or more" in refused(call(files, "plan", "--tolerance", "-2"))


def test_kept_plan_stays_or_moved_state_is_reported(files: Path, problem: Problem, make_plan: MakePlan) -> None:
    plan = make_plan(problem, (3, 2, 1, 2), data=2)
    (files / "keep.json").write_text(documents.dumps(plan))
    kept = ("--keep", "keep.json", "--keep-weight")
    answer = json.loads(answered(call(files, "plan", *kept, "1e6", "--top", "1", "--output", "json")))
    assert documents.parse(answer["candidates"][0]["plan"], Plan).in_any_format == plan
    assert (answer["candidates"][0]["moved_bytes"], answer["candidates"][0]["move_seconds"]) == (0, 0)
    own = answer["candidates"][0]["predicted_seconds"]
    assert answer["running_plan"] == {"predicted_seconds": own, "feasible": True, "reason": None}
    assert "It is the plan that runs now: nothing moves." in answered(call(files, "plan", *kept, "1e6"))
    free = " ".join(answered(call(files, "plan", *kept, "0")).split())
    change = json.loads(answered(call(files, "plan", *kept, "0", "--top", "1", "--output", "json")))["candidates"][0]
    assert f"The plan that runs now takes {seconds(own)} an iteration; changing to the first moves " in free
    iterations = math.ceil(change["move_seconds"] / (own - change["predicted_seconds"]))
    assert change["pays_off_after_iterations"] == iterations
    assert f"which takes {seconds(change['move_seconds'])} and pays off after {iterations} iteration" in free
    spared = (*kept, "1e6", "--spare", "node-3")
    told = " ".join(answered(call(files, "plan", *spared)).split())
    gone = "2 of its 8 devices are excluded (the first is node-3:0)"
    assert f"The plan that runs now cannot stay: {gone}; changing to the first moves" in told
    lost = json.loads(answered(call(files, "plan", *spared, "--top", "1", "--output", "json")))
    assert lost["running_plan"] == {"feasible": False, "reason": gone}
    lost = lost["candidates"][0]
    assert "pays_off_after_iterations" not in lost
    assert "node-3" not in {
        device["node"] for stage in lost["plan"]["pipelines"][0]["stages"] for device in stage["devices"]
    }
    other = replace(plan, model_layers=9, pipelines=(replace(plan.pipelines[0], stages=_one_layer_more(plan)),))
    (files / "keep.json").write_text(documents.dumps(other))
    assert "the plan is for a model of 9 layers, but that of " in refused(call(files, "plan", *kept, "1"))


def _one_layer_more(plan: Plan) -> tuple[Stage, ...]:
    *before, last = plan.pipelines[0].stages
    return (*before, replace(last, layers=(replace(last.layers[0], count=last.layers[0].count + 1),)))


def test_both_objectives_give_a_front_as_table_plot_and_json(files: Path) -> None:
    shown = answered(call(files, "plan", "--planner", "megatron", "--objective", "pareto"))
    assert "Front of time and cost of megatron" in shown
    assert "cost of 1000 rows, in the cluster's currency" in shown
    candidates = json.loads(
        answered(call(files, "plan", "--planner", "megatron", "--objective", "pareto", "--output", "json"))
    )["candidates"]
    seconds, prices = ([one[name] for one in candidates] for name in ("predicted_seconds", "price_per_row"))
    assert len(candidates) > 1
    assert seconds == sorted(seconds)
    assert prices == sorted(prices, reverse=True)


def test_front_is_refused_when_prices_are_missing(files: Path, problem: Problem) -> None:
    accelerators = tuple(replace(one, price_per_hour=None) for one in problem.cluster.accelerators)
    (files / "cluster.json").write_text(documents.dumps(replace(problem.cluster, accelerators=accelerators)))
    assert "planning for cost needs the price of every accelerator" in refused(
        call(files, "plan", "--planner", "megatron", "--objective", "pareto")
    )


def test_compare_shows_the_work_bound(files: Path, problem: Problem) -> None:
    answer = json.loads(answered(call(files, "compare", "megatron", "amp", "--output", "json")))
    bound = work_bound_seconds(problem.cost_context, problem.nodes, problem.global_batch_size)
    for found in answer["planners"]:
        assert found["work_bound_seconds"] == bound <= found["predicted_seconds"]
        assert not {"lower_bound_seconds", "gap", "stopped_by_budget"} & set(found)
    best = min(answer["planners"], key=lambda found: found["predicted_seconds"])
    table = " ".join(answered(call(files, "compare", "megatron", "amp")).split())
    assert "If every device computed all the time, an iteration would take" in table
    assert f"the plan of {best['planner']} takes {best['predicted_seconds'] / bound:.2f} times that." in table
    assert "gap" not in table


def test_every_planner_and_objective_gets_the_work_bound(files: Path) -> None:
    for options in (["megatron"], ["megatron", "--objective", "cost"]):
        answer = json.loads(answered(call(files, "plan", "--planner", *options, "--output", "json")))
        assert 0 < answer["work_bound_seconds"] <= answer["candidates"][0]["predicted_seconds"]


def test_work_bound_is_of_the_searched_batch(problem: Problem) -> None:
    candidate: Candidate = run("megatron", replace(problem, global_batch_size=32), top=1)[0]
    bound = work_bound_seconds(problem.cost_context, problem.nodes, 32)
    assert work_bound(candidate, problem).fields == {"work_bound_seconds": bound}
    (sentence,) = work_bound(candidate, problem).sentences
    assert sentence.endswith(f"this plan takes {candidate.estimate.iteration_seconds / bound:.2f} times that.")


def test_work_bound_is_left_out_when_layers_take_no_time(problem: Problem) -> None:
    layers = (replace(one, forward_seconds=0.0, backward_seconds=0.0) for one in problem.profiles.layers)
    timeless = replace(problem, profiles=replace(problem.profiles, layers=tuple(layers)))
    candidate: Candidate = run("megatron", timeless, top=1)[0]
    assert work_bound(candidate, timeless).fields == {"work_bound_seconds": 0.0}
    assert work_bound(candidate, timeless).sentences == ()


def test_effort_increases_the_number_of_costed_plans(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    costed = 0

    def counting(problem: Problem, plan: Plan) -> Candidate | None:
        nonlocal costed
        costed += 1
        return fitting_candidate(problem, plan)

    monkeypatch.setattr("trainwright.search.auto.local_search.fitting_candidate", counting)
    counts = []
    for effort in ("0.1", "0.5"):
        costed = 0
        answered(call(files, "plan", "--planner", "auto", "--effort", effort))
        counts.append(costed)
    assert counts[1] > 2 * counts[0] > 0


def test_plan_runs_auto_when_no_planner_is_named(files: Path) -> None:
    names = [f"--{kind}={files / name}" for kind, name in FILES.items()]
    for command in ("plan", "explain"):
        ours = answered(runner.invoke(app, [command, *names, "--planner=auto", "--budget-seconds=0"]))
        assert (
            answered(runner.invoke(app, [command, *names, "--budget-seconds=0"])).splitlines()[:4]
            == ours.splitlines()[:4]
        )
    assert "Candidates of auto" in answered(runner.invoke(app, ["plan", *names, "--budget-seconds=0"]))


def test_plan_reports_when_the_budget_stopped_the_search(
    files: Path, problem: Problem, capsys: pytest.CaptureFixture[str]
) -> None:
    from trainwright.cli.output import show

    answer = json.loads(answered(call(files, "compare", "amp", "--budget-seconds", "0", "--output", "json")))
    assert answer["planners"][0]["stopped_by_budget"] is True
    shown = answered(call(files, "compare", "megatron", "amp", "--budget-seconds", "0"))
    assert "amp: stopped before its end; it may have left better plans out" in shown
    planned = answered(call(files, "plan", "--planner", "amp", "--budget-seconds", "0"))
    assert "The search was stopped by its budget" in planned
    ample = json.loads(answered(call(files, "plan", "--planner", "amp", "--budget-seconds", "600", "--output", "json")))
    assert "stopped_by_budget" not in ample
    show(comparison_table([ComparisonRow("ours", 1.0, None, "nothing here", Stop.INTERRUPTION)], problem))
    assert "1 s (stopped)" in capsys.readouterr().out


def test_plan_and_explain_show_the_work_bound(files: Path) -> None:
    answer = json.loads(answered(call(files, "plan", "--planner", "amp", "--top", "1", "--output", "json")))
    seconds = answer["candidates"][0]["predicted_seconds"]
    assert answer["work_bound_seconds"] <= seconds
    assert not {"lower_bound_seconds", "gap"} & set(answer)
    for command in ("plan", "explain"):
        said = " ".join(answered(call(files, command, "--planner", "amp")).split())
        assert "If every device computed all the time, an iteration would take" in said
        assert f"this plan takes {seconds / answer['work_bound_seconds']:.2f} times that." in said
