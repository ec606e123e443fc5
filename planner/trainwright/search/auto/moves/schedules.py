"""The other schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from trainwright.plan import Plan, Schedule
from trainwright.search.auto.moves.place import Move, Place


def schedules(taken_apart: Sequence[Place]) -> Iterator[Move]:
    """The other schedule, where that differs."""
    plan = taken_apart[0].plan
    for schedule in other_schedules(plan):
        yield partial(replace, plan, schedule=schedule)


def other_schedules(plan: Plan) -> Iterator[Schedule]:
    """In GPipe forwards never wait for a backward's message, but memory holds every micro-batch; none without pipelines."""
    if any(len(pipeline.stages) > 1 < pipeline.micro_batches for pipeline in plan.pipelines):
        yield from (schedule for schedule in Schedule if schedule is not plan.schedule)
