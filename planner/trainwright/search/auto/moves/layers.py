"""Layers that change their stage, and stages that become one or two."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from trainwright.plan import Plan
from trainwright.search.auto.moves.place import Move, Place
from trainwright.search.auto.setups import Setup, with_setups

COUNTS = (1, 2, 4)
"""Layers moved at a time."""
MOST_SHIFTS = 48
"""Moves of layers that are looked at: those from the slowest stages to the fastest."""


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


def borders(taken_apart: Sequence[Place]) -> Iterator[Move]:
    """Inside a stage, layers beside others that are set up otherwise do as those do."""
    for place in taken_apart:
        for number in place.slowest_first:
            stage = place.stages[number]
            layers = stage.layers
            for border in (index for index in range(1, len(layers)) if layers[index - 1] != layers[index]):
                for count in COUNTS:
                    if border + count <= len(layers):
                        yield partial(_alike, place, number, range(border, border + count), border - 1)
                    if border - count >= 0:
                        yield partial(_alike, place, number, range(border - count, border), border)


def _alike(place: Place, number: int, chosen: range, model: int) -> Plan:
    stage = place.stages[number]
    return place.put({number: stage.some(chosen, lambda _: stage.layers[model])})


def splits(taken_apart: Sequence[Place]) -> Iterator[Move]:
    """Two neighbouring stages made one, or one made two of about half the layers and devices."""
    for place in taken_apart:
        for number in place.slowest_first:
            stage = place.stages[number]
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
    devices = (*stage.devices, *following.devices)
    upper, lower = stage.on(devices, place.rows), following.on(devices, place.rows)
    merged = replace(upper, layers=(*upper.layers, *lower.layers))
    stages = [*place.stages[:number], merged, *place.stages[number + 2 :]]
    return with_setups(place.plan, place.index, stages)


def _split(place: Place, number: int) -> Plan:
    stage = place.stages[number]
    layers, devices = len(stage.layers) // 2, len(stage.devices) // 2
    upper = replace(stage, layers=stage.layers[:layers]).on(stage.devices[:devices], place.rows)
    lower = replace(stage, layers=stage.layers[layers:]).on(stage.devices[devices:], place.rows)
    stages = [*place.stages[:number], upper, lower, *place.stages[number + 1 :]]
    return with_setups(place.plan, place.index, stages)
