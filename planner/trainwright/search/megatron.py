"""Megatron's heuristic as AMP describes it (§4.1): the baseline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cached_property

from trainwright.search.choice import Drafting, check_profiled, degrees_of, why_nothing_fits
from trainwright.search.degrees import Degrees, divisors
from trainwright.search.partition import even_split
from trainwright.search.placement import megatron_placement
from trainwright.search.protocol import Candidate, Control, Problem
from trainwright.search.ranking import Draft, best_of
from trainwright.search.stages import Stages

Split = tuple[Stages, int, tuple[int, ...]]
"""A placement, rows, and the ends of the stages."""


class EvenSplits:
    """Megatron's splits of one problem; a placement is made once for all micro-batch sizes."""

    def __init__(self, drafting: Drafting) -> None:
        self.drafting = drafting
        self._stages: dict[Degrees, Stages] = {}

    def of_size(self, rows: int) -> Iterator[Split]:
        """All even splits for a micro-batch size by tensor × pipeline degree, the smallest first."""
        batch = self.drafting.problem.global_batch_size
        for degrees, ends in self._degrees:
            if batch % (degrees.data * rows) == 0:
                yield self._placed(degrees), rows, ends

    @cached_property
    def _degrees(self) -> list[tuple[Degrees, tuple[int, ...]]]:
        """With the ends of the stages, where there are layers enough."""
        problem = self.drafting.problem
        per_node = min(Counter(device.node for device in problem.devices).values())
        every = sorted(degrees_of(problem, max_tensor=per_node), key=_product)
        split = ((degrees, even_split(problem.model, degrees.pipeline)) for degrees in every)
        return [(degrees, ends) for degrees, ends in split if ends is not None]

    def _placed(self, degrees: Degrees) -> Stages:
        if degrees not in self._stages:
            self._stages[degrees] = self.drafting.tables.stages(megatron_placement(degrees))
        return self._stages[degrees]


def megatron(problem: Problem, control: Control, top: int | None) -> list[Candidate]:
    """For every micro-batch size the plans with the smallest tensor × pipeline degree that fit, best first.

    The tensor degree is at most the devices of the smallest node; layers are split evenly. Several plans of a
    micro-batch size may share the smallest product; all are candidates. Raises NoFeasiblePlan where nothing fits.
    """
    check_profiled(problem)
    drafting = Drafting.of(problem)
    drafts = [*megatron_drafts(drafting, control)]
    if not drafts:
        splits = EvenSplits(drafting)
        everything = (split for rows in divisors(problem.global_batch_size) for split in splits.of_size(rows))
        plans = (drafting.plan(stages.placement, rows, ends) for stages, rows, ends in everything)
        raise why_nothing_fits(problem, plans)
    return best_of(problem, drafts, control, top)


def megatron_drafts(drafting: Drafting, control: Control) -> Iterator[Draft]:
    """The plans to be; none where nothing fits."""
    splits, has_some = EvenSplits(drafting), False
    for rows in divisors(drafting.problem.global_batch_size):
        for split in _smallest_that_fit(splits, rows):
            yield drafting.draft(*split)
            has_some = True
        if has_some and control.expired():
            break


def _smallest_that_fit(splits: EvenSplits, rows: int) -> list[Split]:
    found: list[Split] = []
    smallest = 0
    for split in splits.of_size(rows):
        product = split[0].tensor * split[0].pipeline
        if found and product > smallest:
            break
        if splits.drafting.fits(*split):
            found.append(split)
            smallest = product
    return found


def _product(degrees: Degrees) -> int:
    return degrees.tensor * degrees.pipeline
