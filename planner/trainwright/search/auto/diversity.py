"""Diversity of candidates: distinct plans, and alternatives to the best at other tensor degrees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from trainwright.plan import Pipeline, Plan
from trainwright.search.auto.budget import SMALL_CLUSTER_DEVICES
from trainwright.search.auto.layer_rebalancing import stage_configs, with_stage_configs
from trainwright.search.candidates import fastest_first
from trainwright.search.problem import Candidate


def with_tensor_degree(plan: Plan, max_tensor_degree: int) -> Iterator[Plan]:
    """Yield a single-pipeline plan at each uniform power-of-two tensor degree.

    Micro-batches keep their rows or, where the batch allows, the rows per replica.
    """
    if len(plan.pipelines) > 1:
        return
    (pipeline,), stages = plan.pipelines, stage_configs(plan.pipelines[0])
    replicas = max(stage.max_data_degree for stage in stages)
    for exponent in range(max_tensor_degree.bit_length()):
        tensor = 2**exponent
        if any(len(stage.devices) % tensor for stage in stages):
            return
        data = max(len(stage.devices) // tensor for stage in stages)
        for rows in dict.fromkeys((pipeline.micro_batch_size, pipeline.micro_batch_size * data // replicas)):
            if rows >= data and plan.global_batch_size % rows == 0:
                configs = [stage.with_tensor_degree(tensor, rows) for stage in stages]
                yield with_stage_configs(plan, 0, configs, plan.global_batch_size // rows)


MAX_SHAPES = 4
"""Maximum shapes searched locally."""
NEAR_BEST_RATIO = 1.1
"""Ratio to the best seconds up to which a plan may still become the fastest."""


def distinct(candidates: list[Candidate]) -> list[Candidate]:
    """Return the first candidate of each choice of degrees, rows, sharding and recompute."""
    first: dict[object, Candidate] = {}
    for candidate in candidates:
        first.setdefault(tuple(map(_strategy_key, candidate.plan.pipelines)), candidate)
    return list(first.values())


def _strategy_key(pipeline: Pipeline) -> tuple[object, ...]:
    runs = [[run.strategy.degrees for run in stage.layers] for stage in pipeline.stages]
    degrees = tuple(tuple(dict.fromkeys(stage)) for stage in runs)
    shardings = frozenset(run.strategy.sharding for stage in pipeline.stages for run in stage.layers)
    recomputes = any(run.strategy.recompute for stage in pipeline.stages for run in stage.layers)
    return pipeline.micro_batch_size, degrees, shardings, recomputes


def best_of_each_shape(candidates: list[Candidate]) -> list[Candidate]:
    """Return the best of each shape: stage count and micro-batch rows per pipeline.

    Near-best shapes alternate between few and many devices.
    """
    shapes: dict[object, Candidate] = {}
    for candidate in fastest_first(candidates):
        pipelines = candidate.plan.pipelines
        shapes.setdefault(tuple((len(pipeline.stages), pipeline.micro_batch_size) for pipeline in pipelines), candidate)
    best = list(shapes.values())
    max_devices = max((len(candidate.plan.devices) for candidate in best), default=0)
    count_before: Counter[bool] = Counter()
    ranked: list[tuple[int, int]] = []
    for number, candidate in enumerate(best):
        is_on_few = len(candidate.plan.devices) <= max(max_devices // 2, SMALL_CLUSTER_DEVICES)
        is_far = candidate.estimate.iteration_seconds > NEAR_BEST_RATIO * best[0].estimate.iteration_seconds
        ranked.append((len(best) if is_far else count_before[is_on_few], number))
        count_before[is_on_few] += 1
    return [best[number] for _, number in sorted(ranked)[:MAX_SHAPES]]
