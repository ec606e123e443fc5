"""Where a process sits: its device, and the logical rank that the order gives to that device."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from trainwright.cluster import Device
from trainwright.orders import NODE_NAME_VARIABLE, FailureReason, Gang, TrialOrder, WorkerOrder
from trainwright_worker.failures import WorkerError


def devices(order: WorkerOrder) -> tuple[Device, ...]:
    """The order's devices by logical rank: in the plan's order for a trial, in the gang's otherwise."""
    if isinstance(order, TrialOrder):
        return order.plan.devices
    return gang_devices(order.gang)


def gang_devices(gang: Gang) -> tuple[Device, ...]:
    """The gang's devices by torchrun's rank: node by node, slot by slot."""
    return tuple(Device(node.name, slot) for node in gang.nodes for slot in node.slots)


def node_rank(gang: Gang, environment: Mapping[str, str] = os.environ) -> int:
    """The place of this pod's node in the gang. Raises WorkerError where the pod runs on another node."""
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
            f"this pod runs on node {name}, but the order wants {', '.join(names)}",
        )
    return names.index(name)


@dataclass(frozen=True, slots=True)
class Seat:
    """One process.

    Attributes:
        device: node and slot.
        rank: logical rank, the place of the device among `devices`.
        torchrun_rank: rank given by torchrun; the process with 0 runs on the gang's first node and speaks for all.
        local_rank: place among the node's processes.
        devices: of all processes, by logical rank.
    """

    device: Device
    rank: int
    torchrun_rank: int
    local_rank: int
    world_size: int
    devices: tuple[Device, ...] = ()

    @property
    def is_speaker(self) -> bool:
        return self.torchrun_rank == 0

    @classmethod
    def find(cls, order: WorkerOrder, environment: Mapping[str, str] = os.environ) -> Seat:
        """The seat that torchrun's variables and the node's name lead to. Raises WorkerError where they disagree."""
        gang = order.gang
        place = node_rank(gang, environment)
        local, rank, world = (int(environment[name]) for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE"))
        everything = gang_devices(gang)
        slots = gang.nodes[place].slots
        expected = sum(len(node.slots) for node in gang.nodes[:place]) + local
        if world != len(everything) or local >= len(slots) or rank != expected:
            raise WorkerError(
                FailureReason.PLACEMENT_NOT_MET,
                f"process {local} on node {gang.nodes[place].name} has rank {rank} of {world}, but the order gives it "
                f"rank {expected} of {len(everything)}; the pods do not stand as the order wants",
            )
        device = everything[rank]
        logical = devices(order)
        return cls(device, logical.index(device), rank, local, world, logical)
