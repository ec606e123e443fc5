"""Megatron's heuristic as AMP describes it (§4.1): the baseline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from trainwright.plan import Plan
from trainwright.search.choice import check_profiled, degrees_of, lack_of, rank, why_nothing_fits
from trainwright.search.degrees import Degrees, divisors, micro_batch_sizes
from trainwright.search.partition import even_split
from trainwright.search.placement import uniform_plan
from trainwright.search.protocol import Candidate, Control, Problem


def megatron(problem: Problem, control: Control, top: int | None) -> list[Candidate]:
    """For every micro-batch size the plans with the smallest tensor × pipeline degree that fit, best first.

    The tensor degree is at most the devices of the smallest node; layers are split evenly. Several plans of a
    micro-batch size may share the smallest product; all are candidates. Raises NoFeasiblePlan where nothing fits.
    """
    del control, top
    check_profiled(problem)
    plans: list[Plan] = []
    for rows in divisors(problem.global_batch_size):
        plans += _smallest_that_fit(problem, rows)
    if not plans:
        everything = (plan for rows in divisors(problem.global_batch_size) for plan in _plans(problem, rows))
        raise why_nothing_fits(problem, everything)
    return rank(problem, plans)


def _smallest_that_fit(problem: Problem, rows: int) -> list[Plan]:
    found: list[Plan] = []
    smallest = 0
    for plan in _plans(problem, rows):
        run = plan.pipelines[0].stages[0].layers[0]
        product = run.tensor * len(plan.pipelines[0].stages)
        if found and product > smallest:
            break
        if lack_of(problem, plan)[1] is None:
            found.append(plan)
            smallest = product
    return found


def _plans(problem: Problem, rows: int) -> Iterator[Plan]:
    """All plans of a micro-batch size by tensor × pipeline degree, the smallest first."""
    per_node = min(Counter(device.node for device in problem.devices).values())
    choices = degrees_of(problem, max_pipeline=len(problem.model.layers), max_tensor=per_node)
    for degrees in sorted(choices, key=_product):
        ends = even_split(problem.model, degrees.pipeline)
        if ends is not None and rows in micro_batch_sizes(problem.global_batch_size, degrees.data):
            yield uniform_plan(problem.devices, degrees, rows, ends, global_batch_size=problem.global_batch_size)


def _product(degrees: Degrees) -> int:
    return degrees.tensor * degrees.pipeline
