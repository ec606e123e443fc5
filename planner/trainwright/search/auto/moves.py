"""Small changes of a plan: each gives a valid plan that differs in one respect."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from trainwright.cluster import Device
from trainwright.plan import Pipeline, Plan, Sharding, Stage
from trainwright.search.auto.drafting import stage_of

LARGEST_SHIFT = 4
"""Layers moved at a time: 1, 2 and so many."""
Move = Callable[[], Plan]


@dataclass(frozen=True)
class Setup:
    """A stage whose layers all have the same degrees and rows, taken apart.

    Attributes:
        layers: by layer: what it shards, and whether it is recomputed.
    """

    devices: tuple[Device, ...]
    first: int
    layers: tuple[tuple[Sharding, bool], ...]
    tensor: int
    rows: tuple[int, ...]

    @classmethod
    def of(cls, stage: Stage) -> Setup | None:
        """None where the runs of the stage differ in more than sharding and recompute."""
        run = stage.layers[0]
        if any((one.tensor, one.rows, one.order) != (run.tensor, run.rows, run.order) for one in stage.layers):
            return None
        layers = tuple((one.sharding, one.recompute) for one in stage.layers for _ in range(one.count))
        return cls(stage.devices, stage.first, layers, run.tensor, run.rows)

    def stage(self) -> Stage:
        return stage_of(self.devices, self.first, self.layers, self.tensor, self.rows)


def with_stages(plan: Plan, index: int, stages: Sequence[Setup], micro_batches: int | None = None) -> Plan:
    """The plan with other stages (and number of micro-batches) in one pipeline."""
    old = plan.pipelines[index]
    first, fresh = 0, []
    for setup in stages:
        fresh.append(replace(setup, first=first).stage())
        first += len(setup.layers)
    rows = sum(stages[0].rows)
    pipeline = Pipeline(micro_batches or old.micro_batches, rows, tuple(fresh))
    return replace(plan, pipelines=(*plan.pipelines[:index], pipeline, *plan.pipelines[index + 1 :]))


def setups(pipeline: Pipeline) -> list[Setup] | None:
    """Its stages taken apart; None where one of them cannot be."""
    found = [Setup.of(stage) for stage in pipeline.stages]
    return None if any(one is None for one in found) else [one for one in found if one is not None]


def shifts(plan: Plan) -> Iterator[Move]:
    """Layers handed to a neighbouring stage."""
    for index, pipeline in enumerate(plan.pipelines):
        stages = setups(pipeline)
        if stages is None:
            continue
        for number in range(len(stages) - 1):
            for count in (1, 2, LARGEST_SHIFT):
                for down in (True, False):
                    giver, taker = (number, number + 1) if down else (number + 1, number)
                    if len(stages[giver].layers) > count:
                        yield partial(_shifted, plan, index, stages, giver, taker, count)


def _shifted(plan: Plan, index: int, stages: Sequence[Setup], giver: int, taker: int, count: int) -> Plan:  # noqa: PLR0913, PLR0917 - a move
    changed = list(stages)
    give, take = stages[giver].layers, stages[taker].layers
    down = giver < taker
    changed[giver] = replace(stages[giver], layers=give[:-count] if down else give[count:])
    more = (take[0] if down else take[-1],) * count
    changed[taker] = replace(stages[taker], layers=(*more, *take) if down else (*take, *more))
    return with_stages(plan, index, changed)


def shardings(plan: Plan) -> Iterator[Move]:
    """Another sharding: of all stages, then of one."""
    for means in Sharding:
        yield partial(_sharded, plan, means, None)
    stages = sum(len(pipeline.stages) for pipeline in plan.pipelines)
    if stages > 1:
        for number in range(stages):
            for means in Sharding:
                yield partial(_sharded, plan, means, number)


def _sharded(plan: Plan, means: Sharding, chosen: int | None) -> Plan:
    pipelines, number = [], 0
    for pipeline in plan.pipelines:
        stages = []
        for stage in pipeline.stages:
            if chosen in {None, number}:
                runs = tuple(replace(run, sharding=means if run.data > 1 else Sharding.NONE) for run in stage.layers)
                setup = Setup.of(Stage(stage.devices, runs))
                stage = Stage(stage.devices, runs) if setup is None else setup.stage()  # noqa: PLW2901 - the changed stage
            stages.append(stage)
            number += 1
        pipelines.append(replace(pipeline, stages=tuple(stages)))
    return replace(plan, pipelines=tuple(pipelines))


def recomputes(plan: Plan) -> Iterator[Move]:
    """One layer, or half of them, recomputed more or less in one stage; and none, or all, in all stages."""
    for index, pipeline in enumerate(plan.pipelines):
        stages = setups(pipeline)
        if stages is None:
            continue
        if any(again for setup in stages for _, again in setup.layers):
            yield partial(_recomputed_everywhere, plan, index, stages, False)
        yield partial(_recomputed_everywhere, plan, index, stages, True)
        for number, setup in enumerate(stages):
            again = [layer for layer, (_, recompute) in enumerate(setup.layers) if recompute]
            kept = [layer for layer, (_, recompute) in enumerate(setup.layers) if not recompute]
            for chosen, value in ((again[-1:], False), (again[len(again) // 2 :], False), (kept[:1], True)):
                if chosen:
                    yield partial(_recomputed, plan, index, stages, number, tuple(chosen), value)


def _recomputed(  # noqa: PLR0913, PLR0917 - a move
    plan: Plan, index: int, stages: Sequence[Setup], number: int, chosen: Sequence[int], value: bool
) -> Plan:
    setup = stages[number]
    layers = tuple((means, value if layer in chosen else again) for layer, (means, again) in enumerate(setup.layers))
    changed = [*stages[:number], replace(setup, layers=layers), *stages[number + 1 :]]
    return with_stages(plan, index, changed)


def _recomputed_everywhere(plan: Plan, index: int, stages: Sequence[Setup], value: bool) -> Plan:
    return with_stages(
        plan, index, [replace(one, layers=tuple((means, value) for means, _ in one.layers)) for one in stages]
    )


def batches(plan: Plan) -> Iterator[Move]:
    """Micro-batches of twice, three times, half or a third of the rows, in every pipeline by itself."""
    for index, pipeline in enumerate(plan.pipelines):
        stages = setups(pipeline)
        if stages is None:
            continue
        for factor in (2, 3):
            if pipeline.micro_batches % factor == 0:
                larger = [replace(one, rows=tuple(rows * factor for rows in one.rows)) for one in stages]
                yield partial(with_stages, plan, index, larger, pipeline.micro_batches // factor)
            if pipeline.micro_batch_size % factor == 0:
                size = pipeline.micro_batch_size // factor
                if all(len(one.rows) <= size for one in stages):
                    smaller = [replace(one, rows=scaled(one.rows, size)) for one in stages]
                    yield partial(with_stages, plan, index, smaller, pipeline.micro_batches * factor)


def scaled(rows: Sequence[int], total: int) -> tuple[int, ...]:
    """Rows in about the same proportions with another sum, at least one each (largest remainders)."""
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


def degrees(plan: Plan) -> Iterator[Move]:
    """Twice or half the tensor degree in one stage."""
    for index, pipeline in enumerate(plan.pipelines):
        stages = setups(pipeline)
        if stages is None:
            continue
        size = pipeline.micro_batch_size
        for number, setup in enumerate(stages):
            for tensor in (setup.tensor * 2, setup.tensor // 2):
                if tensor and len(setup.devices) % tensor == 0 and len(setup.devices) // tensor <= size:
                    rows = scaled((1,) * (len(setup.devices) // tensor), size)
                    changed = replace(setup, tensor=tensor, rows=rows)
                    if len(rows) == 1:
                        changed = replace(changed, layers=tuple((Sharding.NONE, again) for _, again in setup.layers))
                    yield partial(with_stages, plan, index, [*stages[:number], changed, *stages[number + 1 :]])


def seats(plan: Plan) -> Iterator[Move]:
    """Devices handed to a neighbouring stage, a half, a quarter or one tensor group; or two stages that change places."""
    for index, pipeline in enumerate(plan.pipelines):
        stages = setups(pipeline)
        if stages is None:
            continue
        for number in range(len(stages) - 1):
            for giver, taker in ((number, number + 1), (number + 1, number)):
                step = max(stages[giver].tensor, stages[taker].tensor)
                data = len(stages[giver].devices) // step
                for count in dict.fromkeys((data // 2, data // 4, 1)):
                    if 0 < count < data:
                        yield partial(_reseated, plan, index, stages, giver, taker, count * step)
        for number in range(len(stages) - 1):
            yield partial(_swapped, plan, index, stages, number)


def _reseated(plan: Plan, index: int, stages: Sequence[Setup], giver: int, taker: int, count: int) -> Plan:  # noqa: PLR0913, PLR0917 - a move
    size = plan.pipelines[index].micro_batch_size
    gives, takes = stages[giver].devices, stages[taker].devices
    if giver < taker:
        gives, takes = gives[:-count], (*gives[-count:], *takes)
    else:
        gives, takes = gives[count:], (*takes, *gives[:count])
    changed = list(stages)
    for number, devices in ((giver, gives), (taker, takes)):
        data = len(devices) // stages[number].tensor
        if data > size:
            return plan
        layers = stages[number].layers
        if data == 1:
            layers = tuple((Sharding.NONE, again) for _, again in layers)
        changed[number] = replace(stages[number], devices=devices, rows=scaled((1,) * data, size), layers=layers)
    return with_stages(plan, index, changed)


def _swapped(plan: Plan, index: int, stages: Sequence[Setup], number: int) -> Plan:
    one, other = stages[number], stages[number + 1]
    layers = len(one.layers), len(other.layers)
    first, second = _resized(other, layers[1]), _resized(one, layers[0])
    return with_stages(plan, index, [*stages[:number], first, second, *stages[number + 2 :]])


def _resized(setup: Setup, count: int) -> Setup:
    return replace(setup, layers=(setup.layers * (count // len(setup.layers) + 1))[:count])


def splits(plan: Plan) -> Iterator[Move]:
    """Two neighbouring stages made one, or one made two of about half the layers and devices."""
    for index, pipeline in enumerate(plan.pipelines):
        stages = setups(pipeline)
        if stages is None:
            continue
        size = pipeline.micro_batch_size
        for number, setup in enumerate(stages):
            following = stages[number + 1] if number + 1 < len(stages) else None
            if following is not None and following.tensor == setup.tensor:
                devices = (*setup.devices, *following.devices)
                data = len(devices) // setup.tensor
                if data <= size:
                    layers = (*setup.layers, *following.layers)
                    merged = replace(setup, devices=devices, rows=scaled((1,) * data, size), layers=layers)
                    yield partial(with_stages, plan, index, [*stages[:number], merged, *stages[number + 2 :]])
            data, layer_count = len(setup.rows), len(setup.layers)
            if data % 2 == 0 and layer_count > 1:
                half = len(setup.devices) // 2
                rows = scaled((1,) * (data // 2), size)
                alone = data == 2
                parts = [setup.layers[: layer_count // 2], setup.layers[layer_count // 2 :]]
                both = [
                    replace(
                        setup,
                        devices=devices,
                        rows=rows,
                        layers=tuple((Sharding.NONE, again) for _, again in part) if alone else part,
                    )
                    for devices, part in zip((setup.devices[:half], setup.devices[half:]), parts, strict=True)
                ]
                yield partial(with_stages, plan, index, [*stages[:number], *both, *stages[number + 1 :]])


def row_shifts(plan: Plan) -> Iterator[Move]:
    """A row from a replica that has most to one on other devices that has least, where replicas differ."""
    for index, pipeline in enumerate(plan.pipelines):
        stages = setups(pipeline)
        if stages is None:
            continue
        for number, setup in enumerate(stages):
            nodes = [setup.devices[replica * setup.tensor].node for replica in range(len(setup.rows))]
            for giver in _extremes(setup.rows, nodes):
                for taker in _extremes(setup.rows, nodes):
                    if giver != taker and nodes[giver] != nodes[taker] and setup.rows[giver] > 1:
                        rows = list(setup.rows)
                        rows[giver], rows[taker] = rows[giver] - 1, rows[taker] + 1
                        changed = replace(setup, rows=tuple(rows))
                        yield partial(with_stages, plan, index, [*stages[:number], changed, *stages[number + 1 :]])


def _extremes(rows: Sequence[int], nodes: Sequence[str]) -> list[int]:
    """The first replica of every number of rows, on the first and the last node that has it."""
    found: dict[tuple[int, bool], int] = {}
    for replica, count in enumerate(rows):
        found.setdefault((count, True), replica)
        found[count, False] = replica
    _ = nodes
    return list(dict.fromkeys(found.values()))


NEIGHBOURHOODS: tuple[Callable[[Plan], Iterator[Move]], ...] = (
    shifts,
    shardings,
    recomputes,
    batches,
    seats,
    degrees,
    splits,
    row_shifts,
)
"""Kinds of moves, the most promising first."""
