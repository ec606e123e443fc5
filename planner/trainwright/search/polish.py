"""Layers moved between the stages of a plan, as long as the exact replay says that it helps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trainwright.search.choice import Drafting
from trainwright.search.degrees import Degrees
from trainwright.search.placement import megatron_placement
from trainwright.search.protocol import Candidate
from trainwright.search.ranking import fitting_candidate
from trainwright.search.stages import Stages

Ends = tuple[int, ...]
LARGEST_MOVE = 8
"""Layers moved at a time: 1, 2, 4 and so many."""


@dataclass
class Polish:
    """A descent from one candidate, which its drafting placed as Megatron does.

    A move takes layers from one stage and gives as many to another; the stages between pass them on. Moves that fit
    into memory are costed in the order of their lower bounds, and the first that is faster is gone on from.

    Attributes:
        tries: how many replays there are left.
        patience: how many moves in a row may be in vain.
    """

    drafting: Drafting
    tries: int
    patience: int

    def descend(self, candidate: Candidate) -> Candidate:
        """The candidate or one that is faster, of the same degrees, rows and order of the devices."""
        pipeline = candidate.plan.pipelines[0]
        run = pipeline.stages[0].layers[0]
        degrees = Degrees(len(pipeline.stages), run.data, run.tensor)
        stages = self.drafting.tables.stages(megatron_placement(degrees))
        seen = {_ends(candidate)}
        while True:
            faster = self._faster(candidate, stages, run.rows[0], seen)
            if faster is None:
                return candidate
            candidate = faster

    def _faster(self, here: Candidate, stages: Stages, rows: int, seen: set[Ends]) -> Candidate | None:
        """The first that is faster after a move; None where none is found."""
        seconds = here.estimate.iteration_seconds
        unseen = [ends for ends in moves(_ends(here)) if ends not in seen]
        if not unseen:
            return None
        near = np.array(unseen, dtype=np.intp)
        near = near[self.drafting.fitting(stages, rows, near)]
        bounds = self.drafting.bounds.seconds_of_all(stages, rows, near)
        for number in np.argsort(bounds, kind="stable")[: self.patience].tolist():
            if bounds[number] >= seconds or self.tries == 0:
                break
            self.tries -= 1
            ends = tuple(near[number].tolist())
            seen.add(ends)
            found = fitting_candidate(self.drafting.problem, self.drafting.plan(stages.placement, rows, ends))
            if found is not None and found.estimate.iteration_seconds < seconds:
                return found
        return None


def _ends(candidate: Candidate) -> Ends:
    return tuple(stage.end for stage in candidate.plan.pipelines[0].stages)


def moves(ends: Ends) -> list[Ends]:
    """All assignments that one move makes of this one; no stage is left empty."""
    sizes = np.diff(ends, prepend=0)
    stages = len(ends)
    found: list[Ends] = []
    count = 1
    while count <= LARGEST_MOVE:
        for giver in range(stages):
            if sizes[giver] <= count:
                continue
            for taker in range(stages):
                if taker != giver:
                    step = -count if giver < taker else count
                    between = range(min(giver, taker), max(giver, taker))
                    found.append(tuple(end + step if i in between else end for i, end in enumerate(ends)))
        count *= 2
    return found
