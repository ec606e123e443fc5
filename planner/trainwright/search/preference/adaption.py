"""The plan that ran, made to fit the devices that are there now: where a search may start, and what it must beat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from trainwright.cluster import Device
from trainwright.cost.checks import check_plan
from trainwright.plan import Pipeline, Plan, Stage
from trainwright.search.preference.stages import (
    in_proportion,
    on_devices_left,
    sharing,
    with_counts,
    with_more,
    without,
)
from trainwright.search.protocol import Problem

MOST_PLACES = 8
"""New devices are tried as replicas, or as a stage, at so many places of a pipeline at most."""


def adapted(old: Plan, problem: Problem) -> list[Plan]:
    """Plans near the old one on the devices that plans may use now, all of them within the limits, none twice.

    With devices gone: stages on what is left of them, with their layers and with layers in proportion to what is left;
    stages that lost a device left out, their layers given to the neighbours; pipelines that lost one left out, their
    rows given to the others. With devices new: the same, and with them as replicas of one stage or of all, as a stage
    of their own, or as another pipeline. The old plan itself comes first where it can still run. Whether they fit into
    memory is not looked at. Empty where the plan is for another model, or its micro-batches do not make up the batch.
    """
    if old.model_layers != len(problem.model.layers):
        return []
    found: dict[tuple[Pipeline, ...], Plan] = {}
    for pipelines in _variants(old, problem):
        shared = sharing(pipelines, problem.global_batch_size) if pipelines else None
        if shared is None or shared in found:
            continue
        plan = replace(old, pipelines=shared, global_batch_size=problem.global_batch_size)
        if _is_allowed(plan, problem):
            found[shared] = plan
    return list(found.values())


def _variants(old: Plan, problem: Problem) -> Iterator[tuple[Pipeline, ...]]:
    left = frozenset(problem.devices)
    smaller = tuple(found for one in old.pipelines if (found := _shrunk(one, left)) is not None)
    yield smaller
    yield tuple(_rebalanced(one, old) for one in smaller)
    yield tuple(found for one in old.pipelines if (found := _without_damaged(one, left)) is not None)
    yield tuple(one for one in old.pipelines if left.issuperset(one.devices))
    if smaller:
        fresh = _unused(smaller, problem)
        if fresh:
            yield from _with_fresh(smaller, fresh, problem)


def _shrunk(pipeline: Pipeline, left: frozenset[Device]) -> Pipeline | None:
    """Every stage on what is left of it."""
    return _of_stages(pipeline, [on_devices_left(stage, left) for stage in pipeline.stages])


def _without_damaged(pipeline: Pipeline, left: frozenset[Device]) -> Pipeline | None:
    """Without the stages that lost a device."""
    return _of_stages(pipeline, [stage if left.issuperset(stage.devices) else None for stage in pipeline.stages])


def _of_stages(pipeline: Pipeline, stages: Sequence[Stage | None]) -> Pipeline | None:
    kept = without(stages, [stage.end - stage.first for stage in pipeline.stages])
    return replace(pipeline, stages=kept) if kept else None


def _rebalanced(pipeline: Pipeline, old: Plan) -> Pipeline:
    """Layers in proportion to what the stages' devices had of them before."""
    had = {
        device: (stage.end - stage.first) / len(stage.devices)
        for one in old.pipelines
        for stage in one.stages
        for device in stage.devices
    }
    shares = [sum(had[device] for device in stage.devices) for stage in pipeline.stages]
    return replace(pipeline, stages=with_counts(pipeline.stages, in_proportion(old.model_layers, shares)))


def _unused(pipelines: Sequence[Pipeline], problem: Problem) -> dict[str, list[Device]]:
    """By accelerator: devices that take no part."""
    used = {device for pipeline in pipelines for device in pipeline.devices}
    found: dict[str, list[Device]] = {}
    for device in problem.devices:
        if device not in used:
            found.setdefault(problem.cluster.node(device.node).accelerator, []).append(device)
    return found


def _with_fresh(
    pipelines: tuple[Pipeline, ...], fresh: dict[str, list[Device]], problem: Problem
) -> Iterator[tuple[Pipeline, ...]]:
    for accelerator, devices in fresh.items():
        for index, pipeline in enumerate(pipelines):
            for grown in _grown(pipeline, accelerator, devices, problem):
                yield (*pipelines[:index], grown, *pipelines[index + 1 :])
        twin = next((one for one in pipelines if len(one.devices) == len(devices)), None)
        if twin is not None:
            yield _and_another(pipelines, twin, devices)


def _grown(pipeline: Pipeline, accelerator: str, devices: Sequence[Device], problem: Problem) -> Iterator[Pipeline]:
    """With the devices as replicas of one stage, of all stages, or as a stage of their own."""
    stages = pipeline.stages
    alike = [number for number, stage in enumerate(stages) if _carrier(stage, problem) == accelerator]
    for number in alike[:MOST_PLACES]:
        more = with_more(stages[number], devices)
        if more is not None:
            yield replace(pipeline, stages=(*stages[:number], more, *stages[number + 1 :]))
    each = len(devices) // len(stages)
    parts = (devices[number * each : (number + 1) * each] for number in range(len(stages)))
    all_more = [with_more(stage, part) for stage, part in zip(stages, parts, strict=True)]
    found = tuple(stage for stage in all_more if stage is not None)
    if len(found) == len(stages):
        yield replace(pipeline, stages=found)
    for place in sorted({0, len(stages), *(n for number in alike for n in (number, number + 1))})[:MOST_PLACES]:
        stage = _stage_like(stages[min(place, len(stages) - 1)], devices)
        if stage is not None:
            yield _with_stage(pipeline, place, stage)


def _carrier(stage: Stage, problem: Problem) -> str | None:
    """The stage's accelerator; None where there are several."""
    names = {problem.cluster.node(device.node).accelerator for device in stage.devices}
    return names.pop() if len(names) == 1 else None


def _stage_like(other: Stage, devices: Sequence[Device]) -> Stage | None:
    """One layer on the devices, with the tensor degree and the savings of the other stage."""
    run = other.layers[0]
    data = min(len(devices) // run.tensor, sum(run.rows))
    if data == 0:
        return None
    rows = in_proportion(sum(run.rows), [1.0] * data)
    return Stage(tuple(devices[: data * run.tensor]), (replace(run, count=1, data=data, rows=rows),))


def _with_stage(pipeline: Pipeline, place: int, stage: Stage) -> Pipeline:
    """With one stage more, which takes layers from all others in the proportion of its devices."""
    stages = [*pipeline.stages[:place], stage, *pipeline.stages[place:]]
    layers = pipeline.stages[-1].end
    if layers < len(stages):
        return pipeline
    shares = [float(one.end - one.first) for one in pipeline.stages]
    shares.insert(place, layers * len(stage.devices) / len(pipeline.devices))
    return replace(pipeline, stages=with_counts(stages, in_proportion(layers, shares)))


def _and_another(pipelines: tuple[Pipeline, ...], twin: Pipeline, devices: Sequence[Device]) -> tuple[Pipeline, ...]:
    """With a copy of one of them on these devices."""
    places = iter(devices)
    stages = tuple(replace(stage, devices=tuple(next(places) for _ in stage.devices)) for stage in twin.stages)
    return (*pipelines, replace(twin, stages=stages))


def _is_allowed(plan: Plan, problem: Problem) -> bool:
    """Whether the plan may be an answer to the problem, memory aside."""
    limits, setting = problem.limits, problem.setting
    check_plan(plan, setting)
    if not set(plan.devices) <= set(problem.devices):
        return False
    for pipeline in plan.pipelines:
        if len(pipeline.stages) > (limits.max_pipeline_degree or len(pipeline.stages)):
            return False
        for stage in pipeline.stages:
            carriers = {setting.accelerator_of_node[device.node] for device in stage.devices}
            for run in stage.layers:
                if run.tensor > (limits.max_tensor_degree or run.tensor):
                    return False
                if run.data > (limits.max_data_degree or run.data):
                    return False
                kinds = [kind for kind, _ in setting.kind_counts(run.first, run.end)]
                if not all(_is_profiled(problem, name, kind.name, run.tensor) for name in carriers for kind in kinds):
                    return False
    return True


def _is_profiled(problem: Problem, accelerator: str, kind: str, tensor: int) -> bool:
    known = problem.model.kind(kind)
    degree = tensor if problem.setting.divides(known, tensor) else 1
    return problem.profiles.has(accelerator, kind, degree)
