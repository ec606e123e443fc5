"""Fields of strategies that no search chooses, since the runtime decides them."""

from __future__ import annotations

from dataclasses import replace

from trainwright.cost.context import CostContext
from trainwright.plan import LayerRun, Plan, Stage


def run_with_runtime_choices(run: LayerRun, context: CostContext) -> LayerRun:
    """Return the run with the runtime's sequence parallelism."""
    strategy = context.divided_activations.as_chosen(run.strategy)
    return run if strategy is run.strategy else replace(run, strategy=strategy)


def stage_with_runtime_choices(stage: Stage, context: CostContext) -> Stage:
    """Return the stage with the runtime's sequence parallelism in every run; shardings of operators leave no choice."""
    if stage.operators is not None or all(_is_as_chosen(run, context) for run in stage.layers):
        return stage
    return replace(stage, layers=tuple(run_with_runtime_choices(run, context) for run in stage.layers))


def with_runtime_choices(plan: Plan, context: CostContext) -> Plan:
    """Return the plan with the runtime's sequence parallelism in every run."""
    if all(stage_with_runtime_choices(stage, context) is stage for stage in plan.stages):
        return plan
    return plan.map_stages(lambda stage: stage_with_runtime_choices(stage, context))


def _is_as_chosen(run: LayerRun, context: CostContext) -> bool:
    return context.divided_activations.as_chosen(run.strategy) is run.strategy
