"""Adaptation of the running plan to changed devices, with few changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, groupby, islice

from trainwright.cluster import Device
from trainwright.cost.estimate import check_plan
from trainwright.plan import LayerRun, Pipeline, Plan, Stage, split_rows
from trainwright.search.problem import Problem


def shrink_to_devices(stage: Stage, available: frozenset[Device]) -> Stage | None:
    """Return the stage without its missing devices; None if no tensor group is left.

    Intact tensor groups stay, with rows in their old proportion. The remaining devices form new groups; those that do not
    fill one are left out.
    """
    if available.issuperset(stage.devices):
        return stage
    first = stage.layers[0]
    if _has_mixed_degrees(stage):
        return _shrink_mixed_degrees(stage, available)
    groups = first.strategy.tensor_groups(stage.devices)
    intact = [replica for replica, group in enumerate(groups) if available.issuperset(group)]
    grouped = {device for replica in intact for device in groups[replica]}
    ungrouped = [device for device in stage.devices if device in available and device not in grouped]
    added = _tensor_groups(ungrouped, first.strategy.tensor)[: sum(first.rows) - len(intact)]
    return _with_groups(stage, intact, added) if intact or added else None


def add_replicas(stage: Stage, devices: Sequence[Device]) -> Stage | None:
    """Return the stage with the additional replicas that the devices make.

    None if they fill no tensor group, if rows are too few, or if the stage mixes tensor degrees or rank orders.
    """
    first = stage.layers[0]
    added = _tensor_groups(devices, first.strategy.tensor)
    if not added or _has_mixed_degrees(stage) or first.strategy.data + len(added) > sum(first.rows):
        return None
    return _with_groups(stage, range(first.strategy.data), added)


def _has_mixed_degrees(stage: Stage) -> bool:
    return len({(run.strategy.tensor, run.strategy.order) for run in stage.layers}) > 1


def _tensor_groups(devices: Sequence[Device], tensor: int) -> list[tuple[Device, ...]]:
    """Form tensor groups of consecutive devices; the last ones are left out if they do not fill one."""
    return [tuple(devices[end - tensor : end]) for end in range(tensor, len(devices) + 1, tensor)]


def _with_groups(stage: Stage, kept: Sequence[int], added: Sequence[tuple[Device, ...]]) -> Stage:
    """Return the stage with the replicas kept, and the added tensor groups, each with the mean number of rows."""
    first = stage.layers[0]
    groups = first.strategy.tensor_groups(stage.devices)
    runs = (
        _with_replicas(
            run, [*(run.rows[replica] for replica in kept), *[sum(run.rows) / run.strategy.data] * len(added)]
        )
        for run in stage.layers
    )
    return Stage(first.strategy.order.members([*(groups[replica] for replica in kept), *added]), tuple(runs))


def _shrink_mixed_degrees(stage: Stage, available: frozenset[Device]) -> Stage | None:
    """Return the stage on the most devices that all its tensor degrees divide, in their order, with even rows."""
    devices = [device for device in stage.devices if device in available]
    size = sum(stage.layers[0].rows)
    for count in range(len(devices), 0, -1):
        if all(count % run.strategy.tensor == 0 and count // run.strategy.tensor <= size for run in stage.layers):
            runs = (_with_replicas(run, [1.0] * (count // run.strategy.tensor)) for run in stage.layers)
            return Stage(tuple(devices[:count]), tuple(runs))
    return None


def _with_replicas(run: LayerRun, shares: Sequence[float]) -> LayerRun:
    """Return the run with one replica per share; they split the same rows in proportion to the shares."""
    rows = split_in_proportion(sum(run.rows), shares)
    return replace(run, strategy=run.strategy.with_replicas(len(rows)), rows=rows)


def split_in_proportion(total: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Split `total` into integers of at least 1, in proportion to the shares, by largest remainders.

    Raises ValueError if there are more shares than `total`.
    """
    if total < len(shares):
        raise ValueError(f"{total} cannot be split into {len(shares)} parts of at least 1")
    spare, weight = total - len(shares), sum(shares)
    # Proportional share beyond the 1 that every part gets.
    ideal_beyond_one = [max(total * share / weight - 1, 0.0) if weight else 1.0 for share in shares]
    scale = spare / sum(ideal_beyond_one) if sum(ideal_beyond_one) else 0.0
    exact = [share * scale for share in ideal_beyond_one]
    parts = [int(share) for share in exact]
    largest_remainder_first = sorted(range(len(parts)), key=lambda number: (parts[number] - exact[number], number))
    for number in range(spare - sum(parts)):
        parts[largest_remainder_first[number % len(parts)]] += 1
    return tuple(1 + part for part in parts)


def with_layer_counts(stages: Sequence[Stage], counts: Sequence[int]) -> tuple[Stage, ...]:
    """Return the stages with these numbers of layers; a new layer gets the strategy of the stage's nearest layer."""
    firsts = accumulate(counts, initial=0)
    return tuple(_with_layers(stage, first, count) for stage, first, count in zip(stages, firsts, counts, strict=False))


def _with_layers(stage: Stage, first: int, count: int) -> Stage:
    if (stage.first, stage.end) == (first, first + count):
        return stage
    runs = []
    for run, layers in groupby(range(first, first + count), key=lambda layer: _nearest_run(stage, layer)):
        start, *others = layers
        runs.append(replace(run, first=start, count=1 + len(others)))
    return Stage(stage.devices, tuple(runs))


def _nearest_run(stage: Stage, layer: int) -> LayerRun:
    """Return the run that contains the layer or is nearest to it."""
    inside = min(max(layer, stage.first), stage.end - 1)
    return next(run for run in stage.layers if inside < run.end)


def drop_missing_stages(stages: Sequence[Stage | None], layers: Sequence[int]) -> tuple[Stage, ...]:
    """Return the stages without those that are None, whose layers their neighbours share.

    `layers` are the layer counts of all stages, including the missing ones.
    """
    counts = list(layers)
    present = [number for number, stage in enumerate(stages) if stage is not None]
    missing = [number for number, stage in enumerate(stages) if stage is None]
    for number in missing if present else ():
        after = [other for other in present if other > number]
        before = [other for other in present if other < number]
        neighbours = [*after[:1], *before[-1:]]
        for neighbour, share in zip(neighbours, split_rows(layers[number], len(neighbours)), strict=True):
            counts[neighbour] += share
    return with_layer_counts([stage for stage in stages if stage is not None], [counts[number] for number in present])


def rescale_micro_batches(pipelines: Sequence[Pipeline], rows: int) -> tuple[Pipeline, ...] | None:
    """Scale the numbers of micro-batches so that the pipelines together take `rows` rows.

    None if no numbers near the proportion add up to them.
    """
    taken = sum(pipeline.micro_batches * pipeline.micro_batch_size for pipeline in pipelines)
    if taken == rows:
        return tuple(pipelines)
    counts = [max(pipeline.micro_batches * rows // taken, 1) for pipeline in pipelines]
    remaining_rows = rows - sum(
        count * pipeline.micro_batch_size for count, pipeline in zip(counts, pipelines, strict=True)
    )
    for number in sorted(range(len(pipelines)), key=lambda n: -pipelines[n].micro_batch_size):
        added = remaining_rows // pipelines[number].micro_batch_size if remaining_rows > 0 else 0
        counts[number] += added
        remaining_rows -= added * pipelines[number].micro_batch_size
    if remaining_rows != 0:
        return None
    return tuple(replace(pipeline, micro_batches=count) for pipeline, count in zip(pipelines, counts, strict=True))


MAX_POSITIONS = 8
"""Maximum number of positions in a pipeline at which new devices are tried, as replicas or as a stage."""


def adapt_plan(old: Plan, problem: Problem) -> list[Plan]:
    """Return distinct plans near the old one on the present devices, within the limits.

    If devices are missing: stages on their remaining devices, with their old layers or with layers in proportion to the
    devices; damaged stages dropped, their layers given to the neighbours; damaged pipelines dropped, their rows given to the
    others. If devices are new: the first of these, with the new devices as replicas of one stage or of all, as a new stage,
    or as a new pipeline. The old plan comes first if it can still run. Memory is not checked. Empty if the plan is for
    another model, or if its micro-batches cannot make up the batch. They state no number format, as plans of a search.
    """
    if old.model_layers != len(problem.model.layers):
        return []
    adapted: dict[tuple[Pipeline, ...], Plan] = {}
    for pipelines in _variants(old, problem):
        pipelines_of_batch = rescale_micro_batches(pipelines, problem.global_batch_size) if pipelines else None
        if pipelines_of_batch is None or pipelines_of_batch in adapted:
            continue
        plan = replace(old, pipelines=pipelines_of_batch, global_batch_size=problem.global_batch_size, dtype=None)
        plan = _with_possible_operators(plan, problem)
        if _is_allowed(plan, problem):
            adapted[pipelines_of_batch] = plan
    return list(dict.fromkeys(adapted.values()))


def _with_possible_operators(plan: Plan, problem: Problem) -> Plan:
    """Return the plan, by degrees alone where its shardings of operators are none of the model or have no cost any more."""
    if plan.has_operators:
        try:
            check_plan(plan, problem.cost_context)
        except ValueError:
            return plan.without_operators
    return plan


def _variants(old: Plan, problem: Problem) -> Iterator[tuple[Pipeline, ...]]:
    available = frozenset(problem.devices)
    scaled_down = _with_stages(old, lambda stage: shrink_to_devices(stage, available))
    yield scaled_down
    yield tuple(_rebalance_layers(pipeline, old) for pipeline in scaled_down)
    yield _with_stages(old, lambda stage: stage if available.issuperset(stage.devices) else None)
    yield tuple(pipeline for pipeline in old.pipelines if available.issuperset(pipeline.devices))
    yield from _use_new_devices(scaled_down, _unused_devices(scaled_down, problem), problem)


def _with_stages(plan: Plan, change: Callable[[Stage], Stage | None]) -> tuple[Pipeline, ...]:
    """Return the pipelines with their stages changed, without stages that become None and pipelines without stages."""
    pipelines = []
    for pipeline in plan.pipelines:
        stages = drop_missing_stages([change(stage) for stage in pipeline.stages], pipeline.layer_counts)
        if stages:
            pipelines.append(replace(pipeline, stages=stages))
    return tuple(pipelines)


def _rebalance_layers(pipeline: Pipeline, old: Plan) -> Pipeline:
    """Split layers over stages in proportion to the layers that their devices had before."""
    layers_per_device = {
        device: (stage.end - stage.first) / len(stage.devices) for stage in old.stages for device in stage.devices
    }
    shares = [sum(layers_per_device[device] for device in stage.devices) for stage in pipeline.stages]
    return replace(pipeline, stages=with_layer_counts(pipeline.stages, split_in_proportion(old.model_layers, shares)))


def _unused_devices(pipelines: Sequence[Pipeline], problem: Problem) -> dict[str, list[Device]]:
    """Return the unused devices, by accelerator."""
    used = {device for pipeline in pipelines for device in pipeline.devices}
    unused: dict[str, list[Device]] = {}
    for device in problem.devices:
        if device not in used:
            unused.setdefault(problem.cluster.node(device.node).accelerator, []).append(device)
    return unused


def _use_new_devices(
    pipelines: tuple[Pipeline, ...], new_devices: dict[str, list[Device]], problem: Problem
) -> Iterator[tuple[Pipeline, ...]]:
    for accelerator, devices in new_devices.items():
        for index, pipeline in enumerate(pipelines):
            for scaled_up in _scale_up(pipeline, accelerator, devices, problem):
                yield (*pipelines[:index], scaled_up, *pipelines[index + 1 :])
        template = next((other for other in pipelines if len(other.devices) == len(devices)), None)
        if template is not None:
            rest = iter(devices)
            stages = (replace(stage, devices=tuple(islice(rest, len(stage.devices)))) for stage in template.stages)
            yield (*pipelines, replace(template, stages=tuple(stages)))


def _scale_up(pipeline: Pipeline, accelerator: str, devices: Sequence[Device], problem: Problem) -> Iterator[Pipeline]:
    """Yield the pipeline with the devices as replicas of one stage, as replicas of all stages, or as a new stage."""
    stages = pipeline.stages
    same_accelerator = [
        number
        for number, stage in enumerate(stages)
        if all(problem.cluster.node(device.node).accelerator == accelerator for device in stage.devices)
    ]
    for number in same_accelerator[:MAX_POSITIONS]:
        scaled_up = add_replicas(stages[number], devices)
        if scaled_up is not None:
            yield replace(pipeline, stages=(*stages[:number], scaled_up, *stages[number + 1 :]))
    share = len(devices) // len(stages)
    all_scaled_up = [
        add_replicas(stage, devices[number * share : (number + 1) * share]) for number, stage in enumerate(stages)
    ]
    new_stages = tuple(stage for stage in all_scaled_up if stage is not None)
    if len(new_stages) == len(stages):
        yield replace(pipeline, stages=new_stages)
    positions = {0, len(stages), *same_accelerator, *(number + 1 for number in same_accelerator)}
    for position in sorted(positions)[:MAX_POSITIONS]:
        stage = _single_layer_stage(stages[min(position, len(stages) - 1)], devices)
        if stage is not None:
            yield _insert_stage(pipeline, position, stage)


def _single_layer_stage(template: Stage, devices: Sequence[Device]) -> Stage | None:
    """Return a stage of one layer on the devices, with the template's tensor degree, sharding and recompute."""
    run = template.layers[0]
    rows = sum(run.rows)
    data = min(len(devices) // run.strategy.tensor, rows)
    if data == 0:
        return None
    strategy = run.strategy.replace(data=data)
    layer = replace(run, count=1, strategy=strategy, rows=split_rows(rows, data))
    return Stage(tuple(devices[: strategy.width]), (layer,))


def _insert_stage(pipeline: Pipeline, position: int, stage: Stage) -> Pipeline:
    """Insert a stage, which takes layers from all others in proportion to its devices."""
    stages = [*pipeline.stages[:position], stage, *pipeline.stages[position:]]
    layers = pipeline.stages[-1].end
    if layers < len(stages):
        return pipeline
    shares: list[float] = [*pipeline.layer_counts]
    shares.insert(position, layers * len(stage.devices) / len(pipeline.devices))
    return replace(pipeline, stages=with_layer_counts(stages, split_in_proportion(layers, shares)))


def _is_allowed(plan: Plan, problem: Problem) -> bool:
    """Return whether the plan satisfies the problem, memory aside."""
    check_plan(plan, problem.cost_context)
    return (
        set(plan.devices) <= set(problem.devices)
        and problem.limits.allows_plan(plan)
        and all(_is_profiled(run, stage, problem) for stage in plan.stages for run in stage.layers)
    )


def _is_profiled(run: LayerRun, stage: Stage, problem: Problem) -> bool:
    """Return whether every layer has a profile on every accelerator of the stage."""
    context = problem.cost_context
    return all(
        problem.profiles.has(
            accelerator,
            kind.name,
            run.strategy.tensor if context.is_tensor_sharded(kind, run.strategy.tensor) else 1,
        )
        for accelerator in {context.accelerator_of_node[device.node] for device in stage.devices}
        for kind, _ in context.kind_counts(run.first, run.end)
    )
