"""Small changes of a plan: each gives a valid plan that differs in one respect."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from trainwright.cost.pace import Paces
from trainwright.cost.setting import Setting
from trainwright.plan import Plan, Sharding
from trainwright.search.auto.setups import Setup, Strategy, setups, with_setups

COUNTS = (1, 2, 4)
"""Layers moved at a time."""
MOST_SHIFTS = 48
"""Moves of layers that are looked at: those from the slowest stages to the fastest."""
Move = Callable[[], Plan]


@dataclass(frozen=True)
class Place:
    """A pipeline of a plan, taken apart.

    Attributes:
        seconds: by stage: what its slowest worker takes for a micro-batch.
    """

    plan: Plan
    index: int
    stages: tuple[Setup, ...]
    seconds: tuple[float, ...]

    @property
    def rows(self) -> int:
        return self.plan.pipelines[self.index].micro_batch_size

    def put(self, changed: dict[int, Setup]) -> Plan:
        """The plan with these stages in place of those with their numbers."""
        stages = [changed.get(number, stage) for number, stage in enumerate(self.stages)]
        return with_setups(self.plan, self.index, stages)


def places(plan: Plan, setting: Setting) -> list[Place]:
    """The plan's pipelines taken apart."""
    paces = Paces(plan, setting)
    return [
        Place(
            plan,
            index,
            setups(pipeline),
            tuple(
                max(worker.forward.seconds + worker.backward.seconds for worker in paces.stages[index, number].workers)
                for number in range(len(pipeline.stages))
            ),
        )
        for index, pipeline in enumerate(plan.pipelines)
    ]


def shifts(taken_apart: Sequence[Place]) -> Iterator[Move]:
    """Layers handed from one stage to another, those between pass as many on; from the slowest to the fastest first."""
    found: list[tuple[float, int, Move]] = []
    for place in taken_apart:
        count = len(place.stages)
        for giver in range(count):
            for taker in range(count):
                for layers in COUNTS if abs(giver - taker) == 1 else COUNTS[:1]:
                    if giver != taker and len(place.stages[giver].layers) > layers:
                        gain = place.seconds[giver] - place.seconds[taker]
                        each = place.seconds[giver] / len(place.stages[giver].layers)
                        worth = gain - layers * each
                        found.append((-worth, len(found), partial(_shifted, place, giver, taker, layers)))
    found.sort(key=lambda one: one[:2])
    yield from (move for _, _, move in found[:MOST_SHIFTS])


def _shifted(place: Place, giver: int, taker: int, count: int) -> Plan:
    step = 1 if giver < taker else -1
    changed: dict[int, Setup] = {}
    for number in range(giver, taker + step, step):
        stage = place.stages[number]
        layers = stage.layers
        if number != giver:
            layers = (*(layers[0],) * count, *layers) if step == 1 else (*layers, *(layers[-1],) * count)
        if number != taker:
            layers = layers[:-count] if step == 1 else layers[count:]
        changed[number] = replace(stage, layers=layers)
    return place.put(changed)


def shardings(taken_apart: Sequence[Place]) -> Iterator[Move]:
    """Another sharding: of all stages, then of one."""
    for means in Sharding:
        yield partial(_sharded, taken_apart, means, None)
    stages = sum(len(place.stages) for place in taken_apart)
    if stages > 1:
        for number in range(stages):
            for means in Sharding:
                yield partial(_sharded, taken_apart, means, number)


def _sharded(taken_apart: Sequence[Place], means: Sharding, chosen: int | None) -> Plan:
    plan, number = taken_apart[0].plan, 0
    for place in taken_apart:
        stages = []
        for stage in place.stages:
            stages.append(stage.each(partial(_with_sharding, means)) if chosen in {None, number} else stage)
            number += 1
        plan = with_setups(plan, place.index, stages)
    return plan


def _with_sharding(means: Sharding, strategy: Strategy) -> Strategy:
    return replace(strategy, sharding=means)


def savings(taken_apart: Sequence[Place]) -> Iterator[Move]:
    """In one stage a layer, or half of them, recomputed or sharded more or less; and none, or all, recomputed everywhere."""
    for place in taken_apart:
        if any(layer.recompute for stage in place.stages for layer in stage.layers):
            yield partial(_recomputed_everywhere, place, value=False)
        yield partial(_recomputed_everywhere, place, value=True)
        for number, stage in enumerate(place.stages):
            again = [index for index, layer in enumerate(stage.layers) if layer.recompute]
            kept = [index for index, layer in enumerate(stage.layers) if not layer.recompute]
            for chosen, value in (
                (again[-1:], False),
                (again[len(again) // 2 :], False),
                (again, False),
                (kept[:1], True),
                (kept[: -(-len(kept) // 2)], True),
            ):
                if chosen:
                    yield partial(_recomputed, place, number, frozenset(chosen), value)
            for fewer, more in ((Sharding.ZERO2, Sharding.ZERO3), (Sharding.ZERO3, Sharding.ZERO2)):
                found = [index for index, layer in enumerate(stage.layers) if layer.sharding is fewer]
                for chosen in (found[-1:], found[len(found) // 2 :]):
                    if chosen and stage.layers[chosen[0]].data > 1:
                        yield partial(_resharded, place, number, frozenset(chosen), more)


def _recomputed(place: Place, number: int, chosen: frozenset[int], value: bool) -> Plan:
    stage = place.stages[number]
    layers = tuple(
        replace(layer, recompute=value) if index in chosen else layer for index, layer in enumerate(stage.layers)
    )
    return place.put({number: replace(stage, layers=layers)})


def _resharded(place: Place, number: int, chosen: frozenset[int], means: Sharding) -> Plan:
    stage = place.stages[number]
    layers = tuple(
        replace(layer, sharding=means) if index in chosen else layer for index, layer in enumerate(stage.layers)
    )
    return place.put({number: replace(stage, layers=layers)})


def _recomputed_everywhere(place: Place, *, value: bool) -> Plan:
    return place.put(
        {number: stage.each(lambda layer: replace(layer, recompute=value)) for number, stage in enumerate(place.stages)}
    )


def batches(taken_apart: Sequence[Place]) -> Iterator[Move]:
    """Micro-batches of twice, three times, half or a third of the rows, in every pipeline by itself."""
    for place in taken_apart:
        pipeline = place.plan.pipelines[place.index]
        for factor in (2, 3):
            if pipeline.micro_batches % factor == 0:
                size = pipeline.micro_batch_size * factor
                yield partial(_resized, place, size, pipeline.micro_batches // factor)
            if pipeline.micro_batch_size % factor == 0:
                size = pipeline.micro_batch_size // factor
                if all(stage.most_data <= size for stage in place.stages):
                    yield partial(_resized, place, size, pipeline.micro_batches * factor)


def _resized(place: Place, size: int, micro_batches: int) -> Plan:
    stages = [stage.with_rows(size) for stage in place.stages]
    return with_setups(place.plan, place.index, stages, micro_batches)


def degrees(taken_apart: Sequence[Place]) -> Iterator[Move]:
    """Twice or half the tensor degree in one stage: of all layers, of the first or last, of the half at either end."""
    for place in taken_apart:
        for number, stage in enumerate(place.stages):
            count = len(stage.layers)
            parts = [range(count)]
            if count > 1:
                parts += [range(1), range(count - 1, count), range(count // 2), range(count // 2, count)]
            for part in parts:
                for up in (True, False):
                    tensor = stage.layers[part[0]].tensor
                    wanted = tensor * 2 if up else tensor // 2
                    if wanted and len(stage.devices) % wanted == 0 and len(stage.devices) // wanted <= place.rows:
                        yield partial(_regrouped, place, number, part, wanted)


def _regrouped(place: Place, number: int, part: range, tensor: int) -> Plan:
    stage = place.stages[number]
    layers = tuple(
        layer.regrouped(tensor, len(stage.devices), place.rows) if index in part else layer
        for index, layer in enumerate(stage.layers)
    )
    return place.put({number: replace(stage, layers=layers)})


def seats(taken_apart: Sequence[Place]) -> Iterator[Move]:
    """Devices handed to a neighbouring stage, a half, a quarter or a tensor group; or two stages that change places."""
    for place in taken_apart:
        stages = place.stages
        for number in range(len(stages) - 1):
            for giver, taker in ((number, number + 1), (number + 1, number)):
                step = max(stages[giver].most_tensor, stages[taker].most_tensor)
                data = len(stages[giver].devices) // step
                for count in dict.fromkeys((data // 2, data // 4, 1)):
                    if 0 < count < data and len(stages[taker].devices) + count * step <= place.rows * step:
                        yield partial(_reseated, place, giver, taker, count * step)
            yield partial(_swapped, place, number)


def _reseated(place: Place, giver: int, taker: int, count: int) -> Plan:
    gives, takes = place.stages[giver].devices, place.stages[taker].devices
    if giver < taker:
        gives, takes = gives[:-count], (*gives[-count:], *takes)
    else:
        gives, takes = gives[count:], (*takes, *gives[:count])
    changed = {
        number: place.stages[number].on(devices, place.rows) for number, devices in ((giver, gives), (taker, takes))
    }
    return place.put(changed)


def _swapped(place: Place, number: int) -> Plan:
    one, other = place.stages[number], place.stages[number + 1]
    return place.put({number: other.of_size(len(other.layers)), number + 1: one.of_size(len(one.layers))})


def splits(taken_apart: Sequence[Place]) -> Iterator[Move]:
    """Two neighbouring stages made one, or one made two of about half the layers and devices."""
    for place in taken_apart:
        for number, stage in enumerate(place.stages):
            if number + 1 < len(place.stages):
                following = place.stages[number + 1]
                step = max(stage.most_tensor, following.most_tensor)
                devices = (*stage.devices, *following.devices)
                if (
                    len(devices) % step == 0
                    and len(devices) // min(stage.least_tensor, following.least_tensor) <= place.rows
                ):
                    yield partial(_merged, place, number)
            if len(stage.layers) > 1 and len(stage.devices) // 2 % stage.most_tensor == 0 and len(stage.devices) > 1:
                yield partial(_split, place, number)


def _merged(place: Place, number: int) -> Plan:
    stage, following = place.stages[number], place.stages[number + 1]
    both = replace(stage, layers=(*stage.layers, *following.layers))
    merged = both.on((*stage.devices, *following.devices), place.rows)
    stages = [*place.stages[:number], merged, *place.stages[number + 2 :]]
    return with_setups(place.plan, place.index, stages)


def _split(place: Place, number: int) -> Plan:
    stage = place.stages[number]
    layers, devices = len(stage.layers) // 2, len(stage.devices) // 2
    upper = replace(stage, layers=stage.layers[:layers]).on(stage.devices[:devices], place.rows)
    lower = replace(stage, layers=stage.layers[layers:]).on(stage.devices[devices:], place.rows)
    stages = [*place.stages[:number], upper, lower, *place.stages[number + 1 :]]
    return with_setups(place.plan, place.index, stages)


def row_shifts(taken_apart: Sequence[Place]) -> Iterator[Move]:
    """A row from one replica to another: between the first and the last ones of every number of rows."""
    for place in taken_apart:
        for number, stage in enumerate(place.stages):
            rows = stage.layers[0].rows
            if len({layer.rows for layer in stage.layers}) > 1 or len({device.node for device in stage.devices}) == 1:
                continue
            ends = _extremes(rows)
            for giver in ends:
                for taker in ends:
                    if giver != taker and rows[giver] > 1:
                        yield partial(_rows_shifted, place, number, giver, taker)


def _rows_shifted(place: Place, number: int, giver: int, taker: int) -> Plan:
    stage = place.stages[number]
    rows = list(stage.layers[0].rows)
    rows[giver], rows[taker] = rows[giver] - 1, rows[taker] + 1
    return place.put({number: stage.each(lambda layer: replace(layer, rows=tuple(rows)))})


def _extremes(rows: Sequence[int]) -> list[int]:
    """The first and the last replica of every number of rows."""
    found: dict[tuple[int, bool], int] = {}
    for replica, count in enumerate(rows):
        found.setdefault((count, True), replica)
        found[count, False] = replica
    return list(dict.fromkeys(found.values()))


NEIGHBOURHOODS: tuple[Callable[[Sequence[Place]], Iterator[Move]], ...] = (
    shardings,
    batches,
    shifts,
    savings,
    seats,
    degrees,
    splits,
    row_shifts,
)
"""Kinds of moves, the most promising first."""
