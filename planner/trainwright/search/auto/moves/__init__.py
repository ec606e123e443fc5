"""Small changes of a plan: each gives a valid plan that differs in one respect or two; one file a respect."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from trainwright.search.auto.moves.degrees import degrees
from trainwright.search.auto.moves.layers import borders, shifts, splits
from trainwright.search.auto.moves.place import Move, Place, places
from trainwright.search.auto.moves.rows import batches, row_shifts
from trainwright.search.auto.moves.savings import savings, shardings
from trainwright.search.auto.moves.schedules import schedules
from trainwright.search.auto.moves.seats import members, seats
from trainwright.search.auto.moves.stages import stages

Neighbourhood = Callable[[Sequence[Place]], Iterator[Move]]

NEIGHBOURHOODS: tuple[Neighbourhood, ...] = (
    shardings,
    batches,
    shifts,
    savings,
    seats,
    members,
    degrees,
    stages,
    borders,
    splits,
    row_shifts,
    schedules,
)
"""Kinds of moves, the most promising first."""

UNBALANCING: frozenset[Neighbourhood] = frozenset({batches, seats, members, degrees, stages, splits, schedules})
"""Those behind which layers that are dealt out anew may suit the stages better."""

__all__ = ["NEIGHBOURHOODS", "UNBALANCING", "Move", "Neighbourhood", "Place", "places"]
