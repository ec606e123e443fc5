"""Galvatron's estimator (§V, Eq. 8), for faithful reproduction and to preselect candidates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from trainwright.cost.galvatron_layers import GroupCosts, LayerSeconds
from trainwright.cost.galvatron_links import exchange
from trainwright.cost.setting import Setting
from trainwright.plan import Pipeline, Plan, Stage


def estimate_seconds(plan: Plan, setting: Setting) -> float:
    """C(M, B, m) of Eq. 8 and, once for every boundary between stages, its messages, of which the paper does not speak.

    The slowest of several pipelines counts; the optimizer's step is not in it.
    """
    return max(_pipeline_seconds(pipeline, setting) for pipeline in plan.pipelines)


def pipeline_seconds(stages: Sequence[LayerSeconds], micro_batches: int) -> float:
    """Eq. 8: (m - 1) · max_i (C(M_i, B_m) - C(M_i, 0)) + Σ_i C(M_i, B_m).

    C(M_i, B_m) - C(M_i, 0), a micro-batch without the synchronisation of gradients, is `steady_seconds`.
    """
    longest = max(stage.steady_seconds for stage in stages)
    return (micro_batches - 1) * longest + sum(stage.last_seconds for stage in stages)


def stage_seconds(stage: Stage, setting: Setting) -> LayerSeconds:
    """C(M_i, B_m): c(l, s) of every layer, and R wherever the strategy changes."""
    group = GroupCosts(stage.devices, setting)
    steady = last = 0.0
    for run in stage.layers:
        for name, count in Counter(setting.model.layers[run.first : run.end]).items():
            seconds = group.seconds(setting.model.kind(name), run)
            steady += count * seconds.steady_seconds
            last += count * seconds.last_seconds
    for before, after in zip(stage.layers, stage.layers[1:], strict=False):
        row_bytes = setting.model.output_bytes_per_row(after.first - 1)
        moved = group.transformation_seconds(row_bytes, before, after)
        steady += moved
        last += moved
    return LayerSeconds(steady, last)


def _pipeline_seconds(pipeline: Pipeline, setting: Setting) -> float:
    seconds = pipeline_seconds([stage_seconds(stage, setting) for stage in pipeline.stages], pipeline.micro_batches)
    for upper, lower in zip(pipeline.stages, pipeline.stages[1:], strict=False):
        latency, seconds_per_byte = exchange(upper.devices, lower.devices, setting)
        size = pipeline.micro_batch_size * setting.model.output_bytes_per_row(upper.end - 1)
        seconds += latency + size * seconds_per_byte
    return seconds
