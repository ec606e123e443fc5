"""Devices of dynamic resource allocation: which nodes plans use, how many devices they have, and how many are free.

The objects are as NVIDIA's and AMD's drivers and the scheduler write them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, cast

import pytest
from flow_world import World, spec_of

from trainwright_operator.flow.nodes.device_classes import SelectorNotUnderstood, parse_selector
from trainwright_operator.flow.nodes.device_types import NodeUnusable, count_devices
from trainwright_operator.flow.phases.discovery import inspect_nodes
from trainwright_operator.kube.client import Api, ApiError
from trainwright_operator.kube.nodes.node_cache import NodeCache

GPU = "nvidia.com/gpu"
H100 = "NVIDIA H100 80GB HBM3"
NVIDIA, AMD = "gpu.nvidia.com", "gpu.amd.com"
WHOLE_GPUS = f"device.driver == '{NVIDIA}' && device.attributes['{NVIDIA}'].type == 'gpu'"


def gpu(number: int, **changes: Any) -> dict[str, Any]:
    """Return a whole GPU, as the driver lists it where no partition can be made of it."""
    attributes = {
        "type": {"string": "gpu"},
        "uuid": {"string": f"GPU-{number}"},
        "productName": {"string": H100},
        "driverVersion": {"version": "580.126.20"},
        "resource.kubernetes.io/pciBusID": {"string": f"0000:{number}5:00.0"},
    }
    return {
        "name": f"gpu-{number}", "attributes": attributes, "capacity": {"memory": {"value": "81559Mi"}}, **changes,
    }  # fmt: skip


def mig(parent: int, place: int = 0, **changes: Any) -> dict[str, Any]:
    """Return a MIG instance."""
    attributes = {
        "type": {"string": "mig"},
        "uuid": {"string": f"MIG-{parent}-{place}"},
        "parentUUID": {"string": f"GPU-{parent}"},
        "profile": {"string": "1g.10gb"},
        "productName": {"string": H100},
        "resource.kubernetes.io/pciBusID": {"string": f"0000:{parent}5:00.0"},
    }
    return {
        "name": f"gpu-{parent}-mig-1g10gb-19-{place}", "attributes": attributes,
        "capacity": {"memory": {"value": "9856Mi"}}, **changes,
    }  # fmt: skip


def counters(number: int, amount: int) -> dict[str, Any]:
    """Return what a device takes of a GPU's counters, where partitions are made when they are claimed."""
    one = {"counterSet": f"gpu-{number}-counter-set", "counters": {"multiprocessors": {"value": str(amount)}}}
    return {"consumesCounters": [one]}


def dynamic_mig(parent: int, place: int) -> dict[str, Any]:
    """Return a MIG instance that may be made: it has no UUID yet."""
    found = mig(parent, place, **counters(parent, 16))
    del found["attributes"]["uuid"]
    return found


def vfio(number: int) -> dict[str, Any]:
    attributes = {"type": {"string": "vfio"}, "uuid": {"string": f"GPU-{number}"}, "productName": {"string": H100}}
    return {
        "name": f"gpu-vfio-{number}",
        "attributes": attributes,
        "capacity": {"addressableMemory": {"value": "81559Mi"}},
    }


def amd(number: int, type_: str, memory: str) -> dict[str, Any]:
    attributes = {
        "type": {"string": type_}, "productName": {"string": "AMD_Instinct_MI300X_OAM"},
        "resource.kubernetes.io/pciBusID": {"string": f"0000:{number // 2}5:00.0"},
    }  # fmt: skip
    return {"name": f"gpu-{number}-128", "attributes": attributes, "capacity": {"memory": {"value": memory}}}


def resource_slice(*devices: dict[str, Any], node: str = "n", driver: str = NVIDIA, generation: int = 1) -> Any:
    pool = {"name": node, "generation": generation, "resourceSliceCount": 1}
    return {
        "metadata": {"name": f"{node}-{driver}-{generation}"},
        "spec": {"nodeName": node, "driver": driver, "pool": pool, "devices": list(devices)},
    }


def device_class(*expressions: str, name: str = NVIDIA, resource: str = GPU, created: str = "2026-01-01T00:00:00Z"):
    selectors = [{"cel": {"expression": one}} for one in expressions]
    meta = {"name": name, "creationTimestamp": created}
    return {"metadata": meta, "spec": {"selectors": selectors, "extendedResourceName": resource}}


def claim(*devices: str, pod: str = "", node: str = "n", driver: str = NVIDIA, **result: Any) -> dict[str, Any]:
    """Return an allocated claim, made by the scheduler for a pod's request if one is given."""
    meta: dict[str, Any] = {"name": "c"}
    if pod:
        meta["annotations"] = {"resource.kubernetes.io/extended-resource-claim": "true"}
        meta["ownerReferences"] = [{"kind": "Pod", "name": pod, "uid": pod}]
    results = [{"request": "r", "driver": driver, "pool": node, "device": one, **result} for one in devices]
    return {"metadata": meta, "status": {"allocation": {"devices": {"results": results}}}}


def pod(uid: str, devices: int = 0, node: str = "n") -> dict[str, Any]:
    resources = {"limits": {GPU: str(devices)}} if devices else {}
    return {"metadata": {"uid": uid}, "spec": {"nodeName": node, "containers": [{"resources": resources}]}}


class Cluster:
    """API server with one node `n`; `refused`: status of lists of dynamic allocation, by kind."""

    def __init__(self, *slices: Any, classes: Any = (), claims: Any = (), pods: Any = (), **allocatable: str) -> None:
        status = {"allocatable": {GPU: allocatable["plugin"]} if allocatable else {}}
        ready = {"conditions": [{"type": "Ready", "status": "True"}]}
        self.objects = {
            "nodes": [{"metadata": {"name": "n"}, "status": status | ready}],
            "resourceslices": list(slices),
            "deviceclasses": list(classes),
            "resourceclaims": list(claims),
            "pods": list(pods),
        }
        self.refused: dict[str, int] = {}
        self.paths: list[str] = []

    async def pages(self, path: str, **_query: str) -> AsyncIterator[list[dict[str, Any]]]:
        kind = path.rsplit("/", 1)[1]
        self.paths.append(path)
        if kind in self.refused or path in self.refused:
            raise ApiError(self.refused.get(kind) or self.refused[path], f"{path} is refused")
        yield self.objects[kind]

    def cache(self, *namespaces: str) -> NodeCache:
        return NodeCache(cast("Api", self), namespaces)

    def used(self, *namespaces: str, resource: str = GPU) -> dict[str, int]:
        found = asyncio.run(self.cache(*namespaces).usage(resource)).devices
        return {node: devices for node, devices in found.items() if devices}

    def discovered(self, **devices: object) -> str:
        """Return the devices that a plan takes of the node, or why it is left out."""
        inventory = asyncio.run(self.cache().inventory())
        snapshot = replace(World().snapshot(), nodes=inventory.nodes, slice_devices=inventory.slice_devices)
        found = inspect_nodes(snapshot, spec_of(devices=devices))
        for node in found.nodes:
            return f"{node.devices} × {node.accelerator}"
        return found.excluded[0].reason


CLASS = device_class(WHOLE_GPUS)


def test_whole_gpus_are_used_beside_mig_instances() -> None:
    """A device plugin with the strategy `mixed` offers the whole ones as nvidia.com/gpu."""
    cluster = Cluster(resource_slice(*map(gpu, range(6)), mig(6), mig(6, 1), mig(7)), plugin="6")
    assert cluster.discovered() == "6 × NVIDIA-H100-80GB-HBM3"


@pytest.mark.parametrize(
    ("slices", "expected"),
    [
        ([resource_slice(*map(gpu, range(4)))], "4 ×"),
        ([resource_slice(*map(gpu, range(4)), *map(vfio, range(4)))], "4 ×"),
        ([resource_slice(gpu(0), gpu(1), mig(1))], "1 ×"),
        ([resource_slice(*(gpu(i, **counters(i, 132)) for i in range(2)), dynamic_mig(0, 0), dynamic_mig(1, 0))], "2 ×"),
        ([resource_slice(gpu(0), gpu(1, taints=[{"key": "unhealthy", "effect": "NoExecute"}]))], "1 ×"),
        ([resource_slice(gpu(0), gpu(1, taints=[{"key": "noted", "effect": "None"}]))], "2 ×"),
        ([resource_slice(gpu(0), gpu(1)), resource_slice(gpu(0), generation=2)], "1 ×"),
        ([resource_slice(gpu(0)), resource_slice(gpu(1))], "2 ×"),
        ([resource_slice({"name": "nic-0", "attributes": {"type": {"string": "nic"}}}, driver="dra.net")], "it has no"),
        ([resource_slice(mig(0), mig(0, 1))], "its devices are MIG instances"),
        ([resource_slice(vfio(0))], "virtual machines"),
        ([resource_slice(gpu(0, taints=[{"key": "unhealthy", "effect": "NoSchedule"}]))], "tainted"),
    ],
    ids=[
        "whole", "vfio beside", "cut into instances", "instances that may be made", "tainted", "a taint that refuses nobody",
        "a newer generation", "two slices", "a NIC", "instances alone", "vfio alone", "all tainted",
    ],
)  # fmt: skip
def test_devices_of_a_class_are_the_nodes_devices(slices: list[Any], expected: str) -> None:
    assert expected in Cluster(*slices, classes=[CLASS, device_class("true", name="x", resource="")]).discovered()


SHARES = {"value": "4", "requestPolicy": {"default": "1"}}


@pytest.mark.parametrize(
    ("capacity", "expected"),
    [
        (
            {"memory": {"value": "81559Mi", "requestPolicy": {"default": "0"}}, "shares": SHARES},
            "several claims may share",
        ),
        ({"memory": {"value": "81559Mi", "requestPolicy": {"default": "81559Mi"}}, "shares": SHARES}, "1 ×"),
        ({"memory": {"value": "81559Mi"}}, "1 ×"),
    ],
)
def test_devices_that_several_claims_may_share_are_not_used(capacity: dict[str, Any], expected: str) -> None:
    shared = gpu(0, allowMultipleAllocations=True, capacity=capacity)
    assert expected in Cluster(resource_slice(shared), classes=[CLASS]).discovered()


def test_devices_without_a_class_are_left_out_with_what_to_add() -> None:
    cluster = Cluster(resource_slice(gpu(0)), classes=[device_class(WHOLE_GPUS, resource="")])
    said = cluster.discovered()
    assert "spec.extendedResourceName: nvidia.com/gpu" in said
    cluster.refused = {"deviceclasses": 403}
    assert "may not list DeviceClasses" in cluster.discovered()


def test_class_whose_selector_is_not_understood_is_named() -> None:
    odd = f"device.driver == '{NVIDIA}' && device.capacity['{NVIDIA}'].memory.compareTo(quantity('40Gi')) >= 0"
    said = Cluster(resource_slice(gpu(0)), classes=[device_class(odd, name="large")]).discovered()
    assert "DeviceClass large" in said
    assert "device.capacity['gpu.nvidia.com'].memory.compareTo" in said
    assert Cluster(resource_slice(gpu(0)), classes=[device_class(odd)], plugin="1").discovered().startswith("1 ×")


def test_newest_class_of_a_resource_counts() -> None:
    older = device_class(f"device.driver == '{AMD}'", name="a")
    newer = device_class(WHOLE_GPUS, name="b", created="2026-02-01T00:00:00Z")
    assert Cluster(resource_slice(gpu(0)), classes=[newer, older]).discovered().startswith("1 ×")
    same_age = device_class(WHOLE_GPUS, name="z")
    assert "it has no" in Cluster(resource_slice(gpu(0)), classes=[same_age, older]).discovered()


def test_class_may_choose_one_of_two_types_on_a_node() -> None:
    other = gpu(1)
    other["attributes"] = other["attributes"] | {"productName": {"string": "NVIDIA L4"}}
    cluster = Cluster(resource_slice(gpu(0), other), classes=[CLASS])
    assert "devices of several types" in cluster.discovered()
    chosen = device_class(f"{WHOLE_GPUS} && device.attributes['{NVIDIA}'].productName == '{H100}'")
    assert Cluster(resource_slice(gpu(0), other), classes=[chosen]).discovered() == "1 × NVIDIA-H100-80GB-HBM3"


def test_amd_partitions_are_left_out() -> None:
    every = device_class(f"device.driver == '{AMD}'", name=AMD, resource="amd.com/gpu")
    halves = resource_slice(*(amd(i, "amdgpu-partition", "98296Mi") for i in range(2)), driver=AMD)
    asked = {"resourceName": "amd.com/gpu"}
    assert "partitions of GPUs" in Cluster(halves, classes=[every]).discovered(**asked)
    whole = resource_slice(amd(0, "amdgpu", "196592Mi"), amd(2, "amdgpu", "196592Mi"), driver=AMD)
    assert Cluster(whole, classes=[every]).discovered(**asked).startswith("2 ×")
    both = resource_slice(amd(0, "amdgpu", "196592Mi"), amd(2, "amdgpu-partition", "98296Mi"), driver=AMD)
    assert f"DeviceClass {AMD}" in Cluster(both, classes=[every]).discovered(**asked)


GPUS = resource_slice(*(gpu(i, **counters(i, 132)) for i in range(4)), *(dynamic_mig(i, 0) for i in range(4)), vfio(3))


@pytest.mark.parametrize(
    ("claims", "pods", "used"),
    [
        ([claim("gpu-0", "gpu-1")], [], 2),
        ([claim("gpu-0", "gpu-1")], [pod("p")], 2),
        ([], [pod("p", 2)], 2),
        ([claim("gpu-0", "gpu-1", pod="p")], [pod("p", 2)], 2),
        ([claim("gpu-0", "gpu-1", pod="p")], [], 2),
        ([claim("gpu-0", "gpu-1", pod="p")], [pod("p", 2), pod("q", 1)], 3),
        ([claim("gpu-0", pod="p"), claim("gpu-1")], [pod("p", 1)], 2),
        ([claim("gpu-0-mig-1g10gb-19-0")], [], 1),
        ([claim("gpu-0-mig-1g10gb-19-0"), claim("gpu-0-mig-1g10gb-19-0")], [], 1),
        ([claim("gpu-vfio-3")], [], 1),
        ([claim("gpu-0", adminAccess=True)], [], 0),
        ([claim("gpu-0", node="m"), claim("gpu-0", driver="other")], [], 0),
        ([claim("gpu-0", "gpu-1", "gpu-2", pod="p")], [pod("p", 2)], 3),
        ([{"metadata": {"name": "waits"}, "status": {}}], [], 0),
    ],
    ids=[
        "a claim", "a claim of a pod", "a pod that has no claim yet", "a pod and its claim", "a claim whose pod has ended",
        "two pods", "a pod and a claim", "an instance", "two claims of an instance", "a virtual machine's",
        "administrative access", "others' devices", "a claim for more", "a claim that waits",
    ],
)  # fmt: skip
def test_devices_in_use_count_once(claims: list[Any], pods: list[Any], used: int) -> None:
    cluster = Cluster(GPUS, classes=[CLASS], claims=claims, pods=pods)
    assert cluster.used() == ({"n": used} if used else {})


def test_claims_hold_devices_of_a_device_plugin_too() -> None:
    assert Cluster(GPUS, claims=[claim("gpu-0")], pods=[pod("p", 2)], plugin="4").used() == {"n": 3}


def test_other_resources_are_not_held() -> None:
    cluster = Cluster(GPUS, classes=[CLASS], claims=[claim("gpu-0", pod="p")], pods=[pod("p", 1)])
    assert cluster.used(resource="amd.com/gpu") == {}


def kinds(cluster: Cluster) -> list[str]:
    return sorted(path.removeprefix("/apis/resource.k8s.io/v1/") for path in cluster.paths)


def test_claims_and_classes_are_read_only_where_drivers_publish_gpus() -> None:
    without = Cluster(resource_slice({"name": "nic-0"}), pods=[pod("p", 1)], plugin="4")
    assert without.used() == {"n": 1}
    assert kinds(without) == ["/api/v1/nodes", "/api/v1/pods", "resourceslices"]
    having = Cluster(GPUS, classes=[CLASS])
    having.used()
    assert kinds(having) == ["/api/v1/nodes", "/api/v1/pods", "deviceclasses", "resourceclaims", "resourceslices"]


@pytest.mark.parametrize("status", [403, 404])
def test_lists_that_are_refused_count_for_nothing_and_are_not_repeated(status: int) -> None:
    cluster = Cluster(GPUS, claims=[claim("gpu-0")], pods=[pod("p", 2)], plugin="4")
    cluster.refused = {"deviceclasses": status, "resourceclaims": status}

    async def thrice() -> dict[str, int]:
        cache = cluster.cache()
        for _ in range(2):
            await cache.usage(GPU)
            cache.invalidate()
        await cache.inventory(age_seconds=-1)
        return (await cache.usage(GPU)).devices

    assert asyncio.run(thrice()) == {"n": 2}
    assert kinds(cluster).count("resourceclaims") == kinds(cluster).count("deviceclasses") == 1


def test_claims_of_watched_namespaces_count_where_the_operator_may_not_list_all() -> None:
    cluster = Cluster(GPUS, classes=[CLASS], claims=[claim("gpu-0")])
    cluster.refused = {"/apis/resource.k8s.io/v1/resourceclaims": 403, "/api/v1/pods": 403}
    assert cluster.used("team-a") == {"n": 1}


@pytest.mark.parametrize(
    "expression",
    [
        "device.driver == 'd' && device.attributes['d'].type == 'gpu'",
        'device.driver == "d" && device.attributes["d"].type == "gpu"',
        "device.driver == 'd' &&\n  device.attributes['d'].type\n  == 'gpu'\n",
        "(device.driver=='d'&&(device.attributes[ 'd' ]['type'] == 'gpu'))",
        "'type' in device.attributes['d'] && device.attributes['d'].type == 'gpu'",
        "has(device.attributes['d'].type) && device.attributes['d'].type == 'gpu' && device.attributes['d'].n == 8",
        "device.attributes['d'].healthy == true && device.attributes['d'].type == 'gpu'",
    ],
)
def test_published_selectors_are_understood(expression: str) -> None:
    conditions = parse_selector(expression)

    def selects(driver: str, **attributes: str | bool | int) -> bool:
        qualified = {f"d/{name}": value for name, value in attributes.items()}
        return all(one.holds(driver, qualified) for one in conditions)

    assert selects("d", type="gpu", n=8, healthy=True)
    assert not selects("d", type="mig", n=8, healthy=True)
    assert not selects("e")


@pytest.mark.parametrize(
    ("expression", "at"),
    [
        ("", ""),
        ("device.driver == 'a' || device.driver == 'b'", "|| device.driver == 'b'"),
        ("!(device.driver == 'a')", "!(device.driver == 'a')"),
        ("device.driver == 'a' && cel.bind(x, 1, x > 0)", "cel.bind(x, 1, x > 0)"),
        ("device.driver == 'a')", ""),
        ("(device.driver == 'a'", ""),
        ("device.driver != 'a'", "device.driver != 'a'"),
        ("device.driver == 'a' == true", "== true"),
    ],
)
def test_other_selectors_are_quoted_where_they_begin(expression: str, at: str) -> None:
    with pytest.raises(SelectorNotUnderstood) as raised:
        parse_selector(expression)
    assert at in str(raised.value)


def test_every_reader_counts_the_same_devices() -> None:
    (node,) = asyncio.run(Cluster(GPUS, classes=[CLASS]).cache().inventory()).nodes
    assert count_devices(node, GPU) == node.devices(GPU) == 4
    with pytest.raises(NodeUnusable, match=r"^it has no amd\.com/gpu$"):
        count_devices(node, "amd.com/gpu")
