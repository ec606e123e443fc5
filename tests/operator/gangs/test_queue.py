"""Plans in a queue of Kueue: what they use of it, how they wait for it, and what they do when it takes quota back."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from flow_cluster import SharedWorld, placed_gangs, share
from flow_harm import lost_attempt, pass_with_kills, running
from flow_jobs import pods_of_job
from flow_queue import SimulatedQueue, flavor, queue_of
from flow_world import World, node, spec_of
from hypothesis import given
from hypothesis import strategies as st

from trainwright.worker_api import Gang, GangNode
from trainwright_operator.api.spec import LauncherKind
from trainwright_operator.flow.gangs.kueue import other_labels
from trainwright_operator.flow.gangs.launchers.job_set import JobSetLauncher
from trainwright_operator.flow.gangs.scheduling import pinned_node
from trainwright_operator.flow.names import Names
from trainwright_operator.flow.snapshot import FlavorFacts, QueueFacts

V100, T4 = flavor("emulated-v100", 4), flavor("emulated-t4", 2)


def queued(*flavors: FlavorFacts, **spec: Any) -> World:
    asked = spec_of(queueName="research", **spec)
    return World(spec=asked, queue=SimulatedQueue(queue_of(*(flavors or (V100, T4)))))


def told(world: World, kind: str) -> tuple[str, str]:
    found = world.condition(kind)
    return found.status, found.reason


def test_gang_in_a_queue_is_one_jobset_that_kueue_starts() -> None:
    world = queued(queuePriorityClass="high", launcher=None)
    world.run(until=lambda: running(world, "links"))
    made = world.manifests[next(iter(world.jobs))]
    labels = made["metadata"]["labels"]
    assert (made["kind"], made["spec"]["suspend"]) == ("JobSet", True)
    assert labels["kueue.x-k8s.io/queue-name"] == "research"
    assert labels["kueue.x-k8s.io/priority-class"] == "high"
    world.run()
    assert world.succeeded == "True"
    assert not world.queue.held


def test_plan_waits_for_quota_in_kueues_words_as_long_as_it_takes() -> None:
    world = queued()
    world.queue.foreign["emulated-v100"] = 1
    for _ in range(50):
        world.step(3600.0)
    assert told(world, "LinksMeasured") == told(world, "Succeeded") == ("Unknown", "WaitingForQuota")
    assert "insufficient quota for 4 devices" in world.condition("LinksMeasured").message
    assert not world.pods
    assert world.created.count(next(iter(world.jobs))) == 1
    world.queue.foreign.clear()
    world.run()
    assert world.succeeded == "True"


def test_wait_for_quota_ends_with_the_plans_deadline_of_waits() -> None:
    world = queued(waitDeadlineSeconds=600)
    world.queue.foreign["emulated-t4"] = 1
    world.run()
    assert told(world, "Succeeded") == ("False", "WaitDeadlineExceeded")
    assert not world.jobs


@pytest.mark.parametrize(("seconds", "is_over"), [(30.0, False), (400.0, True)])
def test_deadline_of_the_pods_creation_counts_from_admission(seconds: float, *, is_over: bool) -> None:
    world = queued(trials={"pendingDeadlineSeconds": 300})
    world.run(until=lambda: "candidate-1" in {job.gang for job in world.jobs.values()})
    name = next(iter(world.jobs))
    world.evict("candidate-1")
    world.queue.foreign["emulated-v100"] = 4
    for _ in range(10):
        world.step(3600.0)
    assert world.trial("candidate-1").reason == "WaitingForQuota"
    world.queue.foreign.clear()
    world.pass_time(0.0)
    assert not world.jobs[name].suspended
    world.delete_pods(name)
    world.now = world.jobs[name].resumed_at
    world.pass_time(seconds)
    world.step(0.0)
    lost = [one for one in world.stored.values() if (one.role, one.gang) == ("attempt", "candidate-1")]
    assert bool(lost) == is_over
    found = lost_attempt(world, "candidate-1") if is_over else world.trial("candidate-1")
    assert found.reason == "PodsNotCreated"


def test_trial_that_was_evicted_is_void_and_run_again() -> None:
    world = queued()
    world.run(until=lambda: running(world, "candidate-1"))
    world.pass_time(4.0)
    world.queue.foreign["emulated-v100"] = 4
    world.evict("candidate-1")
    world.step()
    lost = lost_attempt(world, "candidate-1")
    assert (lost.reason, lost.number) == ("Evicted", 1)
    assert "preempted by another" in lost.message
    assert lost.device_seconds > 0
    for _ in range(200):
        world.step(60.0)
    assert told(world, "TrialsCompleted") == ("Unknown", "WaitingForQuota")
    assert world.trial("candidate-1").state == "Pending"
    world.queue.foreign.clear()
    world.run()
    assert (world.succeeded, world.trial("candidate-1").state) == ("True", "Succeeded")


@pytest.mark.parametrize("kind", LauncherKind)
def test_job_that_kueue_took_without_being_asked_waits_and_says_so(kind: LauncherKind, monkeypatch: Any) -> None:
    """Kueue does so with a LocalQueue named default in the namespace, or with manageJobsWithoutQueueName."""
    world = World(spec=spec_of(launcher=kind))
    monkeypatch.setattr(world.queue, "admit", lambda manifest: "2 more needed")
    world.run(until=lambda: bool(world.jobs))
    world.jobs = {name: replace(job, suspended=True, queue="default") for name, job in world.jobs.items()}
    world.pods = {}
    for _ in range(50):
        world.step(3600.0)
    assert told(world, "LinksMeasured") == told(world, "Succeeded") == ("Unknown", "WaitingForQuota")
    for words in (f"Kueue took {kind} ", "into queue default", "create a plan with", "2 more needed"):
        assert words in world.condition("LinksMeasured").message
    assert not [one for one in world.stored.values() if one.role == "attempt"]
    world.jobs = {name: replace(job, queue="") for name, job in world.jobs.items()}
    world.step()
    world.step()
    assert "most often by Kueue" in world.condition("LinksMeasured").message


def test_eviction_before_a_pod_is_placed_is_only_a_longer_wait() -> None:
    world = queued()
    world.others = {"n1": 2}
    world.run(until=lambda: told(world, "LinksMeasured")[1] == "WaitingForCapacity")
    world.queue.foreign["emulated-v100"] = 4
    world.evict("links")
    world.step()
    world.step()
    assert told(world, "LinksMeasured") == ("Unknown", "WaitingForQuota")
    world.queue.foreign.clear()
    world.others = {}
    world.run()
    assert world.succeeded == "True"
    assert not [one for one in world.stored.values() if one.role == "attempt"]


def test_trial_that_kueue_gave_up_fails_and_the_others_go_on() -> None:
    world = queued()
    world.run(until=lambda: running(world, "candidate-1"))
    world.evict("candidate-1", deactivated=True)
    world.run()
    failed = world.trial("candidate-1")
    assert (failed.state, failed.reason) == ("Failed", "Deactivated")
    assert world.succeeded == "True"
    world.change(queueName="research", trials={"maxFailed": 1})
    world.run()
    assert world.trial("candidate-1").state == "Succeeded"


def test_plan_whose_links_kueue_gave_up_ends_with_its_words() -> None:
    world = queued()
    world.queue.foreign["emulated-v100"] = 4
    world.run(until=lambda: told(world, "LinksMeasured")[1] == "WaitingForQuota")
    world.evict("links", deactivated=True)
    world.run()
    assert told(world, "Succeeded") == ("False", "Deactivated")
    assert "preempted by another" in world.condition("Succeeded").message
    assert not world.jobs


def test_two_plans_that_want_the_same_nodes_have_them_one_after_the_other() -> None:
    queue = SimulatedQueue(queue_of(V100, T4))
    first, second = (SharedWorld(name=name, spec=spec_of(queueName="research"), queue=queue) for name in ("a", "b"))
    share(first, second)
    reasons = set()
    for _ in range(600):
        first.step()
        second.step()
        held = [gang for world in (first, second) for gang in placed_gangs(world)]
        assert sum(gang == "links" or gang.startswith(("candidate", "baseline")) for gang in held) <= 1
        reasons |= {told(world, "Succeeded")[1] for world in (first, second)}
        if (first.succeeded, second.succeeded) == ("True", "True"):
            break
    assert (first.succeeded, second.succeeded) == ("True", "True")
    assert "WaitingForQuota" in reasons


def test_gang_whose_quota_is_there_still_waits_for_its_nodes() -> None:
    """Kueue knows quotas, not which nodes a pod outside of its queues holds."""
    world = queued()
    world.others = {"n1": 2}
    for _ in range(60):
        world.step()
    assert told(world, "LinksMeasured") == ("Unknown", "WaitingForCapacity")
    assert not any(pinned_node(pod.affinity) for pod in world.pods.values())


def excluded(world: World) -> dict[str, str]:
    world.run(until=lambda: world.status.cluster is not None)
    assert world.status.cluster is not None
    return {one.name: one.reason for one in world.status.cluster.excluded_nodes}


def test_nodes_outside_of_the_queues_flavors_are_left_out() -> None:
    assert "no flavor of spec.queueName research (emulated-v100)" in excluded(queued(V100))["n3"]


def test_no_more_devices_are_used_than_the_quota_of_their_flavor() -> None:
    reasons = excluded(queued(replace(V100, quota=3), T4))
    assert list(reasons) == ["n2"]
    assert "exceed the quota" in reasons["n2"]
    assert "1 of flavor emulated-v100 are left" in reasons["n2"]


def test_nodes_that_are_alike_share_the_flavor_with_the_most_quota() -> None:
    """Kueue gives one flavor to all pods of a group, so quotas of two flavors do not add up."""
    small, large = replace(V100, quota=2), flavor("emulated-v100", 3, zone="b")
    world = queued(small, large, T4)
    world.nodes = tuple(replace(one, labels={**one.labels, "zone": "b"}) for one in world.nodes)
    reasons = excluded(world)
    assert list(reasons) == ["n2"]
    assert "1 of flavor emulated-v100-b are left" in reasons["n2"]


HOSTS = replace(V100, topology="hosts"), replace(T4, topology="hosts")


def nodes_in_templates(world: World, gang: str) -> list[list[str]]:
    """Return the nodes that the pods of each of a gang's Jobs name; none of gated pods."""
    found = []
    for _, template in pods_of_job(world.manifests[next(name for name, job in world.jobs.items() if job.gang == gang)]):
        name = pinned_node(template["spec"].get("affinity"))
        found.append([name] if name else [])
    return found


def test_pods_that_kueue_places_name_their_nodes_and_have_no_gate() -> None:
    world = queued(*HOSTS)
    world.run(until=lambda: running(world, "links"))
    assert sorted(nodes_in_templates(world, "links")) == [["n1"], ["n2"], ["n3"]]
    made = world.manifests[next(iter(world.jobs))]["spec"]["replicatedJobs"]
    pods = [one["template"]["spec"]["template"]["metadata"] for one in made]
    assert all(one["annotations"]["kueue.x-k8s.io/podset-unconstrained-topology"] == "true" for one in pods)
    world.run()
    assert world.succeeded == "True"


def test_nodes_on_which_kueue_places_pods_are_not_mixed_with_others() -> None:
    """Else pods that Kueue placed would hold their devices while gated ones of the gang wait."""
    reasons = excluded(queued(V100, replace(T4, topology="hosts")))
    assert list(reasons) == ["n3"]
    assert "emulated-t4 has a topologyName, unlike those of the nodes before" in reasons["n3"]


def test_topology_that_ends_above_the_nodes_is_not_used() -> None:
    reasons = excluded(queued(V100, replace(T4, topology="racks", reaches_nodes=False)))
    assert "the topology racks of its flavor emulated-t4 does not end with the level" in reasons["n3"]


def test_profile_moves_to_a_free_node_before_kueue_admits_it() -> None:
    world = queued(*HOSTS, launcher=None)
    world.run(until=lambda: any(job.gang == "profile-1" for job in world.jobs.values()))
    name = next(name for name, job in world.jobs.items() if job.gang == "profile-1")
    (busy,) = nodes_in_templates(world, "profile-1")[0]
    world.evict("profile-1")
    world.queue.foreign["emulated-v100"] = 4
    world.others = {busy: 2}
    world.run(until=lambda: name in world.jobs and nodes_in_templates(world, "profile-1") != [[busy]])
    world.queue.foreign.clear()
    world.run()
    assert world.succeeded == "True"


def test_trial_whose_pods_kueue_placed_is_run_again_after_an_eviction() -> None:
    world = queued(*HOSTS)
    world.run(until=lambda: running(world, "candidate-1"))
    world.step()
    world.queue.foreign["emulated-v100"] = 4
    world.evict("candidate-1")
    world.step()
    assert lost_attempt(world, "candidate-1").reason == "Evicted"
    world.queue.foreign.clear()
    world.run()
    assert (world.succeeded, world.trial("candidate-1").state) == ("True", "Succeeded")


def test_no_more_nodes_are_used_than_kueue_takes_groups_of_pods() -> None:
    world = queued(replace(V100, quota=None, topology="hosts"))
    world.nodes = tuple(node(f"n{number:02}") for number in range(20))
    reasons = excluded(world)
    assert list(reasons) == ["n18", "n19"]
    assert "at most 18 groups of pods" in reasons["n18"]


def test_plan_without_a_node_of_its_queue_waits_for_one() -> None:
    world = queued(flavor("emulated-h100", 8))
    for _ in range(5):
        world.step()
    assert told(world, "NodesDiscovered") == ("Unknown", "NoUsableNodes")
    world.queue.facts = queue_of(V100, T4)
    world.run()
    assert world.succeeded == "True"


@pytest.mark.parametrize(
    ("facts", "reason", "words"),
    [
        (QueueFacts("research", is_installed=False), "KueueCRDMissing", "install Kueue"),
        (
            QueueFacts("research", problem="it is stopped"),
            "QueueUnusable",
            "queue research cannot be used: it is stopped",
        ),
    ],
)
def test_plan_waits_until_its_queue_can_be_used(facts: QueueFacts, reason: str, words: str) -> None:
    world = queued()
    world.queue.facts, usable = facts, world.queue.facts
    for _ in range(5):
        world.step()
    assert told(world, "NodesDiscovered") == told(world, "Succeeded") == ("Unknown", reason)
    assert words in world.condition("NodesDiscovered").message
    world.queue.facts = usable
    world.run(until=lambda: told(world, "Profiled")[0] == "True")
    world.queue.facts = facts
    for _ in range(20):
        world.step(60.0)
    assert told(world, "TrialsCompleted") == ("Unknown", "WaitingForQuota")
    assert world.status.cluster is not None
    assert world.status.cluster.change is None
    world.queue.facts = usable
    world.run()
    assert world.succeeded == "True"


def test_queued_plan_never_uses_pytorchjobs() -> None:
    world = queued(launcher=None)
    world.missing = frozenset({LauncherKind.JOB_SET})
    for _ in range(5):
        world.step()
    assert told(world, "Accepted") == ("Unknown", "JobSetCRDMissing")


@pytest.mark.parametrize("seed", range(4))
def test_plan_reaches_its_answer_whatever_kueue_takes_and_whenever_the_operator_is_killed(seed: int) -> None:
    rng, world = random.Random(seed), queued()
    for _ in range(60):
        pass_with_kills(world, rng, likely=0.3, passes=10)
        if world.succeeded != "Unknown":
            break
        world.queue.foreign["emulated-v100"] = rng.choice([0, 0, 4])
        if world.queue.foreign["emulated-v100"]:
            for gang in sorted({job.gang for job in world.jobs.values()}):
                world.evict(gang)
    world.queue.foreign.clear()
    world.run()
    assert world.succeeded == "True"
    assert {trial.state for trial in world.status.trials} == {"Succeeded"}
    assert not world.jobs


VALUES = st.sampled_from("ab")
LABELS = st.dictionaries(st.sampled_from(["zone", "class"]), VALUES)


@given(st.lists(LABELS, min_size=1, max_size=4), st.lists(LABELS, min_size=1, max_size=4))
def test_every_flavor_that_kueue_may_give_to_a_group_is_one_of_all_its_nodes(
    flavors: list[dict[str, str]], nodes: list[dict[str, str]]
) -> None:
    found = tuple(FlavorFacts(f"f{number}", labels, None) for number, labels in enumerate(flavors))
    queue = QueueFacts("research", found)
    world = World(
        nodes=tuple(node(f"n{number}") for number in range(len(nodes))), queue=SimulatedQueue(queue), spec=spec_of(queueName="research")
    )  # fmt: skip
    world.nodes = tuple(replace(one, labels=labels) for one, labels in zip(world.nodes, nodes, strict=True))
    by_name = {one.name: one for one in world.nodes}
    excluded_labels = {one.name: other_labels(one, queue) for one in world.nodes}
    launcher = JobSetLauncher(excluded_labels=excluded_labels)
    gang = Gang(nodes=tuple(GangNode(name, (0,), "a") for name in by_name))
    for place, member in launcher.places(Names.of("demo", "uid", world.spec), "links", gang):
        del place
        rules = excluded_labels[member.name]
        for one in found:
            is_possible = all(one.node_labels.get(key) not in values for key, values in rules)
            assert is_possible == (one.node_labels.items() <= by_name[member.name].labels.items())


@pytest.mark.parametrize(("apply", "queues"), [("Run", ["research"]), ("Suspended", [None])])
def test_handed_over_job_stands_in_the_queue_unless_it_waits_for_its_user(apply: str, queues: list[str | None]) -> None:
    world = queued(apply=apply, job={"image": "lab/train:7", "command": ["train"]})
    world.run()
    made = list(world.handed_over.values())
    assert [one["metadata"]["labels"].get("kueue.x-k8s.io/queue-name") for one in made] == queues
    assert all(one["spec"]["suspend"] for one in made)
    for _, template in pods_of_job(made[0]):
        affinity = template["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        (term,) = affinity["nodeSelectorTerms"]
        (name,) = term["matchFields"][0]["values"]
        (other,) = term["matchExpressions"]
        own = next(one for one in world.nodes if one.name == name).labels[other["key"]]
        assert (other["operator"], own in other["values"]) == ("NotIn", False)


def test_job_waits_for_a_queue_whose_flavors_are_not_known() -> None:
    world = queued(job={"image": "lab/train:7", "command": ["train"]})
    world.run()
    usable = world.queue.facts
    world.queue.facts = QueueFacts("research", problem="its ClusterQueue has a stopPolicy; remove it")
    world.change(queueName="research", apply="Run", job={"image": "lab/train:7", "command": ["train"]})
    for _ in range(5):
        world.step(60.0)
    assert not world.handed_over
    assert "has a stopPolicy" in world.condition("Succeeded").message
    world.queue.facts = usable
    world.run()
    assert world.handed_over


def test_label_without_a_value_tells_flavors_apart() -> None:
    key = "node-role.kubernetes.io/gpu"
    queue = queue_of(replace(V100, node_labels={key: ""}), replace(T4, node_labels={key: "old"}))
    assert other_labels(node("n1", labels={key: ""}), queue) == ((key, ("old",)),)
    assert other_labels(node("n2", labels={}), queue) == ((key, ("", "old")),)
