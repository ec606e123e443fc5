"""Replay of each pipeline of a plan, with identical workers merged.

A worker is a replica, or all replicas of a stage that run in lock step.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from trainwright.cost.network import Load, Nic
from trainwright.cost.schedule_replay import (
    BACKWARD,
    FORWARD,
    BoundaryChannel,
    FifoReplay,
    PassDurations,
    Replay,
    ReplayTrace,
)
from trainwright.cost.stage_times import PlanTimes, StageKey
from trainwright.plan import Schedule


@dataclass(frozen=True, slots=True)
class MergedWorkers:
    """Workers of a pipeline, merged into classes that run in lock step.

    Attributes:
        class_of_worker: class number of each worker.
        durations: durations of each class.
        channels: distinct channels between classes.
    """

    class_of_worker: tuple[int, ...]
    durations: tuple[PassDurations, ...]
    channels: tuple[BoundaryChannel, ...]


def merge_identical_workers(durations: Sequence[PassDurations], channels: Sequence[BoundaryChannel]) -> MergedWorkers:
    """Merge workers into the coarsest classes with equal durations and equal channels from equal classes.

    The replay of the classes is exact: by induction over the operations, workers of a class start and end together.
    """
    classes, count = _numbered(durations)
    while channels:
        inputs: list[set[Hashable]] = [set() for _ in durations]
        for channel in channels:
            key = (channel.direction, classes[channel.sender], channel.send_seconds, channel.latency_seconds)
            inputs[channel.receiver].add(key)
        finer, new_count = _numbered([(c, frozenset(i)) for c, i in zip(classes, inputs, strict=True)])
        if new_count == count:
            break
        classes, count = finer, new_count
    first: dict[int, int] = {}
    for worker, colour in enumerate(classes):
        first.setdefault(colour, worker)
    chosen = set(first.values())
    between = dict.fromkeys(
        BoundaryChannel(classes[c.sender], classes[c.receiver], c.direction, c.send_seconds, c.latency_seconds)
        for c in channels
        if c.receiver in chosen
    )
    return MergedWorkers(tuple(classes), tuple(durations[first[colour]] for colour in range(count)), tuple(between))


def replay_merged(
    schedule: Schedule, micro_batches: int, durations: Sequence[PassDurations], channels: Sequence[BoundaryChannel]
) -> ReplayTrace:
    """Replay all workers by class; connected components of the pipeline are replayed separately.

    Workers are not merged if messages queue, since identical workers then receive theirs one after the other.
    """
    if any(channel.nic_queues for channel in channels):
        return FifoReplay(schedule, micro_batches, durations, channels).run()
    merged = merge_identical_workers(durations, channels)
    count = len(merged.durations)
    ends, transit, idle = [0.0] * count, [0.0] * count, [0.0] * count
    for part in _connected_components(merged):
        number = {worker: index for index, worker in enumerate(part)}
        found = Replay(
            schedule,
            micro_batches,
            [merged.durations[worker] for worker in part],
            [
                BoundaryChannel(number[c.sender], number[c.receiver], c.direction, c.send_seconds, c.latency_seconds)
                for c in merged.channels
                if c.receiver in number
            ],
        ).run()
        for index, worker in enumerate(part):
            ends[worker], transit[worker], idle[worker] = (
                found.ends[index],
                found.transit_seconds[index],
                found.idle_seconds[index],
            )
    return ReplayTrace(*(tuple(values[lump] for lump in merged.class_of_worker) for values in (ends, transit, idle)))


def _numbered(values: Sequence[Hashable]) -> tuple[list[int], int]:
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(value, len(numbers)) for value in values], len(numbers)


def _connected_components(lumped: MergedWorkers) -> list[list[int]]:
    """Return the connected components of the classes, each in ascending order."""
    parent = list(range(len(lumped.durations)))

    def root(worker: int) -> int:
        while parent[worker] != worker:
            parent[worker] = parent[parent[worker]]
            worker = parent[worker]
        return worker

    for channel in lumped.channels:
        parent[root(channel.sender)] = root(channel.receiver)
    found: dict[int, list[int]] = {}
    for worker in range(len(parent)):
        found.setdefault(root(worker), []).append(worker)
    return list(found.values())


@dataclass(frozen=True, slots=True)
class StageReplayTimes:
    """End and waiting seconds of each worker of a stage.

    Attributes:
        replay_ends: when its last operation ends in the replay.
        ends: the same, or later if a NIC is busy for longer than that.
    """

    replay_ends: tuple[float, ...]
    ends: tuple[float, ...]
    transit_seconds: tuple[float, ...]
    idle_seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PipelineChannels:
    """Workers of a pipeline, stage by stage, and the channels between them.

    Attributes:
        first_worker_of_stage: `[stage + 1]` number of each stage's first worker, then the number of workers.
        nic_seconds: busy seconds of every NIC for the messages of one micro-batch.
    """

    durations: tuple[PassDurations, ...]
    channels: tuple[BoundaryChannel, ...]
    first_worker_of_stage: tuple[int, ...]
    nic_seconds: Load


def channels_of(index: int, plan_times: PlanTimes) -> PipelineChannels:
    """Return the workers and channels of the plan's pipeline `index`."""
    pipeline = plan_times.plan.pipelines[index]
    stages = [plan_times.stages[index, number] for number in range(len(pipeline.stages))]
    durations: list[PassDurations] = []
    firsts = [0]
    for number, stage in enumerate(stages):
        # Replicas that run in lock step share one worker object, so their durations are computed once.
        alike = {id(worker): worker for worker in stage.workers}
        durations_of = {
            key: PassDurations(number, worker.forward.seconds, worker.backward.seconds, worker.last_backward_seconds)
            for key, worker in alike.items()
        }
        durations.extend(durations_of[id(worker)] for worker in stage.workers)
        firsts.append(len(durations))
    channels: list[BoundaryChannel] = []
    cards = Load()
    queues: dict[tuple[int, int, Nic], int] = {}
    for number in range(len(stages) - 1):
        row_bytes = plan_times.context.model.output_bytes_per_row(pipeline.stages[number].end - 1)
        upper, lower = stages[number].layouts[-1], stages[number + 1].layouts[0]
        for direction, sender, receiver, step in (
            (FORWARD, upper, lower, (number, number + 1)),
            (BACKWARD, lower, upper, (number + 1, number)),
        ):
            crossing = plan_times.context.boundary_costs.messages_between(sender, receiver, row_bytes)
            cards = cards.concurrent_with(crossing.nic_seconds)
            channels.extend(
                BoundaryChannel(
                    firsts[step[0]] + stages[step[0]].worker_index(piece.sender),
                    firsts[step[1]] + stages[step[1]].worker_index(piece.receiver),
                    direction,
                    piece.send_seconds,
                    piece.latency_seconds,
                    tuple(
                        (queues.setdefault((number, direction, card), len(queues)), busy) for card, busy in piece.queues
                    ),
                )
                for piece in crossing.pieces
            )
    return PipelineChannels(tuple(durations), tuple(channels), tuple(firsts), cards)


def replay_pipelines(plan_times: PlanTimes) -> dict[StageKey, StageReplayTimes]:
    """Return the times of every stage's workers.

    No worker ends before the busiest NIC has carried all messages of the iteration: the replay covers NIC sharing within one
    boundary only, so this floor covers sharing between boundaries.
    """
    plan = plan_times.plan
    found: dict[StageKey, StageReplayTimes] = {}
    busy = Load()
    shortest = float("inf")
    for index, pipeline in enumerate(plan.pipelines):
        flows = channels_of(index, plan_times)
        timeline = replay_merged(plan.schedule, pipeline.micro_batches, flows.durations, flows.channels)
        shortest = min(shortest, *timeline.ends)
        for card, seconds in flows.nic_seconds.items():
            busy[card] += pipeline.micro_batches * seconds
        for number in range(len(pipeline.stages)):
            found[index, number] = _slice(
                timeline, flows.first_worker_of_stage[number], flows.first_worker_of_stage[number + 1]
            )
    busiest_nic_seconds = max(busy.values(), default=0.0)
    return (
        {key: _at_least(times, busiest_nic_seconds) for key, times in found.items()}
        if busiest_nic_seconds > shortest
        else found
    )


def _slice(timeline: ReplayTrace, first: int, end: int) -> StageReplayTimes:
    ends = timeline.ends[first:end]
    return StageReplayTimes(ends, ends, timeline.transit_seconds[first:end], timeline.idle_seconds[first:end])


def _at_least(times: StageReplayTimes, seconds: float) -> StageReplayTimes:
    waits = zip(times.ends, times.transit_seconds, strict=True)
    return StageReplayTimes(
        times.replay_ends,
        tuple(max(end, seconds) for end in times.ends),
        tuple(wait + max(seconds - end, 0.0) for end, wait in waits),
        times.idle_seconds,
    )
