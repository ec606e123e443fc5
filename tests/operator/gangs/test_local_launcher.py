"""Gangs of one machine: a plan goes the same way as in a cluster, and a CPU computes as it can."""

from __future__ import annotations

from dataclasses import replace

from flow_world import START, World

from trainwright.accelerators.number_formats import format_choices
from trainwright.cluster import Accelerator, Node
from trainwright.layer import Dtype
from trainwright.worker_api import Gang, GangNode, LinkTask
from trainwright_operator.flow.documents.discovered_devices import DiscoveredDevices
from trainwright_operator.flow.gangs.gang_spec import GangSpec
from trainwright_operator.flow.gangs.launchers.launcher import PodPlace
from trainwright_operator.flow.gangs.launchers.local import LOCAL_GANG, LocalLauncher
from trainwright_operator.flow.gangs.launchers.registry import possible_launchers
from trainwright_operator.flow.phase import ReconcileContext

NODES = (GangNode("laptop-0", (0,), "cpu-x"), GangNode("laptop-1", (0,), "cpu-x"))
GANG = GangSpec("links", LinkTask(gang=Gang(nodes=NODES)), 60, 60)


def test_local_gang_has_a_place_for_each_node_in_one_object() -> None:
    context = ReconcileContext(World().snapshot(), START)
    (manifest,) = LocalLauncher().manifests(context, GANG)
    name = manifest["metadata"]["name"]
    places = LocalLauncher().places(context.names, GANG.name, GANG.task.gang)
    assert (manifest["kind"], manifest["nodes"]) == (LOCAL_GANG, len(NODES))
    assert places == tuple((PodPlace(name, "node", index), node) for index, node in enumerate(NODES))
    assert not tuple(LocalLauncher().pods(manifest))


def test_local_launcher_is_used_where_it_alone_is_offered() -> None:
    snapshot = World().snapshot()
    assert LOCAL_GANG not in {launcher.kind for launcher in possible_launchers(snapshot)}
    local = replace(snapshot, launchers=(LOCAL_GANG,))
    assert [launcher.kind for launcher in possible_launchers(local)] == [LOCAL_GANG]


def test_gang_on_a_cpu_communicates_by_gloo_and_one_on_gpus_by_nccl() -> None:
    def backend(accelerator: str) -> str:
        devices = DiscoveredDevices((Node("n", accelerator, 2),), (Accelerator(accelerator, 1 << 34),))
        return devices.make_gang([("n", (0, 1))], run_seconds=60).backend

    assert (backend("cpu-x"), backend("Tesla-T4")) == ("gloo", "nccl")


def test_cpu_is_searched_in_float32_alone() -> None:
    assert [choice.dtype for choice in format_choices(("cpu-x",))] == [Dtype.FLOAT32]
