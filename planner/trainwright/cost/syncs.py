"""Which gradients are summed over whom after the last backward: flat buckets, sharded ones, shared weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from math import lcm

from trainwright.cost.collectives import Collective, Nodes
from trainwright.cost.fabric import Card, Load
from trainwright.cost.pace import Paces, StageKey
from trainwright.cost.seats import Seats
from trainwright.cost.shared_weights import are_summed_alike
from trainwright.plan import LayerRun, Sharding

Cost = tuple[float, float, Load]
"""Seconds, the latency in them, and seconds of work on every network card."""


@dataclass(frozen=True, slots=True)
class Sync:
    """One sum of gradients: starts when its owners' workers and earlier sums are done.

    Attributes:
        owners: stages whose ranks take part.
        after: numbers of the sums that some of these ranks do before.
        seconds: alone on the network, its groups at once; 0 where the owners sum beside their last backward, whose
            end says when that is done.
        latency_seconds: of these, what no bandwidth shortens.
        cards: seconds of work on every network card.
        of_shared_weight: whether it sums a weight with owners in several stages.
    """

    owners: tuple[StageKey, ...]
    after: tuple[int, ...]
    seconds: float
    latency_seconds: float
    cards: Mapping[Card, float] = field(default_factory=dict)
    of_shared_weight: bool = False
    beside_backward: bool = False


@dataclass(frozen=True)
class Holder:
    """One pipeline's ranks that hold the layers of a bucket, and the run they hold them in."""

    key: StageKey
    number: int
    run: LayerRun
    seats: Seats

    @property
    def bucket(self) -> tuple[object, ...]:
        """What layers that are summed together share."""
        seats = self.seats
        return self.key, seats.tensor, seats.data, seats.order, self.run.sharding


@dataclass(frozen=True)
class Bucket:
    """Layers with the same owners everywhere: their gradients are one message.

    Attributes:
        values: by holder: on one of its ranks.
        is_scattered: whether each pipeline sums among its replicas first, of which each then has a part. Pipelines that
            divide the weights in different ways sum them whole.
    """

    holders: tuple[Holder, ...]
    values: tuple[int, ...]
    is_scattered: bool


def buckets(paces: Paces) -> tuple[Bucket, ...]:
    """The buckets of a plan: weights summed apart left out."""
    by_layer = [_by_first_layer(index, paces) for index in range(len(paces.plan.pipelines))]
    cuts = sorted({first for runs in by_layer for first in runs} | {len(paces.setting.model.layers)})
    current: list[Holder] = []
    found: dict[tuple[object, ...], Bucket] = {}
    for first, end in pairwise(cuts):
        current = [runs.get(first) or current[index] for index, runs in enumerate(by_layer)]
        values = tuple(_values(holder, first, end, paces) for holder in current)
        name = tuple(holder.bucket for holder in current)
        if name in found:
            values = tuple(a + b for a, b in zip(found[name].values, values, strict=True))
        is_scattered = first not in paces.unlike_layers and current[0].run.sharding is not Sharding.NONE
        found[name] = Bucket(tuple(current), values, is_scattered)
    return tuple(found.values())


def _by_first_layer(index: int, paces: Paces) -> dict[int, Holder]:
    return {
        run.first: Holder((index, number), place, run, paces.seats[index, number][place])
        for number, stage in enumerate(paces.plan.pipelines[index].stages)
        for place, run in enumerate(stage.layers)
    }


def _values(holder: Holder, first: int, end: int, paces: Paces) -> int:
    """Values of the layers on one of the holder's ranks; weights summed apart left out, others counted once."""
    setting, tensor = paces.setting, holder.run.tensor
    total = 0
    for kind, count in setting.kind_counts(first, end):
        total += count * setting.values_at(kind, tensor)
        name = kind.shared_weight
        if name is not None:
            is_first = name not in paces.apart and first <= setting.first_owner[name] < end
            total -= (
                count - (is_first and setting.model.kind_of(setting.first_owner[name]) is kind)
            ) * setting.shared_at(kind, tensor)
    return total


def gradient_syncs(paces: Paces) -> tuple[Sync, ...]:
    """All sums after the last backward, in the order in which ranks do them."""
    return _Builder(paces).build()


class _Builder:
    def __init__(self, paces: Paces) -> None:
        self.paces, self.setting = paces, paces.setting
        self.syncs: list[Sync] = []
        self.last_of: dict[StageKey, tuple[int, ...]] = {}

    def build(self) -> tuple[Sync, ...]:
        self._add_left()
        for bucket in buckets(self.paces):
            self._add_bucket(bucket)
        for name, owners in self.paces.apart.items():
            self._add_shared(name, owners)
        return tuple(self.syncs)

    def _add(self, owners: tuple[StageKey, ...], cost: Cost, *, shared: bool = False) -> None:
        seconds, latency, cards = cost
        if seconds <= 0:
            return
        after = tuple(sorted({number for key in owners for number in self.last_of.get(key, ())}))
        for key in owners:
            self.last_of[key] = (len(self.syncs),)
        self.syncs.append(Sync(owners, after, seconds, latency, cards, shared))

    def _add_left(self) -> None:
        """Sums that run beside the last backward: what it did not hide of them is over later."""
        for key, stage in self.paces.stages.items():
            work = Load()
            for run, seats in zip(stage.stage.layers, stage.seats, strict=True):
                if self.paces.sums_meanwhile(run):
                    values = self.setting.parameters(run.first, run.end, run.tensor)
                    collective = self.setting.collectives.all_reduce(seats.data_groups)
                    sum_up = _all_reduce if run.sharding is Sharding.NONE else _reduce_scatter
                    work = work.beside(sum_up(collective, values * self.setting.gradient_dtype.num_bytes)[2])
            if any(worker.left_seconds > 0 for worker in stage.workers):
                self.last_of[key] = (len(self.syncs),)
                self.syncs.append(Sync((key,), (), 0.0, 0.0, work, beside_backward=True))

    def _add_bucket(self, bucket: Bucket) -> None:
        owners = tuple(holder.key for holder in bucket.holders)
        num_bytes = self.setting.gradient_dtype.num_bytes
        if bucket.is_scattered:
            for holder, values in zip(bucket.holders, bucket.values, strict=True):
                if holder.run.data > 1 and not self.paces.sums_meanwhile(holder.run):
                    collective = self.setting.collectives.all_reduce(holder.seats.data_groups)
                    self._add((holder.key,), _reduce_scatter(collective, values * num_bytes))
            if len(bucket.holders) > 1:
                self._add(owners, self._across(bucket, num_bytes, sharded=True))
        elif len(bucket.holders) > 1 or not self.paces.sums_meanwhile(bucket.holders[0].run):
            self._add(owners, self._across(bucket, num_bytes, sharded=False))

    def _across(self, bucket: Bucket, num_bytes: int, *, sharded: bool) -> Cost:
        """One ring for each finest slice of the weights, over all ranks that hold it.

        Slices go by tensor index; where gradients are sharded by now, one rank of each pipeline holds one. Who holds
        several slices takes part in as many rings, one after the other. Values that no
        tensor degree divides are spread over the rings of a rank of the highest degree.
        """
        seats = [holder.seats for holder in bucket.holders]
        values = max(value * one.tensor for value, one in zip(bucket.values, seats, strict=True))
        message = values / lcm(*(one.tensor for one in seats)) * num_bytes
        message /= seats[0].data if sharded else 1
        total: Cost = (0.0, 0.0, Load())
        for groups in slice_rounds(seats, sharded=sharded):
            cost = _all_reduce(self.setting.collectives.all_reduce(groups), message)
            total = (total[0] + cost[0], total[1] + cost[1], total[2].beside(cost[2]))
        return total

    def _add_shared(self, name: str, owners: Sequence[StageKey]) -> None:
        """Over all owners: by tensor index where they have one degree and stages hold it in one way, else all of them at once."""
        setting = self.setting
        holding = [self.paces.holdings[key][name] for key in owners]
        seats = [runs[0].seats for runs in holding]
        tensors = {one.tensor for one in seats}
        if len(tensors) == 1 and all(map(are_summed_alike, holding)):
            groups = tuple(
                tuple(node for one in seats for node in one.data_groups[index]) for index in range(min(tensors))
            )
        else:
            groups = (tuple(node for one in seats for node in one.nodes),)
        message = max(one.values for runs in holding for one in runs) * setting.gradient_dtype.num_bytes
        self._add(tuple(owners), _all_reduce(setting.collectives.all_reduce(groups), message), shared=True)


def slice_rounds(seats: Sequence[Seats], *, sharded: bool) -> list[tuple[Nodes, ...]]:
    """Rings over the ranks that hold the same slice, in rounds in which no rank takes part twice.

    Slices are as fine as the tensor degrees together make them; where replicas share them out, all in the same way, each
    part is a slice of its own.
    """
    tensors = lcm(*(one.tensor for one in seats))
    turns = tensors // min(one.tensor for one in seats)
    rounds: dict[int, list[Nodes]] = {}
    for tensor in range(tensors):
        groups = [one.data_groups[tensor * one.tensor // tensors] for one in seats]
        rings = zip(*groups, strict=True) if sharded else [chain.from_iterable(groups)]
        rounds.setdefault(tensor % turns, []).extend(tuple(ring) for ring in rings)
    return [tuple(rings) for _, rings in sorted(rounds.items())]


def _all_reduce(collective: Collective, message_bytes: float) -> Cost:
    return _ring(collective, message_bytes, 1.0, collective.ratios.all_reduce)


def _reduce_scatter(collective: Collective, message_bytes: float) -> Cost:
    return _ring(collective, message_bytes, 0.5, collective.ratios.reduce_scatter)


def _ring(collective: Collective, message_bytes: float, share: float, ratio: float) -> Cost:
    """That share of a ring's all-reduce, by a ratio longer."""
    work = Load()
    if message_bytes <= 0:
        return 0.0, 0.0, work
    way = collective.way(message_bytes)
    for card, seconds in way.cards.items():
        work[card] = ratio * share * message_bytes * seconds
    return ratio * share * way.seconds(message_bytes), ratio * share * way.latency_seconds, work
