"""Stages taken apart, layer by layer, and put together again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from trainwright.cluster import Device
from trainwright.plan import LayerRun, Order, Pipeline, Plan, Sharding, Stage


@dataclass(frozen=True, slots=True)
class Strategy:
    """How one layer is computed; see `LayerRun`. What a single replica would shard is not sharded."""

    rows: tuple[int, ...]
    tensor: int = 1
    sharding: Sharding = Sharding.NONE
    recompute: bool = False
    order: Order = Order.TENSOR_INNER

    @property
    def data(self) -> int:
        return len(self.rows)

    def run(self, first: int, count: int) -> LayerRun:
        sharding = self.sharding if self.data > 1 else Sharding.NONE
        return LayerRun(first, count, self.tensor, self.data, self.rows, self.order, sharding, self.recompute)

    def regrouped(self, tensor: int, devices: int, rows: int) -> Strategy:
        """The same at another tensor degree on so many devices, rows dealt out evenly."""
        return replace(self, tensor=tensor, rows=scaled((1,) * (devices // tensor), rows))


@dataclass(frozen=True, slots=True)
class Setup:
    """A stage: its devices, and the strategy of every layer."""

    devices: tuple[Device, ...]
    layers: tuple[Strategy, ...]

    @classmethod
    def of(cls, stage: Stage) -> Setup:
        layers: list[Strategy] = []
        for run in stage.layers:
            layers += [Strategy(run.rows, run.tensor, run.sharding, run.recompute, run.order)] * run.count
        return cls(stage.devices, tuple(layers))

    def stage(self, first: int) -> Stage:
        """From that layer on; neighbouring layers of one strategy make one run."""
        runs = []
        for strategy, alike in groupby(self.layers):
            count = len(list(alike))
            runs.append(strategy.run(first, count))
            first += count
        return Stage(self.devices, tuple(runs))

    def each(self, change: Callable[[Strategy], Strategy]) -> Setup:
        """Every layer changed alike."""
        known = {layer: change(layer) for layer in dict.fromkeys(self.layers)}
        return replace(self, layers=tuple(known[layer] for layer in self.layers))

    def some(self, chosen: Container[int], change: Callable[[Strategy], Strategy]) -> Setup:
        """The layers with these numbers changed."""
        return replace(
            self, layers=tuple(change(one) if number in chosen else one for number, one in enumerate(self.layers))
        )

    def with_rows(self, rows: int) -> Setup:
        """Micro-batches of so many rows, in the same proportions."""
        return self.each(lambda layer: replace(layer, rows=scaled(layer.rows, rows)))

    def regrouped(self, tensor: int, rows: int) -> Setup:
        """At another tensor degree, rows dealt out evenly."""
        return self.each(lambda layer: layer.regrouped(tensor, len(self.devices), rows))

    def on(self, devices: tuple[Device, ...], rows: int) -> Setup:
        """On other devices, each node's replicas in the proportions that they had; at tensor degree 1 where the degree does not divide them."""

        def change(layer: Strategy) -> Strategy:
            tensor = layer.tensor if len(devices) % layer.tensor == 0 else 1
            known: dict[str, list[int]] = {}
            for share, node in zip(layer.rows, _nodes(layer, self.devices), strict=True):
                known.setdefault(node, []).append(share)
            changed = replace(layer, tensor=tensor, rows=(1,) * (len(devices) // tensor))
            mean, met, shares = sum(layer.rows) // layer.data, Counter[str](), []
            for node in _nodes(changed, devices):
                shares.append(known[node][met[node] % len(known[node])] if node in known else mean)
                met[node] += 1
            return replace(changed, rows=scaled(shares, rows))

        return replace(self.each(change), devices=devices)

    @property
    def most_data(self) -> int:
        return max(layer.data for layer in self.layers)

    @property
    def most_tensor(self) -> int:
        return max(layer.tensor for layer in self.layers)

    @property
    def least_tensor(self) -> int:
        return min(layer.tensor for layer in self.layers)


def _nodes(layer: Strategy, devices: tuple[Device, ...]) -> Iterator[str]:
    """By replica: the node of its first device."""
    return (group[0].node for group in layer.run(0, 1).tensor_groups(devices))


def sharded(plan: Plan, sharding: Sharding) -> Plan:
    """With that sharding everywhere."""
    for index, pipeline in enumerate(plan.pipelines):
        stages = [stage.each(lambda layer: replace(layer, sharding=sharding)) for stage in setups(pipeline)]
        plan = with_setups(plan, index, stages)
    return plan


def setups(pipeline: Pipeline) -> tuple[Setup, ...]:
    """Its stages taken apart."""
    return tuple(Setup.of(stage) for stage in pipeline.stages)


def with_setups(plan: Plan, index: int, stages: Sequence[Setup], micro_batches: int | None = None) -> Plan:
    """The plan with other stages (and number of micro-batches) in one pipeline."""
    first, made = 0, []
    for setup in stages:
        made.append(setup.stage(first))
        first += len(setup.layers)
    count = plan.pipelines[index].micro_batches if micro_batches is None else micro_batches
    pipeline = Pipeline(count, sum(stages[0].layers[0].rows), tuple(made))
    return replace(plan, pipelines=(*plan.pipelines[:index], pipeline, *plan.pipelines[index + 1 :]))


def scaled(rows: Sequence[int], total: int) -> tuple[int, ...]:
    """Rows in about the same proportions with another sum, at least one each (largest remainders).

    Raises ValueError where there are too few.
    """
    if total < len(rows):
        raise ValueError(f"{len(rows)} replicas cannot share {total} rows")
    whole = sum(rows)
    found = [max(one * total // whole, 1) for one in rows]
    order = sorted(range(len(rows)), key=lambda replica: (-(rows[replica] * total % whole), replica))
    position = 0
    while sum(found) < total:
        found[order[position % len(rows)]] += 1
        position += 1
    while sum(found) > total:
        found[found.index(max(found))] -= 1
    return tuple(found)
