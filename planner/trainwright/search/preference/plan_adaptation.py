"""Adaptation of the running plan to changed devices, with few changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from trainwright.cluster import Device
from trainwright.cost.estimate import check_plan
from trainwright.plan import LayerRun, Pipeline, Plan, Sharding, Stage
from trainwright.search.problem import Problem


def shrink_to_devices(stage: Stage, available: frozenset[Device]) -> Stage | None:
    """Return the stage without its missing devices; None if no tensor group is left.

    Intact tensor groups stay, with rows in their old proportion. The remaining devices form new groups; those that do not
    fill one are left out.
    """
    if all(device in available for device in stage.devices):
        return stage
    first = stage.layers[0]
    if any((run.tensor, run.order) != (first.tensor, first.order) for run in stage.layers):
        return _shrink_mixed_degrees(stage, available)
    groups = first.tensor_groups(stage.devices)
    intact_groups = [
        (group, number) for number, group in enumerate(groups) if all(device in available for device in group)
    ]
    devices_in_groups = {device for group, _ in intact_groups for device in group}
    ungrouped = [device for device in stage.devices if device in available and device not in devices_in_groups]
    new_groups = [tuple(ungrouped[start : start + first.tensor]) for start in range(0, len(ungrouped), first.tensor)]
    new_groups = [group for group in new_groups if len(group) == first.tensor]
    groups_used = [*(group for group, _ in intact_groups), *new_groups][: sum(first.rows)]
    if not groups_used:
        return None
    runs = []
    for run in stage.layers:
        mean = sum(run.rows) / run.data
        shares = [*(run.rows[number] for _, number in intact_groups), *(mean for _ in new_groups)]
        runs.append(_with_replicas(run, shares[: len(groups_used)]))
    return Stage(first.order.members(groups_used), tuple(runs))


def add_replicas(stage: Stage, devices: Sequence[Device]) -> Stage | None:
    """Return the stage with the additional replicas that the devices make.

    None if they fill no tensor group, if rows are too few, or if the stage mixes tensor degrees or rank orders.
    """
    first = stage.layers[0]
    added_replicas = len(devices) // first.tensor
    if added_replicas == 0 or any((run.tensor, run.order) != (first.tensor, first.order) for run in stage.layers):
        return None
    if first.data + added_replicas > sum(first.rows):
        return None
    groups = [*first.tensor_groups(stage.devices)]
    groups += [tuple(devices[n * first.tensor : (n + 1) * first.tensor]) for n in range(added_replicas)]
    runs = [
        _with_replicas(run, [*run.rows, *(sum(run.rows) / run.data for _ in range(added_replicas))])
        for run in stage.layers
    ]
    return Stage(first.order.members(groups), tuple(runs))


def _shrink_mixed_degrees(stage: Stage, available: frozenset[Device]) -> Stage | None:
    """Return the stage on the most devices that all its tensor degrees divide, in their order, with even rows."""
    devices = [device for device in stage.devices if device in available]
    size = sum(stage.layers[0].rows)
    for count in range(len(devices), 0, -1):
        if all(count % run.tensor == 0 and count // run.tensor <= size for run in stage.layers):
            runs = (_with_replicas(run, [1.0] * (count // run.tensor)) for run in stage.layers)
            return Stage(tuple(devices[:count]), tuple(runs))
    return None


def _with_replicas(run: LayerRun, shares: Sequence[float]) -> LayerRun:
    """Return the run with one replica per share; they split the same rows in proportion to the shares."""
    sharding = run.sharding if len(shares) > 1 else Sharding.NONE
    return replace(run, data=len(shares), rows=split_in_proportion(sum(run.rows), shares), sharding=sharding)


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
    exact = [one * scale for one in ideal_beyond_one]
    parts = [int(one) for one in exact]
    largest_remainder_first = sorted(range(len(parts)), key=lambda number: (parts[number] - exact[number], number))
    for number in range(spare - sum(parts)):
        parts[largest_remainder_first[number % len(parts)]] += 1
    return tuple(1 + part for part in parts)


def with_layer_counts(stages: Sequence[Stage], counts: Sequence[int]) -> tuple[Stage, ...]:
    """Return the stages with these numbers of layers; a new layer gets the strategy of the stage's nearest layer."""
    found, first = [], 0
    for stage, count in zip(stages, counts, strict=True):
        found.append(_with_layers(stage, first, count))
        first += count
    return tuple(found)


def _with_layers(stage: Stage, first: int, count: int) -> Stage:
    if (stage.first, stage.end) == (first, first + count):
        return stage
    nearest_runs = [nearest_run(stage)(layer) for layer in range(first, first + count)]
    runs = []
    for number, group in groupby(nearest_runs):
        size = len(list(group))
        runs.append(replace(stage.layers[number], first=first, count=size))
        first += size
    return Stage(stage.devices, tuple(runs))


def nearest_run(stage: Stage) -> Callable[[int], int]:
    """Return a function from a layer to the number of the run that contains it or is nearest to it."""

    def number(layer: int) -> int:
        inside = min(max(layer, stage.first), stage.end - 1)
        return next(index for index, run in enumerate(stage.layers) if inside < run.end)

    return number


def drop_missing_stages(stages: Sequence[Stage | None], layers: Sequence[int]) -> tuple[Stage, ...]:
    """Return the stages without those that are None, whose layers their neighbours share.

    `layers` are the layer counts of all stages, including the missing ones.
    """
    counts = list(layers)
    present = [number for number, stage in enumerate(stages) if stage is not None]
    for number in (number for number, stage in enumerate(stages) if stage is None):
        next_present = [other for other in present if other > number][:1]
        previous_present = [other for other in present if other < number][-1:]
        neighbours = [*next_present, *previous_present]
        for index, neighbour in enumerate(neighbours):
            share, more = divmod(layers[number], len(neighbours))
            counts[neighbour] += share + (index < more)
    remaining = [stage for stage in stages if stage is not None]
    return with_layer_counts(remaining, [counts[number] for number in present]) if remaining else ()


def rescale_micro_batches(pipelines: Sequence[Pipeline], rows: int) -> tuple[Pipeline, ...] | None:
    """Scale the numbers of micro-batches so that the pipelines together take `rows` rows.

    None if no numbers near the proportion add up to them.
    """
    taken = sum(one.micro_batches * one.micro_batch_size for one in pipelines)
    if taken == rows:
        return tuple(pipelines)
    counts = [max(one.micro_batches * rows // taken, 1) for one in pipelines]
    remaining_rows = rows - sum(count * one.micro_batch_size for count, one in zip(counts, pipelines, strict=True))
    for number in sorted(range(len(pipelines)), key=lambda n: -pipelines[n].micro_batch_size):
        added = remaining_rows // pipelines[number].micro_batch_size if remaining_rows > 0 else 0
        counts[number] += added
        remaining_rows -= added * pipelines[number].micro_batch_size
    if remaining_rows != 0:
        return None
    return tuple(replace(one, micro_batches=count) for one, count in zip(pipelines, counts, strict=True))


MAX_POSITIONS = 8
"""Maximum number of positions in a pipeline at which new devices are tried, as replicas or as a stage."""


def adapt_plan(old: Plan, problem: Problem) -> list[Plan]:
    """Return distinct plans near the old one on the present devices, within the limits.

    If devices are missing: stages on their remaining devices, with their old layers or with layers in proportion to the
    devices; damaged stages dropped, their layers given to the neighbours; damaged pipelines dropped, their rows given to the
    others. If devices are new: the first of these, with the new devices as replicas of one stage or of all, as a new stage,
    or as a new pipeline. The old plan comes first if it can still run. Memory is not checked. Empty if the plan is for
    another model, or if its micro-batches cannot make up the batch.
    """
    if old.model_layers != len(problem.model.layers):
        return []
    found: dict[tuple[Pipeline, ...], Plan] = {}
    for pipelines in _variants(old, problem):
        pipelines_of_batch = rescale_micro_batches(pipelines, problem.global_batch_size) if pipelines else None
        if pipelines_of_batch is None or pipelines_of_batch in found:
            continue
        plan = replace(old, pipelines=pipelines_of_batch, global_batch_size=problem.global_batch_size)
        if _is_allowed(plan, problem):
            found[pipelines_of_batch] = plan
    return list(found.values())


def _variants(old: Plan, problem: Problem) -> Iterator[tuple[Pipeline, ...]]:
    available = frozenset(problem.devices)
    scaled_down = tuple(found for one in old.pipelines if (found := _scale_down(one, available)) is not None)
    yield scaled_down
    yield tuple(_rebalance_layers(one, old) for one in scaled_down)
    yield tuple(found for one in old.pipelines if (found := _drop_damaged_stages(one, available)) is not None)
    yield tuple(one for one in old.pipelines if available.issuperset(one.devices))
    if scaled_down:
        new_devices = _unused_devices(scaled_down, problem)
        if new_devices:
            yield from _use_new_devices(scaled_down, new_devices, problem)


def _scale_down(pipeline: Pipeline, available: frozenset[Device]) -> Pipeline | None:
    """Shrink every stage to its remaining devices."""
    return _keep_stages(pipeline, [shrink_to_devices(stage, available) for stage in pipeline.stages])


def _drop_damaged_stages(pipeline: Pipeline, available: frozenset[Device]) -> Pipeline | None:
    """Drop the stages with missing devices."""
    return _keep_stages(pipeline, [stage if available.issuperset(stage.devices) else None for stage in pipeline.stages])


def _keep_stages(pipeline: Pipeline, stages: Sequence[Stage | None]) -> Pipeline | None:
    remaining = drop_missing_stages(stages, [stage.end - stage.first for stage in pipeline.stages])
    return replace(pipeline, stages=remaining) if remaining else None


def _rebalance_layers(pipeline: Pipeline, old: Plan) -> Pipeline:
    """Split layers over stages in proportion to the layers that their devices had before."""
    layers_per_device = {
        device: (stage.end - stage.first) / len(stage.devices)
        for one in old.pipelines
        for stage in one.stages
        for device in stage.devices
    }
    shares = [sum(layers_per_device[device] for device in stage.devices) for stage in pipeline.stages]
    return replace(pipeline, stages=with_layer_counts(pipeline.stages, split_in_proportion(old.model_layers, shares)))


def _unused_devices(pipelines: Sequence[Pipeline], problem: Problem) -> dict[str, list[Device]]:
    """Return the unused devices, by accelerator."""
    used = {device for pipeline in pipelines for device in pipeline.devices}
    found: dict[str, list[Device]] = {}
    for device in problem.devices:
        if device not in used:
            found.setdefault(problem.cluster.node(device.node).accelerator, []).append(device)
    return found


def _use_new_devices(
    pipelines: tuple[Pipeline, ...], new_devices: dict[str, list[Device]], problem: Problem
) -> Iterator[tuple[Pipeline, ...]]:
    for accelerator, devices in new_devices.items():
        for index, pipeline in enumerate(pipelines):
            for scaled_up in _scale_up(pipeline, accelerator, devices, problem):
                yield (*pipelines[:index], scaled_up, *pipelines[index + 1 :])
        template = next((one for one in pipelines if len(one.devices) == len(devices)), None)
        if template is not None:
            yield _add_pipeline_copy(pipelines, template, devices)


def _scale_up(pipeline: Pipeline, accelerator: str, devices: Sequence[Device], problem: Problem) -> Iterator[Pipeline]:
    """Yield the pipeline with the devices as replicas of one stage, as replicas of all stages, or as a new stage."""
    stages = pipeline.stages
    same_accelerator = [
        number for number, stage in enumerate(stages) if _single_accelerator(stage, problem) == accelerator
    ]
    for number in same_accelerator[:MAX_POSITIONS]:
        scaled_up = add_replicas(stages[number], devices)
        if scaled_up is not None:
            yield replace(pipeline, stages=(*stages[:number], scaled_up, *stages[number + 1 :]))
    devices_per_stage = len(devices) // len(stages)
    parts = (devices[number * devices_per_stage : (number + 1) * devices_per_stage] for number in range(len(stages)))
    all_scaled_up = [add_replicas(stage, part) for stage, part in zip(stages, parts, strict=True)]
    found = tuple(stage for stage in all_scaled_up if stage is not None)
    if len(found) == len(stages):
        yield replace(pipeline, stages=found)
    for position in sorted({0, len(stages), *(n for number in same_accelerator for n in (number, number + 1))})[
        :MAX_POSITIONS
    ]:
        stage = _single_layer_stage(stages[min(position, len(stages) - 1)], devices)
        if stage is not None:
            yield _insert_stage(pipeline, position, stage)


def _single_accelerator(stage: Stage, problem: Problem) -> str | None:
    """Return the stage's accelerator; None if it has several."""
    names = {problem.cluster.node(device.node).accelerator for device in stage.devices}
    return names.pop() if len(names) == 1 else None


def _single_layer_stage(template: Stage, devices: Sequence[Device]) -> Stage | None:
    """Return a stage of one layer on the devices, with the template's tensor degree, sharding and recompute."""
    run = template.layers[0]
    data = min(len(devices) // run.tensor, sum(run.rows))
    if data == 0:
        return None
    rows = split_in_proportion(sum(run.rows), [1.0] * data)
    return Stage(tuple(devices[: data * run.tensor]), (replace(run, count=1, data=data, rows=rows),))


def _insert_stage(pipeline: Pipeline, position: int, stage: Stage) -> Pipeline:
    """Insert a stage, which takes layers from all others in proportion to its devices."""
    stages = [*pipeline.stages[:position], stage, *pipeline.stages[position:]]
    layers = pipeline.stages[-1].end
    if layers < len(stages):
        return pipeline
    shares = [float(one.end - one.first) for one in pipeline.stages]
    shares.insert(position, layers * len(stage.devices) / len(pipeline.devices))
    return replace(pipeline, stages=with_layer_counts(stages, split_in_proportion(layers, shares)))


def _add_pipeline_copy(
    pipelines: tuple[Pipeline, ...], template: Pipeline, devices: Sequence[Device]
) -> tuple[Pipeline, ...]:
    """Add a copy of the template pipeline on these devices."""
    device_iterator = iter(devices)
    stages = tuple(
        replace(stage, devices=tuple(next(device_iterator) for _ in stage.devices)) for stage in template.stages
    )
    return (*pipelines, replace(template, stages=stages))


def _is_allowed(plan: Plan, problem: Problem) -> bool:
    """Return whether the plan satisfies the problem, memory aside."""
    limits, setting = problem.limits, problem.cost_context
    check_plan(plan, setting)
    if not set(plan.devices) <= set(problem.devices):
        return False
    for pipeline in plan.pipelines:
        if len(pipeline.stages) > (limits.max_pipeline_degree or len(pipeline.stages)):
            return False
        for stage in pipeline.stages:
            accelerators = {setting.accelerator_of_node[device.node] for device in stage.devices}
            for run in stage.layers:
                if run.tensor > (limits.max_tensor_degree or run.tensor):
                    return False
                if run.data > (limits.max_data_degree or run.data):
                    return False
                kinds = [kind for kind, _ in setting.kind_counts(run.first, run.end)]
                if not all(
                    _is_profiled(problem, name, kind.name, run.tensor) for name in accelerators for kind in kinds
                ):
                    return False
    return True


def _is_profiled(problem: Problem, accelerator: str, kind: str, tensor: int) -> bool:
    known = problem.model.kind(kind)
    degree = tensor if problem.cost_context.is_tensor_sharded(known, tensor) else 1
    return problem.profiles.has(accelerator, kind, degree)
