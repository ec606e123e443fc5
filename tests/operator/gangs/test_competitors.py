"""Messages that say who has, or gets before, the devices that a gang waits for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from flow_cluster import SharedWorld, plan, share

from trainwright_operator.flow.gangs.competitors import describe_gangs_ahead, describe_holders, holders_by_node
from trainwright_operator.flow.snapshot import DeviceHolder, GangClaim, HolderKind
from trainwright_operator.kube.object_facts import device_requests

PLAN, JOB, POD = HolderKind


def waiting(**changes: Any) -> SharedWorld:
    world = plan("mine", **changes)
    share(world)
    world.foreign = dict.fromkeys(("n1", "n2", "n3"), 2)
    for _ in range(10):
        world.step(1.0)
    return world


@pytest.mark.parametrize(
    ("holders", "clause"),
    [
        ([], ""),
        ([("default", PLAN, "other")], ", held by plan other"),
        ([("default", POD, "notebook-0")], ", held by pod notebook-0"),
        ([("default", JOB, "other")], ", held by the job of plan other"),
        ([("default", PLAN, "mine")], ", held by this plan"),
        ([("default", JOB, "mine")], ", held by the job of plan mine"),
        ([("secret-a", PLAN, "secret")], ", held by another namespace"),
        ([("default", POD, "a"), ("", POD, "")], ", held by pod a and others"),
        ([("secret-a", POD, "a"), ("", POD, "")], ", held by another namespace and others"),
        (
            [("default", POD, "a"), ("secret-a", POD, "secret"), ("default", PLAN, "b"), ("secret-b", POD, "secret")],
            ", held by pod a, plan b and other namespaces",
        ),
        ([("default", POD, name) for name in "abcdefg"], ", held by pod a, pod b, pod c, pod d, pod e and 2 more"),
    ],
)
def test_holders_are_named_in_the_plans_own_namespace_alone(holders, clause) -> None:
    world = waiting()
    snapshot = replace(world.snapshot(), holders={"n1": tuple(DeviceHolder(*one) for one in holders)})
    assert describe_holders(snapshot, "n1") == clause
    assert describe_holders(snapshot, "n2") == ""


def test_holders_of_a_node_are_read_from_its_pods() -> None:
    def pod(name: str, namespace: str = "default", node: str = "n1", devices: int = 1, **labels: str) -> dict[str, Any]:
        container = {"name": "a", "resources": {"limits": {"nvidia.com/gpu": str(devices)}}}
        meta = {
            "name": name,
            "namespace": namespace,
            "labels": {f"trainwright.dev/{key}": text for key, text in labels.items()},
        }
        return {"metadata": meta, "spec": {"nodeName": node, "containers": [container]}}

    pods = [
        pod("gang-0", plan="a"),
        pod("gang-1", plan="a"),
        pod("job-0", **{"handed-over-by": "b"}),
        pod("notebook-0"),
        pod("without-devices", devices=0),
        pod("gang-0", "other", plan="a"),
        *(pod(f"many-{number}", node="n2") for number in range(20)),
    ]
    found = holders_by_node(device_requests(pods, "nvidia.com/gpu"))
    assert found["n1"] == (
        DeviceHolder("default", PLAN, "a"),
        DeviceHolder("default", JOB, "b"),
        DeviceHolder("default", POD, "notebook-0"),
        DeviceHolder("other", PLAN, "a"),
    )
    assert len(found["n2"]) == 9
    assert found["n2"][-1] == DeviceHolder()


def test_message_of_a_wait_says_who_holds_the_devices() -> None:
    world = waiting()
    world.holders = {"n1": (DeviceHolder("default", POD, "notebook-0"),), "n2": (DeviceHolder("x", PLAN, "y"),)}
    world.step(1.0)
    message = world.condition("LinksMeasured").message
    assert "node n1 has 0 of 2 needed devices free, held by pod notebook-0; " in message
    assert "node n2 has 0 of 2 needed devices free, held by another namespace; " in message
    assert "node n3 has 0 of 2 needed devices free" in message


@pytest.mark.parametrize(
    ("owners", "sentence"),
    [
        ([("default", "a")], "1 gang is before it in the queue for its nodes, of plan a"),
        ([("secret", "a")], "1 gang is before it in the queue for its nodes, of another namespace"),
        (
            [("default", "a"), ("default", "b"), ("default", "a"), ("secret", "b")],
            "4 gangs are before it in the queue for its nodes, of plan a, plan b and another namespace",
        ),
    ],
)
def test_gangs_before_it_are_named_in_the_plans_own_namespace_alone(owners, sentence) -> None:
    world = waiting()
    world.foreign = {}
    others = tuple(
        GangClaim(namespace, name, f"uid-{number}", "links", 1, world.now, "nvidia.com/gpu", {}, {"n1": 2})
        for number, (namespace, name) in enumerate(owners)
    )
    assert describe_gangs_ahead(replace(world.snapshot(), other_claims=others), "links") == sentence
