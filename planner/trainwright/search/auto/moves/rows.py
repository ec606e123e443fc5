"""Other sizes of micro-batches, and rows dealt out otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from trainwright.plan import Plan
from trainwright.search.auto.moves.place import Move, Place
from trainwright.search.auto.setups import with_setups


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


def row_shifts(taken_apart: Sequence[Place]) -> Iterator[Move]:
    """A row from one replica to another: between the first and the last ones of every number of rows."""
    for place in taken_apart:
        for number in place.slowest_first:
            stage = place.stages[number]
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
