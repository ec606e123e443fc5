"""Moves from one shape to others that a trainer supports, as steps of a search."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trainwright.exports.capabilities import Capabilities
from trainwright.exports.uniform_shape import UniformShape
from trainwright.plan import divisors


def neighbours(shape: UniformShape, capabilities: Capabilities) -> Iterator[UniformShape]:
    """Yield shapes with the same degrees that differ in one choice."""
    stages, most = len(shape.ends), max(shape.blocks)
    for sharding in sorted(capabilities.shardings_of(stages, *shape.strategy.degrees) - {shape.strategy.sharding}):
        yield shape.with_strategy(sharding=sharding)
    for schedule in sorted(capabilities.schedules_of(stages) - {shape.schedule}):
        yield replace(shape, schedule=schedule)
    rows = divisors(shape.rows * shape.micro_batches)
    place = rows.index(shape.rows)
    for number in {max(place - 1, 0), min(place + 1, len(rows) - 1)} - {place}:
        if capabilities.can_fill(stages, rows[-1] // rows[number]):
            yield replace(shape, rows=rows[number], micro_batches=rows[-1] // rows[number])
    count = shape.recomputed_blocks
    counts = {0, most, count - 1, count + 1, count // 2} if capabilities.partial_recompute else {0, most}
    for number in sorted(counts - {count}):
        if 0 <= number <= most:
            yield replace(shape, recomputed_blocks=number)
    if capabilities.uneven_stages:
        yield from _other_layers(shape, capabilities)


def _other_layers(shape: UniformShape, capabilities: Capabilities) -> Iterator[UniformShape]:
    """Yield shapes in which one layer moves from a stage to another one; those between shift theirs."""
    sizes = [end - first for first, end in shape.spans]
    for source in range(len(sizes)):
        if sizes[source] == 1:
            continue
        for target in range(len(sizes)):
            if target != source:
                moved = [*sizes]
                moved[source] -= 1
                moved[target] += 1
                ends = tuple(sum(moved[: number + 1]) for number in range(len(moved)))
                other = replace(shape, ends=ends)
                if shape.recomputed_blocks and not capabilities.partial_recompute:
                    other = replace(other, recomputed_blocks=max(other.blocks))
                yield other
