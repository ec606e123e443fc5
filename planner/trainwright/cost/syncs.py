"""Who exchanges what in an iteration: boundary tensors between stages, gradients between replicas and owners."""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.cluster import Cluster, Device
from trainwright.cost.collectives import fabric, ring_bytes, ring_latency_seconds
from trainwright.cost.layout import (
    SharedWeight,
    Unit,
    device_pairs,
    held_parameters,
    overlaps,
    shared_weights,
)
from trainwright.cost.memory import GRADIENT_BYTES
from trainwright.cost.replay import Channel, Sync
from trainwright.cost.schedule import BACKWARD, FORWARD
from trainwright.model import Model
from trainwright.plan import Pipeline

StageIndex = tuple[int, int]
"""(stage, tensor index): the ranks that hold the same part of the same weights."""


@dataclass(frozen=True, slots=True)
class Syncs:
    """All-reduces of gradients, and which of them each rank takes part in.

    Attributes:
        gradient: number of the flat all-reduce over the replicas; absent where there is one replica.
        shared: numbers of the all-reduces of shared weights over their owners.
    """

    syncs: tuple[Sync, ...]
    gradient: dict[StageIndex, int]
    shared: dict[StageIndex, tuple[int, ...]]


def channels(
    stages: tuple[tuple[Unit, ...], ...], pipeline: Pipeline, model: Model, cluster: Cluster
) -> tuple[Channel, ...]:
    """The channels between neighbouring stages, forward and backward; workers are numbered stage by stage."""
    number = {unit: index for index, unit in enumerate(unit for replicas in stages for unit in replicas)}
    net = fabric(cluster)
    found = []
    for boundary in range(len(stages) - 1):
        row_bytes = model.output_bytes_per_row(pipeline.stages[boundary].end - 1)
        for upper, lower, rows in overlaps(stages[boundary], stages[boundary + 1]):
            for direction, sender, receiver in ((FORWARD, upper, lower), (BACKWARD, lower, upper)):
                route = net.route((a.node, b.node) for a, b in device_pairs(sender, receiver))
                found.append(Channel(number[sender], number[receiver], direction, route, rows * row_bytes))
    return tuple(found)


def gradient_syncs(
    stages: tuple[tuple[Unit, ...], ...], pipeline: Pipeline, model: Model, cluster: Cluster
) -> Syncs:
    """The flat all-reduce of every data group after its last backward, then those of shared weights over all owners."""
    shared = shared_weights(model, pipeline)
    firsts = [sum(len(replicas) for replicas in stages[:number]) for number in range(len(stages))]
    workers = [tuple(range(first, first + len(replicas))) for first, replicas in zip(firsts, stages, strict=True)]
    syncs: list[Sync] = []
    gradient: dict[StageIndex, int] = {}
    for number, replicas in enumerate(stages):
        if len(replicas) == 1:
            continue
        stage, tensor = pipeline.stages[number], len(replicas[0].devices)
        parameters = held_parameters(model, stage.first, stage.end, tensor)
        parameters -= sum(weight.parameters for weight in shared if number in weight.stages)
        for index in range(tensor):
            members = _ascending([unit.devices[index] for unit in replicas], pipeline)
            gradient[number, index] = len(syncs)
            syncs.append(_sync(members, parameters, workers[number], (), cluster))
    owners: dict[StageIndex, tuple[int, ...]] = {}
    for weight in shared:
        _add_shared(weight, stages, pipeline, cluster, workers, syncs, gradient, owners)
    return Syncs(tuple(syncs), gradient, owners)


def _add_shared(  # noqa: PLR0913, PLR0917 - the parts of Syncs under construction
    weight: SharedWeight,
    stages: tuple[tuple[Unit, ...], ...],
    pipeline: Pipeline,
    cluster: Cluster,
    workers: list[tuple[int, ...]],
    syncs: list[Sync],
    gradient: dict[StageIndex, int],
    owners: dict[StageIndex, tuple[int, ...]],
) -> None:
    """One all-reduce for each tensor index, or a single one where the owners' tensor degrees differ."""
    degrees = {len(stages[number][0].devices) for number in weight.stages}
    indices = [{index} for index in range(min(degrees))] if len(degrees) == 1 else [set(range(max(degrees)))]
    for group in indices:
        members = [
            device
            for number in weight.stages
            for unit in stages[number]
            for index, device in enumerate(unit.devices)
            if index in group
        ]
        ranks = [
            (number, index) for number in weight.stages for index in sorted(group) if index < len(stages[number][0].devices)
        ]
        before = {gradient[rank] for rank in ranks if rank in gradient}
        before |= {sync for rank in ranks for sync in owners.get(rank, ())}
        everyone = tuple(worker for number in weight.stages for worker in workers[number])
        for rank in ranks:
            owners[rank] = (*owners.get(rank, ()), len(syncs))
        syncs.append(_sync(_ascending(members, pipeline), weight.parameters, everyone, tuple(sorted(before)), cluster))


def _ascending(devices: list[Device], pipeline: Pipeline) -> tuple[Device, ...]:
    """Devices in the order of their ranks, as every process group is made."""
    chosen = set(devices)
    return tuple(device for device in pipeline.devices if device in chosen)


def _sync(
    members: tuple[Device, ...], parameters: int, workers: tuple[int, ...], after: tuple[int, ...], cluster: Cluster
) -> Sync:
    route = fabric(cluster).ring(members)
    size = len(members)
    return Sync(
        workers, after, route, ring_bytes(parameters * GRADIENT_BYTES, size), ring_latency_seconds(route, size)
    )
