"""Of many candidates those that differ in more than details."""

from __future__ import annotations

from collections import Counter

from trainwright.plan import Pipeline
from trainwright.search.auto.efforts import FEW_DEVICES
from trainwright.search.protocol import Candidate
from trainwright.search.ranking import in_order

LEADERS = 4
"""Candidates that are descended from."""
HARDLY_SLOWER = 1.1
"""Than the best: so much slower plans may still become faster ones."""


def different(candidates: list[Candidate]) -> list[Candidate]:
    """The best of every choice of degrees, rows and means to save memory: near twins tell nothing new."""
    first: dict[object, Candidate] = {}
    for candidate in candidates:
        first.setdefault(tuple(map(_choice, candidate.plan.pipelines)), candidate)
    return list(first.values())


def _choice(pipeline: Pipeline) -> tuple[object, ...]:
    runs = [[(run.data, run.tensor) for run in stage.layers] for stage in pipeline.stages]
    degrees = tuple(tuple(dict.fromkeys(stage)) for stage in runs)
    shardings = frozenset(run.sharding for stage in pipeline.stages for run in stage.layers)
    recomputes = any(run.recompute for stage in pipeline.stages for run in stage.layers)
    return pipeline.micro_batch_size, degrees, shardings, recomputes


def leaders(candidates: list[Candidate]) -> list[Candidate]:
    """The best of every shape: the pipelines' numbers of stages and rows.

    Of those that are hardly slower than the best some are on few devices, where there are such, and some on many.
    """
    shapes: dict[object, Candidate] = {}
    for candidate in in_order(candidates):
        pipelines = candidate.plan.pipelines
        shapes.setdefault(tuple((len(one.stages), one.micro_batch_size) for one in pipelines), candidate)
    best = list(shapes.values())
    most = max((len(candidate.plan.devices) for candidate in best), default=0)
    before: Counter[bool] = Counter()
    turns: list[tuple[int, int]] = []
    for number, candidate in enumerate(best):
        is_on_few = len(candidate.plan.devices) <= max(most // 2, FEW_DEVICES)
        is_far = candidate.estimate.iteration_seconds > HARDLY_SLOWER * best[0].estimate.iteration_seconds
        turns.append((len(best) if is_far else before[is_on_few], number))
        before[is_on_few] += 1
    return [best[number] for _, number in sorted(turns)[:LEADERS]]
