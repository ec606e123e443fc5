"""A plan from creation to its winner, in the simulated cluster."""

from __future__ import annotations

import re

import pytest
from flow_world import World, node, spec_of

from trainwright import documents
from trainwright.plan import Plan
from trainwright.report import plan_summary

PHASES = ("Accepted", "NodesDiscovered", "LinksMeasured", "Profiled", "Planned", "TrialsCompleted", "Succeeded")


def test_every_phase_becomes_true_and_the_winner_is_complete() -> None:
    world = World()
    status = world.run()
    assert [world.condition(kind).status for kind in PHASES] == ["True"] * len(PHASES)
    assert world.condition("Succeeded").reason == "BestTrialSelected"
    assert status.phase == "Succeeded"
    assert status.progress is None
    winner = status.winner
    measured = {trial.name: trial.measured_seconds for trial in status.trials}
    assert winner.measured_seconds == min(measured.values())
    assert measured[winner.trial] == winner.measured_seconds
    baselines = [trial.measured_seconds for trial in status.trials if trial.role == "Baseline"]
    assert winner.speedup_over_baseline == pytest.approx(min(baselines) / winner.measured_seconds, rel=1e-4)
    assert winner.emulated is True
    plan = documents.parse(winner.plan, Plan, source="winner.plan")
    assert plan_summary.name(plan) == winner.summary


def test_finished_plan_keeps_results_and_runs_nothing() -> None:
    world = World()
    status = world.run()
    assert world.jobs == {}
    assert world.pods == {}
    assert not [name for name in world.stored if name.endswith("-order")]
    for reference in (status.cluster_ref, status.links_ref, status.profiles_ref, status.candidates_ref):
        assert reference.config_map in world.stored
    assert world.decide() == []


def test_each_true_condition_emits_one_event() -> None:
    world = World()
    world.run()
    told = [event.message.split(":")[0] for event in world.events if event.type == "Normal"]
    news = [(event.reason, event.message.split(":")[0]) for event in world.events]
    assert set(PHASES) <= set(told)
    assert len(news) == len(set(news)), news


def test_candidates_and_baselines_alternate_one_at_a_time() -> None:
    world = World()
    most_at_once = 0

    def done() -> bool:
        nonlocal most_at_once
        trials = {job.gang for job in world.jobs.values() if job.gang.startswith(("candidate", "baseline"))}
        most_at_once = max(most_at_once, len(trials))
        return world.succeeded != "Unknown"

    status = world.run(until=done)
    assert most_at_once == 1
    assert [trial.name for trial in status.trials] == [
        "candidate-1", "baseline-1", "candidate-2", "baseline-2", "candidate-3",
    ]  # fmt: skip
    starts = [trial.start_time for trial in status.trials]
    assert starts == sorted(starts)


def test_plan_found_by_search_and_heuristic_is_tried_once_for_both() -> None:
    world = World(nodes=(node("n1"),), spec=spec_of(links={"collectives": False}))
    status = world.run()
    summaries = [trial.summary for trial in status.trials]
    assert len(summaries) == len(set(summaries))
    assert {trial.role for trial in status.trials} == {"Candidate"}
    assert status.winner.speedup_over_baseline is not None


def test_best_prediction_wins_without_trials() -> None:
    world = World(spec=spec_of(trials={"topK": 0}))
    status = world.run()
    assert (world.condition("Succeeded").status, world.condition("Succeeded").reason) == ("True", "PlannedOnly")
    assert status.winner.trial is None
    assert status.winner.measured_seconds is None
    assert status.winner.predicted_rank == 1
    assert status.trials == ()
    assert not [name for name in world.created if "candidate-1" in name]


def test_single_device_needs_no_links_for_its_answer() -> None:
    world = World(nodes=(node("n1", devices=1),))
    world.run()
    assert world.condition("LinksMeasured").reason == "NotNeeded"
    assert world.succeeded == "True"


def test_each_pod_shape_becomes_one_job_when_node_sizes_differ() -> None:
    world = World(nodes=(node("n1", devices=1), node("n2", devices=2), node("n3", devices=1)))
    world.run(until=lambda: any(pod.gang == "links" and pod.phase == "Running" for pod in world.pods.values()))
    where = {(pod.job.rpartition("-links")[2], pod.role, pod.index): pod.node for pod in world.pods.values()}
    assert where == {("", "master", 0): "n1", ("", "worker", 0): "n3", ("-s1", "master", 0): "n2"}
    assert world.run().winner is not None


def test_plan_is_deleted_after_its_ttl() -> None:
    world = World(spec=spec_of(ttlSecondsAfterFinished=30, trials={"topK": 0}))
    world.run()
    world.step(20)
    assert not world.deleted
    world.step(20)
    world.step(0)
    assert world.deleted


def test_time_to_live_counts_from_the_last_failure() -> None:
    world = World(spec=spec_of(ttlSecondsAfterFinished=100), image="")
    world.run()
    world.pass_time(90)
    world.change(ttlSecondsAfterFinished=100, priority=1)
    world.run()
    world.pass_time(80)
    world.step()
    assert (world.succeeded, world.deleted) == ("False", False)
    world.pass_time(20)
    world.step()
    assert world.deleted


def test_status_says_why_the_best_plan_is_faster_than_the_heuristic() -> None:
    world = World()
    world.run(until=lambda: world.condition("Planned").status == "True")
    message = world.condition("Planned").message
    assert re.search(r"; it takes (as long as|[0-9.]+ m?s (less|more) than) the heuristic's plan", message)


def test_plan_waits_for_capacity_until_devices_are_free() -> None:
    world = World(others={"n2": 1})
    for _ in range(20):
        world.step()
    condition = world.condition("LinksMeasured")
    assert condition.reason == "WaitingForCapacity"
    assert "node n2 has 1 of 2 needed devices free" in condition.message
    assert all(pod.gates for pod in world.pods.values()), "all or none"
    world.others = {}
    world.run()
    assert world.succeeded == "True"


def test_suspension_frees_devices_and_keeps_measurements() -> None:
    world = World()
    world.run(until=lambda: any(job.gang == "candidate-1" for job in world.jobs.values()))
    profiles = {name for name in world.stored if "-profile-" in name and name.endswith("-result")}
    world.spec = world.spec.model_copy(update={"suspend": True})
    world.generation += 1
    for _ in range(3):
        world.step()
    assert world.jobs == {}
    assert world.status.phase == "Suspended"
    assert world.condition("Profiled").status == "True"
    assert world.status.trials
    world.spec = world.spec.model_copy(update={"suspend": False})
    world.generation += 1
    before = len(world.created)
    world.run()
    assert world.succeeded == "True"
    assert profiles <= set(world.stored)
    assert not [name for name in world.created[before:] if "profile" in name], "nothing is measured twice"


def test_raised_top_k_tries_only_new_plans() -> None:
    world = World(spec=spec_of(trials={"topK": 1}))
    first = world.run()
    world.spec = spec_of(trials={"topK": 2})
    world.generation += 1
    before = len(world.created)
    world.step()
    status = world.run()
    created = [name.split("-", 2)[2] for name in world.created[before:]]
    assert "candidate-2" in created
    assert not {"links", "profile-1", "candidate-1", "baseline-1"} & set(created)
    assert len(status.trials) == len(first.trials) + 1


def test_another_worker_image_repeats_all_measurements() -> None:
    world = World(spec=spec_of(trials={"topK": 0}))
    world.run()
    world.spec = spec_of(trials={"topK": 0}, worker={"image": "worker:2"})
    world.generation += 1
    before = len(world.created)
    world.step()
    world.run()
    assert any(name.endswith("-links-result") for name in world.created[before:])
