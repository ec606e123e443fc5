"""Plans with fewer oddities than a given one, which a search that looks at time alone has no reason to return."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, groupby

from trainwright.cluster import Cluster
from trainwright.plan import LayerRun, Pipeline, Plan, Stage

Kind = tuple[object, ...]
"""What stages have in common that are alike but for their layers and places."""


def tidied(plan: Plan, cluster: Cluster) -> Iterator[Plan]:
    """The plan with its rows even, with layers even over neighbouring stages that are alike, and with both.

    Only those that differ from the plan and from each other. They need not fit into memory.
    """
    pipelines = plan.pipelines
    rows = tuple(with_even_rows(pipeline) for pipeline in pipelines)
    layers = tuple(with_even_layers(pipeline, cluster) for pipeline in pipelines)
    both = tuple(with_even_layers(pipeline, cluster) for pipeline in rows)
    for found in dict.fromkeys((rows, layers, both)):
        if found != pipelines:
            yield replace(plan, pipelines=found)


def with_even_rows(pipeline: Pipeline) -> Pipeline:
    """Every replica of a stage with as many rows as the others, or one more: the first get it."""
    return replace(
        pipeline,
        stages=tuple(
            replace(stage, layers=tuple(replace(run, rows=even(sum(run.rows), run.data)) for run in stage.layers))
            for stage in pipeline.stages
        ),
    )


def with_even_layers(pipeline: Pipeline, cluster: Cluster) -> Pipeline:
    """Neighbouring stages that are alike (`alike`) with equally many layers, or one more: the last of them get it.

    Their first stages keep most activations and so get the fewer. Stages of several strategies stay as they are.
    """
    stages: list[Stage] = []
    for group in alike(pipeline, cluster):
        if any(len(stage.layers) > 1 for stage in group):
            stages += group
            continue
        counts = even(group[-1].end - group[0].first, len(group))[::-1]
        firsts = accumulate(counts, initial=group[0].first)
        stages += [_moved(stage, first, count) for stage, first, count in zip(group, firsts, counts, strict=False)]
    return replace(pipeline, stages=tuple(stages))


def layer_spread(pipeline: Pipeline, cluster: Cluster) -> int:
    """By how many layers neighbouring stages that are alike differ, beyond the one that division leaves."""
    spread = 0
    for group in alike(pipeline, cluster):
        counts = [stage.end - stage.first for stage in group]
        spread += max(max(counts) - min(counts) - 1, 0)
    return spread


def alike(pipeline: Pipeline, cluster: Cluster) -> list[list[Stage]]:
    """Neighbouring stages with the same accelerators, degrees, sharding and recompute, in groups."""
    return [list(group) for _, group in groupby(pipeline.stages, key=lambda stage: _kind(stage, cluster))]


def _kind(stage: Stage, cluster: Cluster) -> Kind:
    carriers = frozenset(cluster.node(device.node).accelerator for device in stage.devices)
    return carriers, tuple((run.tensor, run.data, run.order, run.sharding, run.recompute) for run in stage.layers)


def _moved(stage: Stage, first: int, count: int) -> Stage:
    run: LayerRun = replace(stage.layers[0], first=first, count=count)
    return replace(stage, layers=(run,))


def even(total: int, parts: int) -> tuple[int, ...]:
    """`total` in so many parts, the first of them larger by one where it does not divide."""
    least, more = divmod(total, parts)
    return tuple(least + (number < more) for number in range(parts))
