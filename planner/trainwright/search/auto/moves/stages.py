"""Stages that are put in, of devices that nobody uses, or taken out with all their devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from trainwright.plan import Plan, Sharding
from trainwright.search.auto.moves.place import Devices, Move, Place
from trainwright.search.auto.setups import Setup, Strategy, scaled, with_setups


def stages(taken_apart: Sequence[Place]) -> Iterator[Move]:
    """One stage less, its layers with those before or behind; or one more, of one device or all free ones of a node."""
    for place in taken_apart:
        count = len(place.stages)
        for number in range(count) if count > 1 else ():
            yield partial(_without, place, number)
        for devices in _groups(place):
            for number in range(count + 1):
                if len(place.stages[min(number, count - 1)].layers) > 1:
                    yield partial(_with, place, number, devices)


def _groups(place: Place) -> list[Devices]:
    """Of a few nodes one device that nobody uses, and all of them."""
    every = ((some[:1], some) for some in place.spare)
    return list(dict.fromkeys(group for pair in every for group in pair if len(group) <= place.rows))


def _without(place: Place, number: int) -> Plan:
    left = [*place.stages[:number], *place.stages[number + 1 :]]
    layers = len(place.stages[number].layers)
    if number:
        taker = left[number - 1]
        left[number - 1] = replace(taker, layers=(*taker.layers, *(taker.layers[-1],) * layers))
    else:
        taker = left[0]
        left[0] = replace(taker, layers=(*(taker.layers[0],) * layers, *taker.layers))
    return with_setups(place.plan, place.index, left)


def _with(place: Place, number: int, devices: Devices) -> Plan:
    """Half the layers of the stage behind it, or of the last."""
    giver = min(number, len(place.stages) - 1)
    stage = place.stages[giver]
    half = len(stage.layers) // 2
    rows = scaled((1,) * len(devices), place.rows)
    sharding = stage.layers[0].sharding if stage.layers[0].data > 1 else Sharding.ZERO1
    strategy = Strategy(rows, sharding=sharding, recompute=stage.layers[0].recompute)
    if number == giver:
        changed = [Setup(devices, (strategy,) * half), replace(stage, layers=stage.layers[half:])]
    else:
        changed = [replace(stage, layers=stage.layers[:-half]), Setup(devices, (strategy,) * half)]
    return with_setups(place.plan, place.index, [*place.stages[:giver], *changed, *place.stages[giver + 1 :]])
