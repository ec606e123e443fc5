"""Doubt about a speed-up on a CPU: ranges that overlap, and other programs."""

from __future__ import annotations

import random

import pytest
from flow_world import World, node, spec_of

from trainwright.cluster import Device
from trainwright.operator_shardings import LayerSpecs, SpanSpecs
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.strategy import Strategy
from trainwright.worker_api import TrialReport
from trainwright_operator.flow.documents.planned_trials import PlannedTrial, Role
from trainwright_operator.flow.phase import MeasuredTrial
from trainwright_operator.flow.trials.comparison import explain_doubt, explain_operators


def report(seconds: float, spread: float = 0.0, *, cores: float | None = 0.0, seed: int = 0) -> TrialReport:
    generator = random.Random(seed)
    times = tuple(seconds * (1 + spread * generator.uniform(-1, 1)) for _ in range(10))
    return TrialReport(times, (1.0,), disturbing_cores=cores)


def test_plans_that_differ_by_half_are_told_apart_beside_one_slow_iteration() -> None:
    slow = report(1.0, 0.1)
    winner = TrialReport((*slow.iteration_seconds[:-1], 9.0), (1.0,), disturbing_cores=0.1)
    assert not explain_doubt(winner, report(1.5, 0.1, seed=1))


@pytest.mark.parametrize("seed", range(20))
def test_equal_plans_are_not_told_apart(seed: int) -> None:
    faster, slower = sorted(
        (report(1.0, 0.05, seed=seed), report(1.0, 0.05, seed=seed + 100)), key=lambda each: sum(each.iteration_seconds)
    )
    assert explain_doubt(faster, slower).startswith("its iterations took up to")


def test_plans_within_three_per_cent_are_not_told_apart() -> None:
    assert explain_doubt(report(1.0), report(1.029))
    assert not explain_doubt(report(1.0), report(1.05))


def test_disturbed_trial_proves_nothing() -> None:
    assert "other programs took up to 0.8 cores" in explain_doubt(report(1.0), report(3.0, cores=0.8))


def test_trials_off_a_cpu_are_compared_by_their_medians_alone() -> None:
    assert not explain_doubt(report(1.0, cores=None), report(1.001, cores=None))


def measured(name: str, seconds: float, *, has_operators: bool, cores: float | None = None) -> MeasuredTrial:
    device = Device("node", 0)
    specs = SpanSpecs((1, 1), (LayerSpecs(0, "block", ()),)) if has_operators else None
    stage = Stage((device,), (LayerRun(0, 1, Strategy(1, 1), (1,)),), specs)
    plan = Plan(1, 1, (Pipeline(1, 1, (stage,)),))
    trial = PlannedTrial(name, Role.CANDIDATE, False, 1, 1, 1.0, 1, plan.summary(), plan)
    return MeasuredTrial(seconds, trial, report(seconds, cores=cores))


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.5, "; shardings of operators beat degrees alone: sharded took 0.5 s, plain 1 s"),
        (2.0, "; shardings of operators did not beat degrees alone: sharded took 2 s, plain 1 s"),
    ],
)
def test_answer_says_whether_shardings_of_operators_beat_the_best_of_degrees(seconds: float, words: str) -> None:
    sharded = measured("sharded", seconds, has_operators=True)
    others = [measured("plain", 1.0, has_operators=False), measured("slow", 3.0, has_operators=False)]
    assert explain_operators([*others, sharded]) == words
    assert not explain_operators(others)
    assert not explain_operators([sharded])


def test_shardings_within_the_unrest_of_a_cpu_are_not_told_apart() -> None:
    trials = [measured(name, 1.0, has_operators=name == "a", cores=0.0) for name in "ab"]
    assert explain_operators(trials) == (
        "; shardings of operators and degrees alone are not told apart: a took 1 s, b 1 s"
    )


def test_trials_of_alpa_run_plans_of_both_sorts() -> None:
    mixture = {
        "layers": 2, "hiddenSize": 64, "heads": 4, "sequenceLength": 64, "vocabularySize": 512, "experts": 4,
        "intermediateSize": 2048,
    }  # fmt: skip
    spec = spec_of(
        model={"moe": mixture},
        training={"globalBatchSize": 4, "dtype": "float32"},
        search={"planner": "Alpa"},
        trials={"topK": 3},
    )
    world = World(nodes=(node("n1"), node("n2")), spec=spec)
    world.run()
    assert {"operators" in trial.summary for trial in world.status.trials} == {True, False}
    assert "; shardings of operators did not beat degrees alone: candidate-" in world.condition("Succeeded").message
