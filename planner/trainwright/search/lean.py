"""Plans that hold as little as their degrees allow: a first answer where memory is short."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trainwright.plan import LayerRun, Plan, Sharding
from trainwright.search.choice import Drafting, lack_of
from trainwright.search.degrees import divisors
from trainwright.search.megatron import EvenSplits
from trainwright.search.protocol import Problem


def lean_plans(problem: Problem) -> Iterator[Plan]:
    """Megatron's even splits that fit with everything sharded and computed again; shortest pipelines first.

    A replica takes a row at a time, which keeps fewest activations; or all of its rows at once, so that gradients are
    sharded, too.
    """
    drafting = Drafting.of(problem)
    splits = EvenSplits(drafting)
    sizes = divisors(problem.global_batch_size)
    for rows in dict.fromkeys((1, *reversed(sizes))):
        for stages, _, ends in splits.of_size(rows):
            if rows in {1, problem.global_batch_size // stages.data}:
                plan = _lean(drafting.plan(stages.placement, rows, ends))
                if lack_of(problem, plan)[0] <= 0:
                    yield plan


def _lean(plan: Plan) -> Plan:
    pipelines = tuple(
        replace(
            pipeline,
            stages=tuple(replace(stage, layers=tuple(map(_lean_run, stage.layers))) for stage in pipeline.stages),
        )
        for pipeline in plan.pipelines
    )
    return replace(plan, pipelines=pipelines)


def _lean_run(run: LayerRun) -> LayerRun:
    return replace(run, recompute=True, sharding=Sharding.ZERO3 if run.data > 1 else Sharding.NONE)
