"""The replay of each pipeline of a plan: its workers, and the channels between neighbouring stages."""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.cost.fabric import Card, Load
from trainwright.cost.lumps import replay_lumped
from trainwright.cost.pace import Paces, StageKey
from trainwright.cost.replay import Channel, Timeline, Work
from trainwright.cost.schedule import BACKWARD, FORWARD


@dataclass(frozen=True, slots=True)
class StageTimes:
    """By worker of a stage: when it is done with its last operation, and its waiting, as in a timeline.

    Attributes:
        computed: when its last operation ended by the replay; `ends` may be later, where a card holds messages up.
    """

    computed: tuple[float, ...]
    ends: tuple[float, ...]
    transit: tuple[float, ...]
    idle: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Flow:
    """A pipeline's workers, stage by stage, and what they send each other.

    Attributes:
        firsts: by stage: number of its first worker, and behind the last stage the number of all.
        cards: seconds for which the messages of one micro-batch keep every network card busy.
    """

    works: tuple[Work, ...]
    channels: tuple[Channel, ...]
    firsts: tuple[int, ...]
    cards: Load


def flow(index: int, paces: Paces) -> Flow:
    """The flow of the plan's pipeline with that index."""
    pipeline = paces.plan.pipelines[index]
    stages = [paces.stages[index, number] for number in range(len(pipeline.stages))]
    works: list[Work] = []
    firsts = [0]
    for number, stage in enumerate(stages):
        # Replicas that go alike have one worker object: their work is made once.
        alike = {id(worker): worker for worker in stage.workers}
        work_of = {
            key: Work(number, worker.forward.seconds, worker.backward.seconds, worker.last_backward_seconds)
            for key, worker in alike.items()
        }
        works.extend(work_of[id(worker)] for worker in stage.workers)
        firsts.append(len(works))
    channels: list[Channel] = []
    cards = Load()
    queues: dict[tuple[int, int, Card], int] = {}
    for number in range(len(stages) - 1):
        row_bytes = paces.setting.model.output_bytes_per_row(pipeline.stages[number].end - 1)
        upper, lower = stages[number].seats[-1], stages[number + 1].seats[0]
        for direction, sender, receiver, step in (
            (FORWARD, upper, lower, (number, number + 1)),
            (BACKWARD, lower, upper, (number + 1, number)),
        ):
            crossing = paces.setting.boundaries.between(sender, receiver, row_bytes)
            cards = cards.beside(crossing.cards)
            channels.extend(
                Channel(
                    firsts[step[0]] + stages[step[0]].worker_of(piece.sender),
                    firsts[step[1]] + stages[step[1]].worker_of(piece.receiver),
                    direction,
                    piece.drain_seconds,
                    piece.latency_seconds,
                    tuple(
                        (queues.setdefault((number, direction, card), len(queues)), busy) for card, busy in piece.queues
                    ),
                )
                for piece in crossing.pieces
            )
    return Flow(tuple(works), tuple(channels), tuple(firsts), cards)


def replay_pipelines(paces: Paces) -> dict[StageKey, StageTimes]:
    """The times of every stage's workers.

    No worker is done before the busiest card has carried all messages of the iteration: the replay sees what messages
    of one boundary share, and not that those of several boundaries do.
    """
    plan = paces.plan
    found: dict[StageKey, StageTimes] = {}
    busy = Load()
    shortest = float("inf")
    for index, pipeline in enumerate(plan.pipelines):
        flows = flow(index, paces)
        timeline = replay_lumped(plan.schedule, pipeline.micro_batches, flows.works, flows.channels)
        shortest = min(shortest, *timeline.ends)
        for card, seconds in flows.cards.items():
            busy[card] += pipeline.micro_batches * seconds
        for number in range(len(pipeline.stages)):
            found[index, number] = _slice(timeline, flows.firsts[number], flows.firsts[number + 1])
    least = max(busy.values(), default=0.0)
    return {key: _at_least(times, least) for key, times in found.items()} if least > shortest else found


def _slice(timeline: Timeline, first: int, end: int) -> StageTimes:
    ends = timeline.ends[first:end]
    return StageTimes(ends, ends, timeline.transit[first:end], timeline.idle[first:end])


def _at_least(times: StageTimes, seconds: float) -> StageTimes:
    waits = zip(times.ends, times.transit, strict=True)
    return StageTimes(
        times.computed,
        tuple(max(end, seconds) for end in times.ends),
        tuple(wait + max(seconds - end, 0.0) for end, wait in waits),
        times.idle,
    )
