"""A plan that users, nodes and other workloads change at random: it comes to its answer, and repeats nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from flow_harm import fail_pods
from flow_world import World, node, spec_of
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from trainwright.worker_api import TrialSeriesTask, TrialTask, WorkerTask
from trainwright_operator.flow.actions import StoredRole
from trainwright_operator.flow.documents.planned_trials import plan_digest
from trainwright_operator.flow.phase import ReconcileContext
from trainwright_operator.flow.snapshot import PodFacts
from trainwright_operator.flow.trials.device_time import trial_device_seconds

NODES = (node("n1", devices=1), node("n2", devices=1), node("n3", "emulated-t4", devices=1))
PASSES = 600
"""Passes within which a plan that nothing disturbs has its answer: back-offs take minutes."""


class CountingWorld(World):
    """World that counts the device time of trials and the measurements that come to their end, as they happen."""

    used_seconds = 0.0

    def __post_init__(self) -> None:
        self.finished = Counter[tuple[str, str]]()
        super().__post_init__()

    @property
    def counted_seconds(self) -> float:
        """Return the device time that the operator counts."""
        return trial_device_seconds(ReconcileContext(self.snapshot(), self.now))

    def pods_of(self, gang: str) -> list[PodFacts]:
        return [pod for pod in self.pods.values() if pod.gang == gang]

    def edit(self, **changes: Any) -> None:
        self.spec = self.spec.model_copy(update=changes)
        self.generation += 1

    def pass_time(self, seconds: float) -> None:
        for gang in {job.gang for job in self.jobs.values()}:
            pods = self.pods_of(gang)
            order = self.order_of(pods[0]) if pods else None
            if (
                isinstance(order, TrialTask | TrialSeriesTask)
                and len(pods) == len(order.gang.nodes)
                and all(pod.phase == "Running" for pod in pods)
            ):
                self.used_seconds += seconds * sum(len(one.slots) for one in order.gang.nodes)
        super().pass_time(seconds)

    def _finish(self, gang: str, order: WorkerTask, fault: str | None) -> None:
        if len(self.pods_of(gang)) < len(order.gang.nodes):
            return  # the others wait for the pod that is gone
        base = self.snapshot().names().base
        plans = order.plans if isinstance(order, TrialSeriesTask) else [getattr(order, "plan", None)]
        self.finished.update((base, gang if plan is None else plan_digest(plan)) for plan in plans)
        super()._finish(gang, order, fault)


def go_on(world: CountingWorld, passes: int, seconds: float) -> None:
    for _ in range(passes):
        world.step(seconds)


def operator_is_away(world: CountingWorld, seconds: float) -> None:
    world.pass_time(seconds)


def operator_is_killed(world: CountingWorld, share: float) -> None:
    todo = world.decide()
    world.apply(todo[: round(share * len(todo))])
    world.restart()


def trials_are_edited(world: CountingWorld, top_k: int, per_gang: int) -> None:
    world.edit(trials=world.spec.trials.model_copy(update={"top_k": top_k, "per_gang": per_gang}))


def plan_is_suspended_or_resumed(world: CountingWorld) -> None:
    world.edit(suspend=not world.spec.suspend)


def node_changes(world: CountingWorld, number: int, state: str) -> None:
    known = NODES[number]
    changed = {
        "gone": [],
        "not ready": [replace(known, ready=False, ready_changed_at=world.now)],
        "cordoned": [replace(known, schedulable=False)],
        "another": [node(known.name, "emulated-t4" if number < 2 else "emulated-v100", devices=1)],
        "back": [known],
    }[state]
    world.nodes = (*(one for one in world.nodes if one.name != known.name), *changed)


def node_is_occupied(world: CountingWorld, number: int, devices: int) -> None:
    world.others = {**world.others, NODES[number].name: devices}


def pods_are_harmed(world: CountingWorld, number: int, way: str) -> None:
    unended = sorted(name for name, pod in world.pods.items() if pod.phase in ("Pending", "Running"))
    if not unended:
        return
    pod = world.pods[unended[number % len(unended)]]
    if way == "job deleted":
        world.delete_job(pod.job)
    elif way == "pod deleted":
        del world.pods[pod.name]
    elif pod.phase == "Running":
        fail_pods(world, pod.gang, exit_code=143)
        for one in world.pods_of(pod.gang):
            world.pods[one.name] = replace(one, reason="Evicted")
    # Nothing tells how long a pod ran that is gone.
    world.used_seconds = min(world.used_seconds, world.counted_seconds)


CHANGES = st.one_of(
    st.tuples(st.just(go_on), st.integers(1, 12), st.sampled_from([1.0, 2.0, 5.0, 11.0, 40.0])),
    st.tuples(st.just(operator_is_away), st.sampled_from([2.0, 12.0])),
    st.tuples(st.just(operator_is_killed), st.sampled_from([0.0, 0.3, 0.6, 1.0])),
    st.tuples(st.just(trials_are_edited), st.integers(1, 4), st.integers(1, 3)),
    st.tuples(st.just(plan_is_suspended_or_resumed)),
    st.tuples(st.just(node_changes), st.integers(0, 2), st.sampled_from(["gone", "not ready", "cordoned", "another", "back"])),
    st.tuples(st.just(node_is_occupied), st.integers(0, 2), st.integers(0, 1)),
    st.tuples(st.just(pods_are_harmed), st.integers(0, 5), st.sampled_from(["job deleted", "pod deleted", "evicted"])),
)  # fmt: skip


def small(per_gang: int, replan: str) -> CountingWorld:
    search = {"planner": "Megatron", "limits": {"maxTensorDegree": 1}}
    trials = {"topK": 3, "perGang": per_gang, "baseline": "None", "maxDeviceHours": 100, "maxFailed": 32}
    spec = spec_of(search=search, trials=trials, settlingSeconds=20, replan=replan)
    return CountingWorld(spec=spec, nodes=NODES)


def check(world: CountingWorld) -> None:
    assert not [one for one, times in world.finished.items() if times > 1], "measured twice"
    if world.spec.replan == "Never":
        assert world.counted_seconds >= world.used_seconds - 1e-6, "device time is not counted"


def end(world: CountingWorld) -> None:
    """Let the plan come to its answer undisturbed."""
    world.nodes, world.others = NODES, {}
    world.edit(suspend=False)
    for _ in range(PASSES):
        world.step(10.0)
        if world._is_answered:
            break
    else:
        raise AssertionError(f"no answer: {world.status.dump()}")
    world.step()
    assert world.succeeded == "True", world.condition("Succeeded").message
    assert not world.jobs
    assert not [one.name for one in world.stored.values() if one.role == StoredRole.TASK]


@examples(400, quick=20)
@given(st.sampled_from([1, 3]), st.sampled_from(["Never", "OnClusterChange"]), st.lists(CHANGES, max_size=40))
def test_plan_comes_to_its_answer_and_repeats_nothing(
    per_gang: int, replan: str, changes: Sequence[tuple[Any, ...]]
) -> None:
    world = small(per_gang, replan)
    for change, *how in changes:
        change(world, *how)
        check(world)
    end(world)
    check(world)
