"""Plans with fewer oddities than a given one, which a search that looks at time alone has no reason to return."""

from __future__ import annotations

from dataclasses import replace

from trainwright.plan import Pipeline, Plan, even_rows


def with_even_rows(plan: Plan) -> Plan:
    """The plan with equally many rows for every replica of a stage, or one more for the first of them.

    The plan itself where that is so already. It need not fit into memory.
    """
    pipelines = tuple(map(_evened, plan.pipelines))
    return plan if pipelines == plan.pipelines else replace(plan, pipelines=pipelines)


def _evened(pipeline: Pipeline) -> Pipeline:
    return replace(
        pipeline,
        stages=tuple(
            replace(stage, layers=tuple(replace(run, rows=even_rows(sum(run.rows), run.data)) for run in stage.layers))
            for stage in pipeline.stages
        ),
    )
