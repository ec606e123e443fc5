"""Launchers: a plan goes the same way with each, and keeps the one that it has."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import flow_world
import golden_decisions
import pytest
from flow_harm import fail_pods, running
from flow_world import START, World, node, spec_of

from trainwright.worker_api import Gang, GangNode, LinkTask
from trainwright_operator.api.spec import LauncherKind
from trainwright_operator.flow.gangs.gang_spec import GangSpec
from trainwright_operator.flow.gangs.launchers.registry import LAUNCHERS
from trainwright_operator.flow.names import PLACEMENT_GATE, Names
from trainwright_operator.flow.phase import ReconcileContext

JOB_SET, PYTORCH_JOB = LauncherKind.JOB_SET, LauncherKind.PYTORCH_JOB
JOB_WORDS = ("create PyTorchJob", "delete PyTorchJob", "dry-run PyTorchJob", "pin pod")


def reported(trace: golden_decisions.Trace) -> list[Any]:
    """Return what a user sees of each pass: when it was, the status, the Events; and what is stored."""
    shown = ([line for line in one["actions"] if not line.startswith(JOB_WORDS)] for one in trace)
    return [(one["seconds"], lines) for one, lines in zip(trace, shown, strict=True)]


@pytest.mark.parametrize("scenario", [name for name in golden_decisions.SCENARIOS if name != "refused"])
def test_plan_of_jobsets_reports_and_stores_the_same_at_the_same_time(
    scenario: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(flow_world.ASKED, "launcher", JOB_SET)
    before = reported(golden_decisions.stored()[scenario])
    after = json.loads(
        json.dumps(reported(golden_decisions.trace(scenario))).replace("image.json,launcher", "image.json")
    )
    assert after == [list(one) for one in before]


def job_set(*nodes: GangNode, name: str = "demo") -> dict[str, Any]:
    snapshot = World().snapshot()
    context = ReconcileContext(replace(snapshot, plan=replace(snapshot.plan, name=name)), START)
    (made,) = LAUNCHERS[JOB_SET].manifests(context, GangSpec("candidate-32s", LinkTask(gang=Gang(nodes=nodes)), 60, 60))
    return made


UNEQUAL = (
    GangNode("n1", (0,), "t4"),
    GangNode("n2", (0, 1), "v100"),
    GangNode("n3", (0,), "v100"),
    GangNode("n4", (0,), "t4"),
)


def test_unequal_gang_is_one_jobset_with_a_job_for_each_accelerator_and_device_count() -> None:
    jobs = job_set(*UNEQUAL)["spec"]["replicatedJobs"]
    pods = [job["template"]["spec"]["template"]["spec"] for job in jobs]
    assert [job["template"]["spec"]["completions"] for job in jobs] == [2, 1, 1]
    assert [pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] for pod in pods] == ["1", "2", "1"]
    assert all(pod["schedulingGates"] == [{"name": PLACEMENT_GATE}] for pod in pods)
    name = job_set(*UNEQUAL)["metadata"]["name"]
    assert all(pod["containers"][0]["args"][1] == f"{name}-s0-0-0.{name}" for pod in pods)


def test_names_of_a_jobsets_pods_fit_into_63_characters() -> None:
    made = job_set(*(GangNode(f"n{number}", (0,), "t4") for number in range(100)), name="a" * 40)
    name, first = made["metadata"]["name"], made["spec"]["replicatedJobs"][0]["name"]
    assert len(f"{name}-{first}-0-99-abcde") <= 63


def test_pods_of_a_jobset_that_failed_stay_until_the_cause_is_read() -> None:
    """A Job that failed would take the other Jobs' pods with it; one below its limit only replaces its own pods."""
    world = World(spec=spec_of(launcher=JOB_SET))
    world.run(until=lambda: running(world, "candidate-1"))
    fail_pods(world, "candidate-1", termination_message="", exit_code=7)
    for name, pod in list(world.pods.items()):
        if pod.gang == "candidate-1":
            later = replace(
                pod, name=f"{name}2", phase="Pending", node="", gates=(PLACEMENT_GATE,), created_at=world.now,
                containers=(), started_at=None, affinity=None,
            )  # fmt: skip
            world.pods[later.name] = later
    world.run()
    assert world.trial("candidate-1").reason == "Crashed"
    assert "exit code 7" in str(world.trial("candidate-1").message)


@pytest.mark.usefixtures("each_launcher")
def test_gang_begins_anew_once_the_former_ones_pods_terminate() -> None:
    """A JobSet is gone before its pods, which have the places of the next one's."""
    world = World()
    world.run(until=lambda: running(world, "links"))
    left = {name: pod for name, pod in world.pods.items() if pod.gang == "links"}
    suspended = world.spec.model_copy(update={"suspend": True})
    world.spec, spec, world.generation = suspended, world.spec, world.generation + 1
    world.step()
    world.spec, world.generation = spec, world.generation + 1
    world.pods |= left
    for _ in range(3):
        world.step()
    assert not world.jobs
    world.pods |= {name: replace(pod, terminating=True) for name, pod in left.items()}
    world.step()
    world.step()
    assert world.jobs


@pytest.mark.parametrize("nodes", [UNEQUAL, UNEQUAL[:1]])
@pytest.mark.parametrize("kind", LauncherKind)
def test_each_node_of_a_gang_has_one_place_and_the_first_comes_first(
    kind: LauncherKind, nodes: tuple[GangNode, ...]
) -> None:
    places = LAUNCHERS[kind].places(Names.of("demo", "uid", spec_of()), "links", Gang(nodes=nodes))
    assert places[0][1] == nodes[0]
    assert sorted(node.name for _, node in places) == [node.name for node in nodes]
    assert len({place for place, _ in places}) == len(places)


def kinds(world: World) -> set[LauncherKind]:
    return {job.launcher for job in world.jobs.values()}


def test_plan_without_a_wish_uses_jobset_where_pytorchjob_is_missing_and_keeps_it() -> None:
    world = World(missing=frozenset({PYTORCH_JOB}))
    world.run(until=lambda: running(world, "links"))
    assert (kinds(world), world.status.launcher) == ({JOB_SET}, JOB_SET)
    assert not any("Missing" in event.reason for event in world.events)
    world.missing = frozenset()
    world.change(trials={"topK": 1})
    while world.succeeded == "Unknown":
        world.step()
        assert kinds(world) <= {JOB_SET}
    assert (world.succeeded, world.status.launcher) == ("True", JOB_SET)


def test_plan_without_a_wish_uses_pytorchjob_where_both_are() -> None:
    world = World()
    world.run(until=lambda: running(world, "links"))
    assert (kinds(world), world.status.launcher) == ({PYTORCH_JOB}, None)


def test_plan_waits_until_either_launcher_comes() -> None:
    world = World(missing=frozenset(LauncherKind))
    for _ in range(60):
        world.step()
    words = world.condition("Succeeded")
    assert (words.status, words.reason) == ("Unknown", "PyTorchJobCRDMissing")
    assert "training operator or JobSet" in words.message
    assert [event.reason for event in world.events].count("PyTorchJobCRDMissing") == 1
    world.missing = frozenset({PYTORCH_JOB})
    world.run()
    assert world.succeeded == "True"


@pytest.mark.parametrize(("kind", "reason"), [(PYTORCH_JOB, "PyTorchJobCRDMissing"), (JOB_SET, "JobSetCRDMissing")])
def test_plan_waits_for_the_launcher_that_it_asks_for(kind: LauncherKind, reason: str) -> None:
    world = World(spec=spec_of(launcher=kind), missing=frozenset({kind}))
    for _ in range(5):
        world.step()
    words = world.condition("Succeeded")
    assert (words.status, words.reason) == ("Unknown", reason)
    assert "or JobSet" not in words.message
    world.missing = frozenset()
    world.run()
    assert world.succeeded == "True"


@pytest.mark.parametrize(("before", "after"), [(PYTORCH_JOB, JOB_SET), (JOB_SET, PYTORCH_JOB)])
def test_gang_that_runs_keeps_its_launcher_and_the_next_has_the_new_one(
    before: LauncherKind, after: LauncherKind
) -> None:
    world = World(spec=spec_of(launcher=before))
    world.run(until=lambda: running(world, "profile-1"))
    pods, created = set(world.pods), len(world.created)
    world.change(launcher=after)
    world.step(1)
    world.step(1)
    assert set(world.pods) == pods
    world.run(until=lambda: running(world, "candidate-1"))
    assert kinds(world) == {after}
    world.run()
    assert world.succeeded == "True"
    assert not any(name.endswith(("-links", "-links-order", "-profile-1-order")) for name in world.created[created:])


def test_gang_of_a_former_version_is_one_of_pytorchjobs() -> None:
    """Tasks did not name their launcher."""
    world = World(nodes=(node("n1"), node("n2")))
    world.run(until=lambda: running(world, "links"))
    (task,) = (one for one in world.stored.values() if one.role == "order")
    assert set(task.data) == {"order.json", "image.json"}
    assert LAUNCHERS[PYTORCH_JOB].places(world.snapshot().names(), "links", world.order_of(
        next(iter(world.pods.values()))).gang)  # fmt: skip
