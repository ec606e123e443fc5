"""Replay of each pipeline of a plan, with identical workers merged.

A worker is a replica, or all replicas of a stage that run in lock step.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from trainwright.cost.network import Load, Nic
from trainwright.cost.plan_layout import StageKey
from trainwright.cost.schedule_replay import (
    BACKWARD,
    FORWARD,
    BlockingReplay,
    BoundaryChannel,
    FifoReplay,
    PassDurations,
    Replay,
    ReplayTrace,
)
from trainwright.cost.stage_times import PlanTimes, StageTimes
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


def merge_identical_workers(
    durations: Sequence[PassDurations], channels: Sequence[BoundaryChannel], *, hides_transfers: bool = True
) -> MergedWorkers:
    """Merge workers into the coarsest classes with equal durations and equal channels from equal classes.

    Unless the runtime `hides_transfers`, channels to equal classes must be equal, too, since a sender waits for them.
    The replay of the classes is exact: by induction over the operations, workers of a class start and end together.
    """
    classes, count = _numbered(durations)
    while channels:
        ends: list[set[Hashable]] = [set() for _ in durations]
        for channel in channels:
            costs = (channel.direction, channel.send_seconds, channel.latency_seconds)
            ends[channel.receiver].add((classes[channel.sender], *costs))
            if not hides_transfers:
                ends[channel.sender].add((*costs, classes[channel.receiver]))
        finer, new_count = _numbered([(c, frozenset(e)) for c, e in zip(classes, ends, strict=True)])
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
    schedule: Schedule,
    micro_batches: int,
    durations: Sequence[PassDurations],
    channels: Sequence[BoundaryChannel],
    *,
    hides_transfers: bool = True,
) -> ReplayTrace:
    """Replay all workers by class; connected components of the pipeline are replayed separately.

    Workers are not merged if messages queue, since identical workers then receive theirs one after the other.
    """
    if any(channel.nic_queues for channel in channels):
        queued = FifoReplay if hides_transfers else BlockingReplay
        return queued(schedule, micro_batches, durations, channels).run()
    replay = Replay if hides_transfers else BlockingReplay
    merged = merge_identical_workers(durations, channels, hides_transfers=hides_transfers)
    count = len(merged.durations)
    ends, transit, idle = [0.0] * count, [0.0] * count, [0.0] * count
    for part in _connected_components(merged):
        number = {worker: index for index, worker in enumerate(part)}
        trace = replay(
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
                trace.ends[index],
                trace.transit_seconds[index],
                trace.idle_seconds[index],
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
    components: dict[int, list[int]] = {}
    for worker in range(len(parent)):
        components.setdefault(root(worker), []).append(worker)
    return list(components.values())


@dataclass(frozen=True, slots=True)
class StageReplayTimes:
    """End and waiting seconds of each worker of a stage.

    Attributes:
        replay_ends: when its last operation ends in the replay.
        ends: the same, or later if a NIC is busy for longer than that.
        transit_seconds: waiting for messages in transit, and gathers of their slices.
    """

    replay_ends: tuple[float, ...]
    ends: tuple[float, ...]
    transit_seconds: tuple[float, ...]
    idle_seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PipelineChannels:
    """Workers of a pipeline, stage by stage, and the channels between them.

    Attributes:
        durations: of each worker; a pass begins with the gather of the boundary that it needs, where that came in slices.
        gather_seconds: `[worker]` seconds of these gathers, of one micro-batch in both directions.
        first_worker_of_stage: `[stage + 1]` number of each stage's first worker, then the number of workers.
        nic_seconds: busy seconds of every NIC for the messages of one micro-batch.
    """

    durations: tuple[PassDurations, ...]
    channels: tuple[BoundaryChannel, ...]
    first_worker_of_stage: tuple[int, ...]
    gather_seconds: tuple[float, ...]
    nic_seconds: Load


def channels_of(index: int, plan_times: PlanTimes) -> PipelineChannels:
    """Return the workers and channels of the plan's pipeline `index`."""
    pipeline = plan_times.plan.pipelines[index]
    stages = [plan_times.stages[index, number] for number in range(len(pipeline.stages))]
    firsts = tuple(accumulate((len(stage.workers) for stage in stages), initial=0))
    channels: list[BoundaryChannel] = []
    cards = Load()
    queues: dict[tuple[int, int, Nic], int] = {}
    gathers = {FORWARD: [0.0] * firsts[-1], BACKWARD: [0.0] * firsts[-1]}
    for number in range(len(stages) - 1):
        row_bytes = plan_times.context.model.output_bytes_per_row(pipeline.stages[number].end - 1)
        upper, lower = stages[number].layouts[-1], stages[number + 1].layouts[0]
        is_divided = plan_times.divided_sides(index, number).after
        for direction, sender, receiver, step in (
            (FORWARD, upper, lower, (number, number + 1)),
            (BACKWARD, lower, upper, (number + 1, number)),
        ):
            crossing = plan_times.context.boundary_costs.messages_between(
                sender, receiver, row_bytes, is_divided=is_divided
            )
            cards = cards.concurrent_with(crossing.nic_seconds)
            for replica, seconds in enumerate(crossing.gather_seconds):
                worker = firsts[step[1]] + stages[step[1]].worker_index(replica)
                gathers[direction][worker] = max(gathers[direction][worker], seconds)
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
    both = list(zip(gathers[FORWARD], gathers[BACKWARD], strict=True))
    return PipelineChannels(_durations(stages, both), tuple(channels), firsts, tuple(map(sum, both)), cards)


def _durations(stages: Sequence[StageTimes], gathers: Sequence[tuple[float, float]]) -> tuple[PassDurations, ...]:
    """Return the durations of each worker, given the `[worker]` seconds that its forwards and backwards gather."""
    workers = [(number, worker) for number, stage in enumerate(stages) for worker in stage.workers]
    # Replicas that run in lock step share one worker object, so their durations are computed once.
    durations_of: dict[tuple[int, float, float], PassDurations] = {}
    durations = []
    for (number, worker), (forward, backward) in zip(workers, gathers, strict=True):
        key = id(worker), forward, backward
        if key not in durations_of:
            durations_of[key] = PassDurations(
                number,
                worker.forward.seconds + forward,
                worker.backward.seconds + backward,
                worker.last_backward_seconds + backward,
                worker.first_gather_seconds,
            )
        durations.append(durations_of[key])
    return tuple(durations)


def interleaved_times(times: StageReplayTimes, chunks: int) -> StageReplayTimes:
    """Return the times of a stage whose ranks hold several chunks of layers each.

    A micro-batch passes every stage as often, in passes that take that part of the time: the bubble shrinks by the number of
    chunks, and there are as many times more messages (Narayanan et al. 2021, section 2.2).
    """
    if chunks == 1:
        return times
    idle = tuple(seconds / chunks for seconds in times.idle_seconds)
    transit = tuple(seconds * chunks for seconds in times.transit_seconds)
    waits = zip(idle, transit, times.idle_seconds, times.transit_seconds, strict=True)
    change = [after + moved - before - sent for after, moved, before, sent in waits]
    return StageReplayTimes(
        tuple(end + by for end, by in zip(times.replay_ends, change, strict=True)),
        tuple(end + by for end, by in zip(times.ends, change, strict=True)),
        transit,
        idle,
    )


def replay_pipelines(plan_times: PlanTimes) -> dict[StageKey, StageReplayTimes]:
    """Return the times of every stage's workers.

    No worker ends before the busiest NIC has carried all messages of the iteration: the replay covers NIC sharing within one
    boundary only, so this floor covers sharing between boundaries.
    """
    plan = plan_times.plan
    times_of: dict[StageKey, StageReplayTimes] = {}
    busy = Load()
    runtime = plan_times.context.runtime
    for index, pipeline in enumerate(plan.pipelines):
        flows = channels_of(index, plan_times)
        timeline = replay_merged(
            plan.schedule,
            pipeline.micro_batches,
            flows.durations,
            flows.channels,
            hides_transfers=runtime.hides_transfers,
        )
        chunks = runtime.chunks_of(pipeline.micro_batches, pipeline.layer_counts)
        for card, seconds in flows.nic_seconds.items():
            busy[card] += chunks * pipeline.micro_batches * seconds
        transit = [
            waited + pipeline.micro_batches * gathered
            for waited, gathered in zip(timeline.transit_seconds, flows.gather_seconds, strict=True)
        ]
        for number, (first, end) in enumerate(pairwise(flows.first_worker_of_stage)):
            ends, idle = timeline.ends[first:end], timeline.idle_seconds[first:end]
            times = StageReplayTimes(ends, ends, tuple(transit[first:end]), idle)
            times_of[index, number] = interleaved_times(times, chunks)
    shortest = min(min(times.ends) for times in times_of.values())
    busiest_nic_seconds = max(busy.values(), default=0.0)
    return (
        {key: _at_least(times, busiest_nic_seconds) for key, times in times_of.items()}
        if busiest_nic_seconds > shortest
        else times_of
    )


def _at_least(times: StageReplayTimes, seconds: float) -> StageReplayTimes:
    waits = zip(times.ends, times.transit_seconds, strict=True)
    return StageReplayTimes(
        times.replay_ends,
        tuple(max(end, seconds) for end in times.ends),
        tuple(wait + max(seconds - end, 0.0) for end, wait in waits),
        times.idle_seconds,
    )
