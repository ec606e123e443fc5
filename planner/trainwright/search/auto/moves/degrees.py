"""Other tensor degrees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from trainwright.plan import Plan
from trainwright.search.auto.moves.place import Move, Place


def degrees(taken_apart: Sequence[Place]) -> Iterator[Move]:
    """Twice or half the tensor degree in one stage: of all layers, of the first or last, of the half at either end."""
    for place in taken_apart:
        for number in place.slowest_first:
            stage = place.stages[number]
            count = len(stage.layers)
            parts = [range(count)]
            if count > 1:
                parts += [range(1), range(count - 1, count), range(count // 2), range(count // 2, count)]
            for part in dict.fromkeys(parts):
                for up in (True, False):
                    tensor = stage.layers[part[0]].tensor
                    wanted = tensor * 2 if up else tensor // 2
                    if wanted and len(stage.devices) % wanted == 0 and len(stage.devices) // wanted <= place.rows:
                        yield partial(_regrouped, place, number, part, wanted)


def _regrouped(place: Place, number: int, part: range, tensor: int) -> Plan:
    stage = place.stages[number]
    changed = stage.some(part, lambda layer: layer.regrouped(tensor, len(stage.devices), place.rows))
    return place.put({number: changed})
