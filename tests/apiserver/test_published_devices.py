"""Dynamic resource allocation on a real API server: what it stores of the objects, and what the operator reads of them."""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack
from typing import Any

import real_api_server
from kubernetes import config
from kubernetes.client import ApiClient, Configuration
from real_api_server import ApiServer

from trainwright_operator.kube.client import Api
from trainwright_operator.kube.nodes.node_cache import NodeCache, NodeUsage
from trainwright_operator.kube.write_guard import WriteGuard

GATES = "--feature-gates=DRAExtendedResource=true,DRAPartitionableDevices=true"
"""Not on by default in the version of the local cluster."""
GPU, DRIVER = "nvidia.com/gpu", "gpu.nvidia.com"
API_VERSION = "resource.k8s.io/v1"
CLASS = {
    "apiVersion": API_VERSION,
    "kind": "DeviceClass",
    "metadata": {"name": DRIVER},
    "spec": {
        "selectors": [
            {"cel": {"expression": f"device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].type == 'gpu'"}}
        ],
        "extendedResourceName": GPU,
    },
}


def device(name: str, kind: str, number: int, multiprocessors: int, memory: str) -> dict[str, Any]:
    """Return a GPU, or an instance that can be made of it, with the counters that each takes."""
    uuid = {"gpu": "uuid", "mig": "parentUUID"}[kind]
    attributes = {
        "type": {"string": kind},
        uuid: {"string": f"GPU-{number}"},
        "productName": {"string": "NVIDIA H100 80GB HBM3"},
        "driverVersion": {"version": "580.126.20"},
        "cudaComputeCapability": {"version": "9.0.0"},
        "resource.kubernetes.io/pcieRoot": {"string": "pci0000:64"},
    }
    taken = {
        "counterSet": f"gpu-{number}-counter-set",
        "counters": {"multiprocessors": {"value": str(multiprocessors)}},
    }
    return {
        "name": name, "attributes": attributes, "capacity": {"memory": {"value": memory}}, "consumesCounters": [taken],
    }  # fmt: skip


def published(node: str) -> dict[str, Any]:
    """Return the slice of a node with four GPUs, two of which can be cut."""
    sets = [
        {"name": f"gpu-{number}-counter-set", "counters": {"multiprocessors": {"value": "132"}}} for number in range(4)
    ]
    devices = [device(f"gpu-{number}", "gpu", number, 132, "81559Mi") for number in range(4)]
    devices += [device(f"gpu-{number}-mig-1g10gb-19-0", "mig", number, 16, "9856Mi") for number in range(2)]
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    return {
        "apiVersion": API_VERSION,
        "kind": "ResourceSlice",
        "metadata": {"name": f"{node}-{DRIVER}"},
        "spec": {"nodeName": node, "driver": DRIVER, "pool": pool, "sharedCounters": sets, "devices": devices},
    }


def pod(namespace: str, name: str, node: str, devices: int) -> dict[str, Any]:
    container = {"name": "c", "image": "i", "resources": {"limits": {GPU: str(devices)}}}
    spec = {"nodeName": node, "containers": [container], "tolerations": [{"operator": "Exists"}]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": namespace}, "spec": spec}


def allocate(api: ApiServer, name: str, node: str, *devices: str, owner: dict[str, Any] | None = None) -> None:
    """Create a claim and write the scheduler's answer; with `owner`, the claim that it makes for a pod's request."""
    metadata: dict[str, Any] = {"name": name, "namespace": "default"}
    if owner is not None:
        metadata["annotations"] = {"resource.kubernetes.io/extended-resource-claim": "true"}
        named = {"apiVersion": "v1", "kind": "Pod", "name": owner["metadata"]["name"], "uid": owner["metadata"]["uid"]}
        metadata["ownerReferences"] = [{**named, "controller": True, "blockOwnerDeletion": True}]
    request = {"name": "r", "exactly": {"deviceClassName": DRIVER, "count": len(devices)}}
    claim = {"apiVersion": API_VERSION, "kind": "ResourceClaim", "metadata": metadata}
    api.create(claim | {"spec": {"devices": {"requests": [request]}}})
    results = [{"request": "r", "driver": DRIVER, "pool": node, "device": one} for one in devices]
    status = {"status": {"allocation": {"devices": {"results": results}}}}
    api.kubectl(
        "patch", "resourceclaim", name, "--namespace=default", "--subresource=status", "--type=merge",
        f"--patch={json.dumps(status)}",
    )  # fmt: skip


def read(api: ApiServer) -> NodeUsage:
    """Read the cluster as the operator does."""
    configuration = Configuration()
    config.load_kube_config(config_file=str(api.kubeconfig), client_configuration=configuration)
    client = ApiClient(configuration)
    return asyncio.run(NodeCache(Api(client, client, WriteGuard()), ()).usage(GPU))


def test_devices_that_a_class_names_are_counted_and_claims_hold_them(programs, tmp_path) -> None:
    with ExitStack() as running:
        api = real_api_server.start(tmp_path, running, GATES)
        api.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n"}})
        api.create(published("n"))
        assert api.create(CLASS)["spec"]["extendedResourceName"] == GPU
        (node,) = read(api).inventory.nodes
        assert (node.devices(GPU), node.published.whole) == (4, 4)

        allocate(api, "of-somebody", "n", "gpu-0-mig-1g10gb-19-0")
        assert read(api).devices == {"n": 1}, "an instance of it is in use"
        asking = api.create(pod("default", "asks-for-two", "n", 2))
        assert read(api).devices == {"n": 3}, "its claim is not there yet"
        allocate(api, "of-the-pod", "n", "gpu-2", "gpu-3", owner=asking)
        assert read(api).devices == {"n": 3}, "the pod and its claim count once"

        api.kubectl("delete", "deviceclass", DRIVER)
        (node,) = read(api).inventory.nodes
        assert node.devices(GPU) == 0
        assert "spec.extendedResourceName" in node.published.why_none(GPU)


def test_server_without_the_feature_gate_drops_the_name_that_a_class_gives(api_server) -> None:
    stored = api_server.create(CLASS)
    api_server.kubectl("delete", "deviceclass", DRIVER)
    assert stored["spec"]["selectors"] == CLASS["spec"]["selectors"]
    assert "extendedResourceName" not in stored["spec"]
