"""Status of a measured trial."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from flow_reports import report_of
from flow_world import START, World, node, spec_of

import trainwright
from trainwright import documents
from trainwright.cluster import Cluster
from trainwright.plan import Plan
from trainwright.search import Candidate
from trainwright.throughput import throughput
from trainwright.training import Training
from trainwright.worker_api import RankMemory, TrialReport
from trainwright_operator.flow.documents.number_formats import model_from_spec
from trainwright_operator.flow.documents.outcome import GangOutcome, GangResult, OutcomeState
from trainwright_operator.flow.documents.planned_trials import PlannedTrial, Role
from trainwright_operator.flow.reasons import Reason
from trainwright_operator.flow.trials.trial_status import ended
from trainwright_operator.search_process import order_trials

EXAMPLES = Path(__file__).resolve().parents[3] / "deploy" / "examples" / "planner"

VIT = {"layers": 2, "hiddenSize": 64, "heads": 4, "imageSize": 32, "patchSize": 8, "classes": 10}


def measured(world: World, *seconds: float):
    """Return the first trial's status in a world whose trials took the given seconds."""

    def report(order):
        found = report_of(order)
        return replace(found, iteration_seconds=seconds) if isinstance(found, TrialReport) else found

    world.report = report
    return world.run().trials[0]


def small(**changes: object) -> World:
    return World(spec=spec_of(trials={"topK": 1}, **changes), nodes=(node("n1"),))


def test_measured_trial_reports_spread_throughput_and_utilisation() -> None:
    world = small()
    found = measured(world, 0.4, 0.2, 0.25)
    assert (found.shortest_seconds, found.measured_seconds, found.longest_seconds) == (0.2, 0.25, 0.4)
    assert found.tokens_per_second == 8 * 64 / 0.25
    cluster = documents.loads(world.stored[world.status.cluster_ref.config_map].data["document.json"], Cluster)
    plan = documents.parse(world.status.winner.plan, Plan)
    expected = throughput([0.25], plan, model_from_spec(world.spec), cluster).utilisation
    assert found.model_flop_utilisation == pytest.approx(expected, rel=1e-4)
    assert found.peak_memory_bytes == 1000
    assert found.dump()["modelFlopUtilisation"] > 0


def test_trial_status_omits_unknown_figures() -> None:
    assert "tokensPerSecond" not in measured(small(model={"vit": VIT}), 0.2).dump()
    world = World(spec=spec_of(trials={"topK": 1}), nodes=(node("n1", "Unheard-of-X1"),))
    found = measured(world, 0.2).dump()
    assert "modelFlopUtilisation" not in found
    assert found["tokensPerSecond"] == 8 * 64 / 0.2


def test_trial_reports_peak_memory_of_fullest_device_and_no_figures_when_failed() -> None:
    world = small()
    measured(world, 0.2)
    plan = documents.parse(world.status.winner.plan, Plan)
    cluster = documents.loads(world.stored[world.status.cluster_ref.config_map].data["document.json"], Cluster)
    planned = PlannedTrial("candidate-1", Role.CANDIDATE, False, 1, 1, 0.2, 1, "", plan)
    report = TrialReport((0.2,), (1.0,), (RankMemory("n1", 0, 5), RankMemory("n1", 1, 7)))
    for state in OutcomeState:
        result = GangResult(GangOutcome(state, Reason.CRASHED, "so it ended", START), report)
        status = ended(planned, result, "demo-candidate-1-result", model_from_spec(world.spec), cluster).status
        assert status.peak_memory_bytes == (None if state is OutcomeState.FAILED else 7)
        assert status.result_ref.config_map == "demo-candidate-1-result"


def test_trials_that_differ_in_sharding_alone_have_different_summaries() -> None:
    problem = trainwright.problem(
        trainwright.read(EXAMPLES / "mixed-cluster.yaml", Cluster), trainwright.read(EXAMPLES / "model.yaml", Training)
    )
    plans = [trainwright.plan_in_words(words, problem) for words in ("pp1 dp4 tp1 mb1", "pp1 dp4 tp1 mb1 zero1")]
    first, second = order_trials([Candidate(plan, trainwright.estimate(plan, problem)) for plan in plans], [])
    assert second.summary == f"{first.summary} zero1"
