"""When every stage is done: its gradients summed, its weights updated and, where they were sharded, collected again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainwright.cost.compute import update_seconds
from trainwright.cost.fabric import Card
from trainwright.cost.pace import Paces, StageKey
from trainwright.cost.syncs import Sync
from trainwright.plan import Sharding


@dataclass(frozen=True, slots=True)
class StageEnd:
    """How the last backward of a stage ends, over all its workers.

    Attributes:
        seconds: when the last worker is done.
        last_start: when the last worker began its last backward.
        left_end: when the sums beside it are over, if nothing else uses the network.
    """

    seconds: float
    last_start: float = 0.0
    left_end: float = 0.0


def sync_ends(syncs: Sequence[Sync], ends: Mapping[StageKey, StageEnd]) -> tuple[float, ...]:
    """When each sum of gradients ends; `ends` are the stages' last operations.

    Sums that come equally late in their ranks' order share the network cards. A sum is held up on a card at most by as
    many bytes of every other as it has itself (even sharing), and at most until all that arrives there is through.
    Sums beside the last backward are on the cards from its start.
    """
    depth: list[int] = []
    for sync in syncs:
        depth.append(1 + max((depth[number] for number in sync.after), default=-1))
    found = [0.0] * len(syncs)
    for level in range(max(depth, default=-1) + 1):
        chosen = {}
        for number, sync in enumerate(syncs):
            if depth[number] == level:
                owners = [ends[key] for key in sync.owners]
                start = max(one.last_start if sync.beside_backward else one.seconds for one in owners)
                start = max(start, *(found[before] for before in sync.after), 0.0)
                alone = max(one.left_end for one in owners) if sync.beside_backward else start + sync.seconds
                chosen[number] = start, alone, sync
        for number, end in _together(chosen).items():
            found[number] = end
    return tuple(found)


def _together(chosen: Mapping[int, tuple[float, float, Sync]]) -> dict[int, float]:
    """When sums end that may meet on cards, by number; given are when each starts and would end alone."""
    on_card: dict[Card, list[tuple[float, float]]] = {}
    for start, _, sync in chosen.values():
        for card, work in sync.cards.items():
            on_card.setdefault(card, []).append((start, work))
    all_through = {card: _all_through(arrivals) for card, arrivals in on_card.items()}
    found = {}
    for number, (start, end, sync) in chosen.items():
        for card, work in sync.cards.items():
            if len(on_card[card]) > 1:
                shared = start + sum(min(work, other) for _, other in on_card[card])
                end = max(end, min(shared, all_through[card]) + sync.latency_seconds)  # noqa: PLW2901 - the latest
        found[number] = end
    return found


def _all_through(arrivals: Sequence[tuple[float, float]]) -> float:
    """When a card that never rests while there is work is done with all of it: (start, seconds of work) each."""
    end = 0.0
    for start, work in sorted(arrivals):
        end = max(end, start) + work
    return end


@dataclass(frozen=True, slots=True)
class Last:
    """What a stage does behind its last operation.

    Attributes:
        gradients_end: when its gradients are summed over its replicas and over all pipelines.
        shared_end: and when those of weights with other owners are.
        gather_seconds: of collecting the updated weights (zero1, zero2).
    """

    gradients_end: float
    shared_end: float
    gather_seconds: float


def last_steps(paces: Paces, syncs: Sequence[Sync], ends: Mapping[StageKey, StageEnd]) -> dict[StageKey, Last]:
    """By stage; `gradients_end` is 0 where nothing is summed."""
    done = sync_ends(syncs, ends)
    gradients: dict[StageKey, float] = {}
    shared: dict[StageKey, float] = {}
    for sync, end in zip(syncs, done, strict=True):
        into = shared if sync.of_shared_weight else gradients
        for key in sync.owners:
            into[key] = max(into.get(key, 0.0), end)
    return {
        key: Last(gradients.get(key, 0.0), shared.get(key, 0.0), _gather_seconds(paces, key)) for key in paces.stages
    }


def _gather_seconds(paces: Paces, key: StageKey) -> float:
    """All-gathers of the weights that zero1 and zero2 update in parts."""
    stage, setting, total = paces.stages[key], paces.setting, 0.0
    for run, seats, values in zip(stage.stage.layers, stage.seats, paces.held[key].by_run, strict=True):
        if run.sharding in {Sharding.ZERO1, Sharding.ZERO2} and run.data > 1:
            collective = setting.collectives.all_reduce(seats.data_groups)
            total += collective.gather_seconds(values * setting.model.dtype.num_bytes)
    return total


def stage_update_seconds(paces: Paces, key: StageKey, accelerator: str) -> float:
    """The optimizer's step of one rank of a stage; sharded values are divided among the replicas.

    What layers share is updated once, with the first run that holds it, or whole.
    """
    held, total, slowest = paces.held[key], 0.0, 0.0
    for run, values in zip(paces.stages[key].stage.layers, held.by_run, strict=True):
        seconds, counted = update_seconds(accelerator, run, paces.setting)
        each = seconds / counted if counted else 0.0
        total += (values * each if counted else seconds) / (1 if run.sharding is Sharding.NONE else run.data)
        slowest = max(slowest, each)
    return total + held.whole * slowest
