"""The other schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from trainwright.plan import Schedule
from trainwright.search.auto.moves.place import Move, Place


def schedules(taken_apart: Sequence[Place]) -> Iterator[Move]:
    """The other schedule, where pipelines repeat."""
    plan = taken_apart[0].plan
    if any(len(place.stages) > 1 < plan.pipelines[place.index].micro_batches for place in taken_apart):
        for schedule in Schedule:
            if schedule is not plan.schedule:
                yield partial(replace, plan, schedule=schedule)
