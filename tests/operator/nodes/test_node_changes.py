"""Nodes that come, go or change after they were discovered: what is repeated, what is kept, and when."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from flow_harm import fail_pods
from flow_series import states
from flow_world import EMULATION, RESOURCE, World, node, spec_of

from trainwright_operator.flow import actions as a
from trainwright_operator.flow.decide import WATCH_REQUEUE_SECONDS, is_finished, requeue_after_seconds
from trainwright_operator.flow.measurements.former_revision import FORMER_KEY
from trainwright_operator.flow.snapshot import NodeFacts, Taint

Change = Callable[[NodeFacts], NodeFacts | None]
GANGS = ["links", "profile-1", "candidate-1"]
WATCHING = {"replan": "OnClusterChange"}


def until_gang(world: World, gang: str) -> World:
    world.run(until=lambda: any(job.gang == gang for job in world.jobs.values()))
    return world


def change(world: World, name: str, how: Change) -> None:
    """Change a node; where it is gone or not ready its pods are lost."""
    found = [how(facts) if facts.name == name else facts for facts in world.nodes]
    world.nodes = tuple(facts for facts in found if facts is not None)


def lose(world: World, name: str) -> None:
    """Remove a node with the pods on it."""
    change(world, name, lambda _: None)
    for pod in [one for one in world.pods.values() if one.node == name]:
        del world.pods[pod.name]


def wait(world: World, seconds: float, step_seconds: float = 5.0) -> None:
    for _ in range(round(seconds / step_seconds)):
        world.step(step_seconds)


def revise(world: World) -> None:
    """Let the gang that runs go on until the nodes are discovered anew."""
    seconds, world.run_seconds = world.run_seconds, 1e9
    before = world.status.cluster.revision
    world.run(until=lambda: world.status.cluster.revision > before)
    world.run_seconds = seconds


def nodes_of(world: World) -> list[str]:
    return [one.name for one in world.status.cluster.nodes]


def tasks(world: World, words: str) -> list[str]:
    return [name for name in world.created if name.endswith("-order") and words in name]


def winner_nodes(world: World) -> set[str]:
    stages = [stage for one in world.status.winner.plan["pipelines"] for stage in one["stages"]]
    return {device["node"] for stage in stages for device in stage["devices"]}


@pytest.mark.parametrize("gang", GANGS)
@pytest.mark.parametrize("restarts", [False, True])
def test_plan_goes_on_without_a_node_that_was_reclaimed(gang: str, restarts: bool) -> None:
    world = until_gang(World(spec=spec_of(trials={"maxFailed": 0})), gang)
    wait(world, 4)
    lose(world, "n1")
    if restarts:
        for _ in range(20):
            wait(world, 20)
            world.restart()
    world.run()
    assert world.succeeded == "True", world.condition("Succeeded")
    assert nodes_of(world) == ["n2", "n3"]
    assert set(states(world).values()) == {"Succeeded"}
    assert winner_nodes(world) <= {"n2", "n3"}
    assert (world.status.cluster.revision, world.status.winner.revision, world.status.cluster.change) == (2, 2, None)
    assert world.status.cluster.revision_cause == "Nodes"
    assert not world.jobs
    assert any(event.reason == "NodesChanged" and "n1" in event.message for event in world.events)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (lambda facts: replace(facts, ready=False), "n2: it is not ready"),
        (lambda facts: replace(facts, schedulable=False), "n2: it is cordoned"),
        (lambda facts: replace(facts, allocatable={RESOURCE: "1"}), "n2: it has 1 × emulated-v100 instead of 2"),
        (lambda facts: node("n2", "emulated-t4"), "n2: it has 2 × emulated-t4 instead of 2 × emulated-v100"),
        (lambda facts: replace(facts, taints=(Taint("team", "b", "NoSchedule"),)), "n2: the workers do not tolerate"),
        (lambda facts: replace(facts, annotations={"trainwright.dev/emulation": '{"flops_per_second": 5e9}'}), "n2"),
        (lambda _: None, "n2: it no longer exists"),
    ],
)
def test_a_change_counts_once_it_has_lasted_for_the_settling_time(how: Change, words: str) -> None:
    limits = {"runDeadlineSeconds": 9000, "maxDeviceHours": 100}
    world = until_gang(World(spec=spec_of(settlingSeconds=300, trials=limits)), "candidate-1")
    whole, world.run_seconds = world.nodes, 1e9
    for _ in range(3):
        change(world, "n2", how)
        wait(world, 200)
        found = world.status.cluster.change
        assert words in found.what
        assert timedelta(seconds=195) <= world.now - found.since <= timedelta(seconds=200)
        world.nodes = whole
        wait(world, 10)
        assert world.status.cluster.change is None
    assert world.status.cluster.revision == 1
    change(world, "n2", how)
    wait(world, 320)
    assert world.status.cluster.revision == 2
    world.run_seconds = 10.0
    world.run()
    assert world.succeeded == "True"


def test_what_still_holds_is_not_measured_again() -> None:
    world = until_gang(World(), "candidate-1")
    before = list(world.created)
    profiled = len(tasks(world, "-profile-"))
    change(world, "n2", lambda _: None)
    revise(world)
    world.run()
    again = [name for name in world.created[len(before) :] if name.endswith("-order")]
    assert profiled == 4
    assert not [name for name in again if "-profile-" in name or "-links" in name]
    assert world.status.cluster.revision == 2
    assert world.status.links_ref.config_map in world.stored
    assert world.condition("LinksMeasured").message.startswith("4 directed links")


def test_links_without_network_devices_are_measured_anew_once_all_nodes_that_are_left_offer_some() -> None:
    plain = World().nodes
    offering = [replace(one, allocatable={**one.allocatable, "vpc.amazonaws.com/efa": "4"}) for one in plain]
    world = until_gang(World(nodes=(offering[0], plain[1], offering[2])), "candidate-1")
    change(world, "n2", lambda _: None)
    revise(world)
    world.run()
    assert (world.succeeded, len(tasks(world, "-links"))) == ("True", 2)


def test_a_node_of_another_device_table_is_profiled_again() -> None:
    nodes = (node("n1", devices=1), node("n2", "emulated-t4", devices=1))
    world = until_gang(World(nodes=nodes), "candidate-1")
    first = len(tasks(world, "-profile-"))
    table = {"trainwright.dev/emulation": EMULATION.replace("1e9", "2e9")}
    change(world, "n2", lambda facts: replace(facts, annotations=table))
    revise(world)
    world.run()
    assert world.succeeded == "True"
    assert len(tasks(world, "-profile-")) == first + first // 2, "the other node's type is as it was"
    assert len(tasks(world, "-links")) == 1


def test_what_former_revisions_do_not_need_is_deleted() -> None:
    spec = spec_of(settlingSeconds=10, **WATCHING)
    world = World(spec=spec)
    world.run()
    counts = []
    for number in range(6):
        change(world, "n2", lambda facts: replace(facts, schedulable=not facts.schedulable))
        world.run(until=lambda number=number: world.status.cluster.revision == number + 2)
        world.run()
        wait(world, 30)
        counts.append(len(world.stored))
    assert counts[2:4] == counts[4:6], "the count depends on the nodes alone"
    assert world.condition("Succeeded").status == "True"


def test_plan_without_any_node_left_waits_and_goes_on_where_it_was() -> None:
    world = until_gang(World(), "profile-1")
    whole, gone = world.nodes, ()
    world.nodes = gone
    world.pods.clear()
    wait(world, 3600, 20)
    found = world.condition("Succeeded")
    assert (found.status, found.reason) == ("Unknown", "NoUsableNodes")
    assert not world.jobs
    world.nodes = whole
    world.run()
    assert (world.succeeded, world.status.cluster.revision) == ("True", 1)
    assert len(tasks(world, "-links")) == 1


def test_device_time_of_trials_before_the_change_is_counted() -> None:
    spec = spec_of(trials={"topK": 3, "maxDeviceHours": 0.4, "runDeadlineSeconds": 120})
    world = World(spec=spec, run_seconds=100.0)
    world.run(until=lambda: sum(str(one.state) == "Succeeded" for one in world.status.trials) == 1)
    change(world, "n3", lambda _: None)
    wait(world, 80)
    world.run_seconds = 1e9
    revise(world)
    world.run_seconds = 100.0
    world.run()
    assert (world.succeeded, world.status.cluster.revision) == ("True", 2)
    assert world.condition("TrialsCompleted").reason == "DeviceHoursExhausted"


def test_device_time_of_a_gang_that_the_change_cuts_off_is_counted() -> None:
    limits = {"runDeadlineSeconds": 9000, "maxDeviceHours": 100}
    world = until_gang(World(spec=spec_of(settlingSeconds=300, trials=limits)), "candidate-1")
    world.run(until=lambda: any(str(one.state) == "Running" for one in world.status.trials))
    started, devices = world.now, len({one.node for one in world.pods.values()}) * 2
    change(world, "n2", lambda facts: replace(facts, schedulable=False))
    revise(world)
    (former,) = [
        json.loads(one.data[FORMER_KEY]) for name, one in world.stored.items() if name.endswith("-discovery-2")
    ]
    assert former["device_seconds"] == pytest.approx(devices * (world.now - started).total_seconds(), rel=0.1)


def test_device_time_of_a_gang_that_ends_for_lack_of_any_node_is_counted() -> None:
    limits = {"runDeadlineSeconds": 9000, "maxDeviceHours": 100}
    world = until_gang(World(spec=spec_of(settlingSeconds=300, trials=limits)), "candidate-1")
    world.run(until=lambda: any(str(one.state) == "Running" for one in world.status.trials))
    started, devices, world.run_seconds = world.now, len({one.node for one in world.pods.values()}) * 2, 1e9
    usable, world.nodes = world.nodes, tuple(replace(one, schedulable=False) for one in world.nodes)
    world.run(until=lambda: not world.jobs)
    used = devices * (world.now - started).total_seconds()
    assert world.condition("NodesDiscovered").reason == "NoUsableNodes"
    world.nodes = usable[:2]
    revise(world)
    (former,) = [
        json.loads(one.data[FORMER_KEY]) for name, one in world.stored.items() if name.endswith("-discovery-2")
    ]
    assert former["device_seconds"] == pytest.approx(used, rel=0.1)


def test_a_new_node_is_planned_with_only_where_the_spec_says_so() -> None:
    never, watching = World(), World(spec=spec_of(**WATCHING))
    for world in (never, watching):
        world.run()
        world.nodes = (*world.nodes, node("n4"))
        wait(world, 100)
        world.restart()
        wait(world, 50)
    assert never.status.cluster.revision == 1
    assert never.step() == []
    assert watching.status.cluster.revision == 2
    assert watching.condition("Succeeded").status == "Unknown"
    assert watching.status.winner.revision == 1, "the answer of before stays until there is another"
    watching.run()
    assert nodes_of(watching) == ["n1", "n2", "n3", "n4"]
    assert watching.status.winner.revision == 2
    assert watching.succeeded == "True"


def test_search_after_a_change_prefers_the_plan_that_runs() -> None:
    world = World(spec=spec_of(**WATCHING))
    world.run()
    former = world.status.winner.plan
    world.nodes = (*world.nodes, node("n4"))
    asked: list[a.PlanningRequest] = []
    while not asked:
        asked += [action.request for action in world.step(5.0) if isinstance(action, a.StartPlanner)]
    assert former["pipelines"] == json.loads(asked[0].keep)["pipelines"]


def test_a_plan_with_its_answer_looks_at_the_nodes_once_a_minute() -> None:
    world = World(spec=spec_of(**WATCHING))
    world.run()
    assert requeue_after_seconds(world.snapshot(), world.now) == WATCH_REQUEUE_SECONDS
    assert world.step() == []


@pytest.mark.parametrize("devices", [{"max": 6}, {"max": 4}])
def test_a_full_plan_takes_no_further_node(devices: dict[str, Any]) -> None:
    nodes = tuple(node(f"n{number}") for number in range(2, 5))
    world = World(spec=spec_of(devices=devices, **WATCHING), nodes=nodes[: devices["max"] // 2])
    world.run()
    world.nodes = (node("a1"), *world.nodes)
    wait(world, 600)
    assert world.status.cluster.revision == 1
    assert world.status.cluster.change is None


def test_a_lost_node_is_replaced_by_another_below_the_limit() -> None:
    nodes = tuple(node(f"n{number}") for number in range(1, 5))
    world = World(spec=spec_of(devices={"max": 4}), nodes=nodes)
    until_gang(world, "candidate-1")
    change(world, "n1", lambda _: None)
    world.run()
    assert (world.succeeded, nodes_of(world)) == ("True", ["n2", "n3"])


def test_a_profile_moves_to_an_equal_node_that_is_free() -> None:
    nodes = (node("n1"), node("n2"))
    world = World(nodes=nodes)
    until_gang(world, "profile-1")
    (pod,) = [one for one in world.pods.values() if one.gang == "profile-1"]
    assert pod.gates, "not placed yet"
    order = world.order_of(pod)
    assert order is not None
    first = order.gang.nodes[0].name
    world.others = {first: 2}
    wait(world, 30, 2.0)
    world.run(until=lambda: not any(job.gang == "profile-1" for job in world.jobs.values()))
    results = [one for name, one in world.stored.items() if name.endswith("profile-1-result")]
    assert len(results) == 1
    world.others = {}
    world.run()
    assert world.succeeded == "True"


def test_a_worker_that_fails_while_its_node_is_away_is_tried_again() -> None:
    world = until_gang(World(spec=spec_of(trials={"maxFailed": 0})), "candidate-1")
    wait(world, 4, 2.0)
    change(world, "n1", lambda facts: replace(facts, ready=False))
    fail_pods(world, "candidate-1")
    wait(world, 20)
    assert not [one for one in world.status.trials if str(one.state) == "Failed"]
    change(world, "n1", lambda facts: replace(facts, ready=True))
    world.run()
    assert set(states(world).values()) == {"Succeeded"}
    assert world.status.cluster.revision == 1


def test_a_node_that_died_long_ago_does_not_hold_a_new_plan_up() -> None:
    world = World()
    dead = replace(node("n9", ready=False), ready_changed_at=world.now - timedelta(hours=1))
    world.nodes = (*world.nodes, dead)
    start = world.now
    until_gang(world, "links")
    assert world.now - start < timedelta(seconds=30)


def test_suspended_plan_does_not_follow_the_nodes_until_it_is_resumed() -> None:
    world = World(spec=spec_of(**WATCHING))
    world.run()
    world.change(suspend=True, **WATCHING)
    world.nodes = (*world.nodes, node("n4"))
    wait(world, 600)
    assert world.status.cluster.revision == 1
    world.change(**WATCHING)
    world.run(until=lambda: world.status.cluster.revision == 2)
    world.run()
    assert world.succeeded == "True"


def test_a_node_that_no_trial_uses_counts_only_after_the_trials() -> None:
    nodes = tuple(node(f"n{number}", devices=1) for number in range(1, 4))
    trials = {"topK": 1, "baseline": "None", "runDeadlineSeconds": 9000, "maxDeviceHours": 100}
    search = {"planner": "Auto", "budgetSeconds": 1, "limits": {"maxTensorDegree": 1}}
    one_row = {"globalBatchSize": 1, "dtype": "float32"}
    world = World(spec=spec_of(training=one_row, trials=trials, search=search, **WATCHING), nodes=nodes)
    until_gang(world, "candidate-1")
    (planned,) = [one for name, one in world.stored.items() if "-candidates" in name]
    unused = min({one.name for one in nodes} - set(re.findall(r'"node": ?"(\w+)"', planned.data["document.json"])))
    world.run_seconds = 1000.0
    lose(world, unused)
    world.run()
    assert (world.succeeded, world.status.cluster.revision) == ("True", 1)
    wait(world, 400, 20)
    assert world.status.cluster.revision == 2


def test_answered_plan_keeps_its_answer_when_its_discovery_was_modified() -> None:
    world = World(spec=spec_of(**WATCHING))
    world.run()
    name = next(name for name in world.stored if name.endswith("-discovery"))
    world.stored[name] = replace(world.stored[name], data={"document.json": "{}"})
    lose(world, "n3")
    wait(world, 300)
    assert world.succeeded == "True"
    assert world.status.winner is not None


def test_a_lost_node_counts_although_another_one_flaps() -> None:
    world = until_gang(World(), "profile-1")
    world.run_seconds = 1e9
    lose(world, "n1")
    for number in range(40):
        change(world, "n2", lambda facts, ready=number % 2 == 0: replace(facts, ready=ready))
        wait(world, 30, 10)
        if world.status.cluster.revision == 2:
            break
    assert number * 30 == pytest.approx(5 * 120, abs=60), "five times the settling time"


def test_a_config_map_of_a_huge_revision_holds_nobody_up() -> None:
    world = until_gang(World(spec=spec_of(**WATCHING)), "candidate-1")
    name = next(name for name in world.stored if name.endswith("-discovery"))
    world.stored[f"{name}-999999999"] = replace(world.stored[name], name=f"{name}-999999999")
    wait(world, 10)
    assert world.succeeded == "False"


def test_names_tell_their_revision() -> None:
    first = World().snapshot().names()
    third = first.at_revision(3)
    names = [first.at_revision(number) for number in range(1, 5)]
    assert len({one.base for one in names}) == 4
    assert {len(one.base) for one in names} == {len(first.base)}
    assert [third.revision_of(one.result("links")) for one in names] == [1, 2, 3, None]
    assert [third.revision_of(name) for name in ("other", f"{first.base[:-8]}zzzzzzzz-links")] == [None, None]


def test_each_answer_of_a_watching_plan_has_all_device_hours() -> None:
    limits = {"topK": 1, "maxDeviceHours": 0.1, "runDeadlineSeconds": 60}
    world = World(spec=spec_of(settlingSeconds=10, trials=limits, **WATCHING), run_seconds=30.0)
    for number in range(1, 5):
        world.run()
        assert (world.succeeded, world.status.winner.revision) == ("True", number)
        change(world, "n2", lambda facts: replace(facts, schedulable=not facts.schedulable))
        world.run(until=lambda number=number: world.status.cluster.revision == number + 1)


def test_profiles_are_kept_after_the_answer_whatever_the_prices_are() -> None:
    prices = {"pricesPerHour": {"emulated-v100": 2.0, "emulated-t4": 1.0}}
    world = World(spec=spec_of(devices=prices, **WATCHING))
    world.run()
    profiled = len(tasks(world, "-profile-"))
    lose(world, "n2")
    world.run(until=lambda: world.status.cluster.revision == 2)
    world.run()
    assert len(tasks(world, "-profile-")) == profiled


def test_status_names_the_links_that_were_measured_last() -> None:
    world = World(spec=spec_of(settlingSeconds=10, **WATCHING))
    world.run()
    for expected in (1, 2):
        world.nodes = (*world.nodes, node(f"m{expected}"))
        world.run(until=lambda expected=expected: world.status.cluster.revision == expected + 1)
        world.run()
        last = [name for name in world.created if name.endswith("-links-result")][-1]
        assert world.status.links_ref.config_map == last


def test_plan_whose_edit_is_refused_after_a_change_is_finished() -> None:
    world = until_gang(World(), "candidate-1")
    change(world, "n2", lambda _: None)
    revise(world)
    world.template_error = ("PodTemplateInvalid", "bad")
    world.change(worker={"image": "other:2"})
    world.run()
    assert is_finished(world.snapshot())


def test_formats_of_a_later_revision_are_kept_too() -> None:
    world = until_gang(World(spec=spec_of(training={"globalBatchSize": 8, "dtype": "auto"})), "candidate-1")
    change(world, "n2", lambda _: None)
    revise(world)
    stored = [one for name, one in world.stored.items() if name.endswith("-discovery-2")]
    assert json.loads(stored[0].data["document.json"])["formats"]
