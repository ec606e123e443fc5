"""Fields of strategies that no search chooses, since the runtime decides them."""

from __future__ import annotations

from dataclasses import replace

from trainwright.cost.context import CostContext
from trainwright.plan import LayerRun, Plan, Stage


def run_with_runtime_choices(run: LayerRun, context: CostContext) -> LayerRun:
    """Return the run, sequence parallel exactly if the runtime chooses that for its tensor degree."""
    if _is_as_chosen(run, context):
        return run
    return run.with_strategy(sequence_parallel=not run.strategy.sequence_parallel)


def stage_with_runtime_choices(stage: Stage, context: CostContext) -> Stage:
    """Return the stage with all of its runs as the runtime chooses."""
    if all(_is_as_chosen(run, context) for run in stage.layers):
        return stage
    return replace(stage, layers=tuple(run_with_runtime_choices(run, context) for run in stage.layers))


def with_runtime_choices(plan: Plan, context: CostContext) -> Plan:
    """Return the plan with all of its runs as the runtime chooses."""
    if all(_is_as_chosen(run, context) for stage in plan.stages for run in stage.layers):
        return plan
    return plan.map_stages(lambda stage: stage_with_runtime_choices(stage, context))


def _is_as_chosen(run: LayerRun, context: CostContext) -> bool:
    return run.strategy.sequence_parallel == context.divided_activations.chosen_at(run.strategy.tensor)
