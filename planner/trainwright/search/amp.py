"""AMP's Algorithm 1: every degree and micro-batch size, placed as Megatron does, layers by dynamic programming."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from trainwright.cost import amp as amp_cost
from trainwright.plan import Plan
from trainwright.search.choice import check_profiled, degrees_of, rank, why_nothing_fits
from trainwright.search.degrees import Degrees, micro_batch_sizes
from trainwright.search.partition import partition
from trainwright.search.placement import uniform_plan
from trainwright.search.protocol import Candidate, Control, Problem
from trainwright.search.stages import StageTables

POOL = 48
"""How many of the plans that AMP's own cost model (Eq. 3–5) finds best are replayed exactly; the others are left out."""


def amp(problem: Problem, control: Control, top: int | None) -> list[Candidate]:
    """Candidates by Algorithm 1, best first by the exact replay.

    The layer assignment is the optimum of Eq. 5 among those that fit into memory (AMP itself does not look).
    Raises NoFeasiblePlan, with what comes closest, where none does.
    """
    del control, top
    check_profiled(problem)
    tables = StageTables(problem)
    plans = list(_plans(problem, tables))
    if not plans:
        raise why_nothing_fits(problem, _unlimited_plans(problem, tables))
    if len(plans) > POOL:
        plans = sorted(plans, key=lambda plan: amp_cost.estimate_seconds(plan, problem.setting))[:POOL]
    return rank(problem, plans)


def _choices(problem: Problem) -> Iterator[tuple[Degrees, int]]:
    for degrees in degrees_of(problem, max_pipeline=len(problem.model.layers)):
        for rows in micro_batch_sizes(problem.global_batch_size, degrees.data):
            yield degrees, rows


def _plans(problem: Problem, tables: StageTables) -> Iterator[Plan]:
    """One plan for every choice of degrees and micro-batch size that fits into memory."""
    for degrees, rows in _choices(problem):
        times = np.where(tables.fits(degrees, rows), tables.times(degrees, rows), math.inf)
        ends = partition(times, tables.exchanges(degrees, rows), _micro_batches(problem, degrees, rows))
        if ends is not None:
            yield uniform_plan(problem.devices, degrees, rows, ends, global_batch_size=problem.global_batch_size)


def _unlimited_plans(problem: Problem, tables: StageTables) -> Iterator[Plan]:
    """The same with no regard to memory: what to show when nothing fits."""
    for degrees, rows in _choices(problem):
        times, exchanges = tables.times(degrees, rows), tables.exchanges(degrees, rows)
        ends = partition(times, exchanges, _micro_batches(problem, degrees, rows))
        if ends is not None:
            yield uniform_plan(problem.devices, degrees, rows, ends, global_batch_size=problem.global_batch_size)


def _micro_batches(problem: Problem, degrees: Degrees, rows: int) -> int:
    return problem.global_batch_size // (rows * degrees.data)
