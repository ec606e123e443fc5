"""Simulated runs whose decisions are recorded, each by name."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from flow_harm import fail_pods, pass_with_kills, running
from flow_reports import links_report, parts_of, report_of
from flow_series import OUT_OF_MEMORY, world_of
from flow_world import World, node, spec_of
from subjects import LauncherKind

Watch = Callable[[World], World]
"""Begins to record the decisions in a world."""
RACK = "topology.kubernetes.io/rack"
REHEARSAL = "trainwright.dev/rehearse-fault"


def happy_path(watch: Watch) -> None:
    world = watch(World(spec=spec_of(ttlSecondsAfterFinished=30)))
    world.run()
    world.step(40)
    world.step()


def one_device(watch: Watch) -> None:
    watch(World(nodes=(node("n1", devices=1),))).run()


def unequal_nodes(watch: Watch) -> None:
    nodes = (
        node("n1", devices=1),
        node("n2", "emulated-t4", devices=2),
        node("n3", devices=1),
        node("n4", ready=False),
    )
    watch(World(nodes=nodes, spec=spec_of(links={"collectives": False}))).run()


def planned_only(watch: Watch) -> None:
    watch(World(spec=spec_of(trials={"topK": 0}))).run()


def series(watch: Watch) -> None:
    watch(world_of(per_gang=3)).run()


def series_interrupted(watch: Watch) -> None:
    """Run out of memory after the first trial of the first gang."""
    world = watch(world_of(per_gang=3))
    world.run(until=lambda: running(world, "candidate-1s"))
    world.pass_time(5)
    pod = next(pod for pod in world.pods.values() if pod.gang == "candidate-1s")
    told = parts_of(report_of(world.order_of(pod)).trials[:1])
    fail_pods(world, "candidate-1s", termination_message=OUT_OF_MEMORY)
    for name, pod in world.pods.items():
        if pod.gang == "candidate-1s" and pod.reports:
            world.pods[name] = replace(pod, log=f"starting\n{told}")
    world.run()


def trials_that_fail(watch: Watch) -> None:
    faults = "candidate-1=crash,candidate-2=hang,baseline-1=mute"
    world = World(annotations={REHEARSAL: faults}, spec=spec_of(trials={"maxFailed": 9, "runDeadlineSeconds": 60}))
    watch(world).run()


def too_many_failed_trials(watch: Watch) -> None:
    world = World(annotations={REHEARSAL: "candidate-1=crash"}, spec=spec_of(trials={"maxFailed": 0}))
    watch(world).run()


def gang_lost_while_profiling(watch: Watch) -> None:
    """Delete a job by hand, which is tried again; delete it once more, and edit the plan so that it is at once."""
    world = watch(World())
    for _ in range(2):
        world.run(until=lambda: running(world, "profile-1"))
        world.delete_job(next(name for name, job in world.jobs.items() if job.gang == "profile-1"))
    world.run(until=lambda: not any(job.gang == "profile-1" for job in world.jobs.values()))
    world.change(profiling={"deadlineSeconds": 500})
    world.run()


def suspended_and_resumed(watch: Watch) -> None:
    world = watch(world_of(per_gang=5))
    world.run(until=lambda: running(world, "candidate-1s"))
    world.run_seconds = 600.0
    world.pass_time(60)
    name = next(name for name, pod in world.pods.items() if pod.reports)
    told = parts_of(report_of(world.order_of(world.pods[name])).trials[:3])
    world.pods[name] = replace(world.pods[name], log=f"starting\n{told}")
    for suspended in (True, False):
        world.spec = world.spec.model_copy(update={"suspend": suspended})
        world.generation += 1
        for _ in range(3):
            world.step()
    world.run_seconds = 10.0
    world.run()


def edited_on_the_way(watch: Watch) -> None:
    """More candidates, then another image, which asks another question."""
    world = watch(World(spec=spec_of(trials={"topK": 1})))
    world.run(until=lambda: running(world, "candidate-1"))
    world.change(trials={"topK": 2})
    world.run()
    world.change(trials={"topK": 1}, worker={"image": "worker:2"})
    world.run()


def no_room(watch: Watch) -> None:
    """Devices are in use until the plan waits no longer; an edit gives it more time."""
    world = World(others={"n1": 2, "n2": 2, "n3": 1}, spec=spec_of(waitDeadlineSeconds=40))
    watch(world).run()
    world.others = {}
    world.change(links={"deadlineSeconds": 400}, trials={"topK": 1})
    world.run()


def links_of_many(watch: Watch) -> None:
    """Sample links of ten nodes in five racks, one of them slower than its kind."""

    def rate(source: str, target: str) -> float:
        return 1e8 if source == target else 1e6 if "m7" in (source, target) else 1e7

    bare = {number: node(f"m{number}", devices=1) for number in range(10)}
    nodes = tuple(replace(one, labels={**one.labels, RACK: f"rack-{number // 2}"}) for number, one in bare.items())
    world = World(
        nodes=nodes,
        spec=spec_of(trials={"topK": 0}),
        report=lambda order: links_report(order, rate) if order.kind == "links" else report_of(order),
    )
    watch(world).run()


def device_hours_spent(watch: Watch) -> None:
    spec = spec_of(trials={"maxDeviceHours": 6 * 45.0 / 3600, "runDeadlineSeconds": 40})
    watch(World(spec=spec, run_seconds=20.0)).run()


def operator_killed_on_the_way(watch: Watch) -> None:
    pass_with_kills(watch(World()), random.Random(7), likely=0.4, passes=200)


def refused(watch: Watch) -> None:
    """Fail before any pod: image, template, memory. Wait before any pod: CRD, quota, nodes."""
    tiny = {"nvidia.com/gpu.product": "emulated-v100", "nvidia.com/gpu.memory": "1"}
    worlds = (
        World(image=""),
        World(template_error=("PodTemplateInvalid", "spec.tolerations: expected list")),
        World(nodes=(node("n1", labels=tiny), node("n2", labels=tiny))),
    )
    for world in worlds:
        watch(world).run()
    waiting = (
        World(missing=frozenset(LauncherKind)),
        World(refuse_jobs="exceeded quota: gpus"),
        World(nodes=(node("n1", schedulable=False),)),
    )
    for world in waiting:
        watch(world)
        for _ in range(20):
            world.step()


SCENARIOS: dict[str, Callable[[Watch], None]] = {
    scenario.__name__.replace("_", " "): scenario
    for scenario in (
        happy_path,
        one_device,
        unequal_nodes,
        planned_only,
        series,
        series_interrupted,
        trials_that_fail,
        too_many_failed_trials,
        gang_lost_while_profiling,
        suspended_and_resumed,
        edited_on_the_way,
        no_room,
        links_of_many,
        device_hours_spent,
        operator_killed_on_the_way,
        refused,
    )
}
