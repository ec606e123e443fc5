"""Device and logical rank of a process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from trainwright.cluster import Device
from trainwright.worker_api import NODE_NAME_VARIABLE, FailureReason, Gang
from trainwright_worker.gang.errors import WorkerError


def gang_devices(gang: Gang) -> tuple[Device, ...]:
    """Return the gang's devices by torchrun rank: node by node, slot by slot."""
    return tuple(Device(node.name, slot) for node in gang.nodes for slot in node.slots)


def node_rank(gang: Gang, environment: Mapping[str, str] = os.environ) -> int:
    """Return the index of this pod's node in the gang. Raises WorkerError if the pod runs on another node."""
    name = environment.get(NODE_NAME_VARIABLE, "")
    names = [node.name for node in gang.nodes]
    if not name:
        raise WorkerError(
            FailureReason.PLACEMENT_NOT_MET,
            f"{NODE_NAME_VARIABLE} is not set; the pod must pass its node's name (fieldRef spec.nodeName)",
        )
    if name not in names:
        raise WorkerError(
            FailureReason.PLACEMENT_NOT_MET,
            f"this pod runs on node {name}, but the task wants {', '.join(names)}",
        )
    return names.index(name)


@dataclass(frozen=True, slots=True)
class RankAssignment:
    """Device and ranks of one process.

    Attributes:
        rank: logical rank: index of the device in `devices`.
        torchrun_rank: rank that torchrun assigned; 0 is the main process, on the gang's first node.
        local_rank: index among the node's processes.
        devices: devices of all processes, by logical rank.
    """

    device: Device
    rank: int
    torchrun_rank: int
    local_rank: int
    world_size: int
    devices: tuple[Device, ...] = ()

    @property
    def is_main_process(self) -> bool:
        return self.torchrun_rank == 0

    @classmethod
    def from_environment(
        cls, gang: Gang, rank_devices: tuple[Device, ...], environment: Mapping[str, str] = os.environ
    ) -> RankAssignment:
        """Return the assignment given by torchrun's variables and the node name. Raises WorkerError if they disagree.

        `rank_devices`: the gang's devices by logical rank.
        """
        node_index = node_rank(gang, environment)
        local_rank, rank, world_size = (int(environment[name]) for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE"))
        gang_ranks = gang_devices(gang)
        slots = gang.nodes[node_index].slots
        expected = sum(len(node.slots) for node in gang.nodes[:node_index]) + local_rank
        if world_size != len(gang_ranks) or local_rank >= len(slots) or rank != expected:
            raise WorkerError(
                FailureReason.PLACEMENT_NOT_MET,
                f"process {local_rank} on node {gang.nodes[node_index].name} has rank {rank} of {world_size}, but the task gives it "
                f"rank {expected} of {len(gang_ranks)}; the pods are not placed as the task says",
            )
        device = gang_ranks[rank]
        return cls(device, rank_devices.index(device), rank, local_rank, world_size, rank_devices)
