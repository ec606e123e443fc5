"""Memory saved in another way: sharding and recompute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from trainwright.plan import Plan, Sharding
from trainwright.search.auto.moves.place import Move, Place
from trainwright.search.auto.setups import Strategy, with_setups


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
    """In one stage a layer, half of them or all no longer recomputed, or sharded more or less; and none recomputed anywhere.

    What then lacks memory is relieved (`relief`), so that nothing need be recomputed more than that.
    """
    for place in taken_apart:
        if any(layer.recompute for stage in place.stages for layer in stage.layers):
            yield partial(_never_recomputed, place)
        for number, stage in enumerate(place.stages):
            again = [index for index, layer in enumerate(stage.layers) if layer.recompute]
            for chosen in (again[-1:], again[len(again) // 2 :], again):
                if chosen:
                    yield partial(_kept, place, number, frozenset(chosen))
            for fewer, more in ((Sharding.ZERO2, Sharding.ZERO3), (Sharding.ZERO3, Sharding.ZERO2)):
                found = [index for index, layer in enumerate(stage.layers) if layer.sharding is fewer]
                for chosen in (found[-1:], found[len(found) // 2 :]):
                    if chosen and stage.layers[chosen[0]].data > 1:
                        yield partial(_resharded, place, number, frozenset(chosen), more)


def _kept(place: Place, number: int, chosen: frozenset[int]) -> Plan:
    stage = place.stages[number]
    layers = tuple(
        replace(layer, recompute=False) if index in chosen else layer for index, layer in enumerate(stage.layers)
    )
    return place.put({number: replace(stage, layers=layers)})


def _resharded(place: Place, number: int, chosen: frozenset[int], means: Sharding) -> Plan:
    stage = place.stages[number]
    layers = tuple(
        replace(layer, sharding=means) if index in chosen else layer for index, layer in enumerate(stage.layers)
    )
    return place.put({number: replace(stage, layers=layers)})


def _never_recomputed(place: Place) -> Plan:
    return place.put(
        {number: stage.each(lambda layer: replace(layer, recompute=False)) for number, stage in enumerate(place.stages)}
    )
