"""Memory saved in another way: sharding and recompute."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from functools import partial

from trainwright.plan import Plan, Sharding
from trainwright.search.auto.moves.place import Move, Place
from trainwright.search.auto.setups import sharded


def shardings(taken_apart: Sequence[Place]) -> Iterator[Move]:
    """Another sharding: of all stages, then of one that has several replicas."""
    for sharding in Sharding:
        yield partial(sharded, taken_apart[0].plan, sharding)
    for place in taken_apart:
        for number in place.slowest_first:
            stage = place.stages[number]
            if stage.most_data > 1:
                for sharding in Sharding:
                    yield partial(_resharded, place, number, range(len(stage.layers)), sharding)


def savings(taken_apart: Sequence[Place]) -> Iterator[Move]:
    """In one stage a layer, half of them or all no longer recomputed, or sharded more or less; and none in its pipeline recomputed.

    What then lacks memory is relieved (`relief`), so that nothing need be recomputed more than that.
    """
    for place in taken_apart:
        if any(layer.recompute for stage in place.stages for layer in stage.layers):
            yield partial(_never_recomputed, place)
        for number in place.slowest_first:
            stage = place.stages[number]
            again = [index for index, layer in enumerate(stage.layers) if layer.recompute]
            for chosen in (again[-1:], again[len(again) // 2 :], again):
                if chosen:
                    yield partial(_kept, place, number, chosen)
            for here, instead in ((Sharding.ZERO2, Sharding.ZERO3), (Sharding.ZERO3, Sharding.ZERO2)):
                found = [index for index, layer in enumerate(stage.layers) if layer.sharding is here]
                for chosen in (found[-1:], found[len(found) // 2 :]):
                    if chosen and stage.layers[chosen[0]].data > 1:
                        yield partial(_resharded, place, number, chosen, instead)


def _kept(place: Place, number: int, chosen: Container[int]) -> Plan:
    return place.put({number: place.stages[number].some(chosen, lambda layer: replace(layer, recompute=False))})


def _resharded(place: Place, number: int, chosen: Container[int], sharding: Sharding) -> Plan:
    return place.put({number: place.stages[number].some(chosen, lambda layer: replace(layer, sharding=sharding))})


def _never_recomputed(place: Place) -> Plan:
    return place.put(
        {number: stage.each(lambda layer: replace(layer, recompute=False)) for number, stage in enumerate(place.stages)}
    )
