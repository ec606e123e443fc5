"""Moves of a plan's strategy: tensor degrees, rows, sharding, recompute, schedule."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from functools import partial

from trainwright.plan import Plan, Schedule
from trainwright.search.auto.layer_rebalancing import with_sharding, with_stage_configs
from trainwright.search.auto.neighbourhood.device_moves import EditablePipeline, Move
from trainwright.strategy import Sharding


def change_tensor_degree(editable: Sequence[EditablePipeline]) -> Iterator[Move]:
    """Double or halve the tensor degree of all, the first, the last or half of one stage's layers."""
    for pipeline in editable:
        for number in pipeline.slowest_first:
            stage = pipeline.stages[number]
            count = len(stage.layers)
            layer_ranges = [range(count)]
            if count > 1:
                layer_ranges += [range(1), range(count - 1, count), range(count // 2), range(count // 2, count)]
            for layer_range in dict.fromkeys(layer_ranges):
                for doubles in (True, False):
                    tensor = stage.layers[layer_range[0]].strategy.tensor
                    target_degree = tensor * 2 if doubles else tensor // 2
                    if (
                        target_degree
                        and len(stage.devices) % target_degree == 0
                        and len(stage.devices) // target_degree <= pipeline.rows
                    ):
                        yield partial(_with_tensor_degree, pipeline, number, layer_range, target_degree)


def _with_tensor_degree(pipeline: EditablePipeline, number: int, layer_range: range, tensor: int) -> Plan:
    stage = pipeline.stages[number]
    changed = stage.map_some_layers(
        layer_range, lambda layer: layer.with_tensor_degree(tensor, len(stage.devices), pipeline.rows)
    )
    return pipeline.replace_stages({number: changed})


def change_micro_batch_size(editable: Sequence[EditablePipeline]) -> Iterator[Move]:
    """Double or halve one pipeline's micro-batch rows."""
    for editable_pipeline in editable:
        pipeline = editable_pipeline.plan.pipelines[editable_pipeline.index]
        if pipeline.micro_batches % 2 == 0:
            size = pipeline.micro_batch_size * 2
            yield partial(_resize_micro_batches, editable_pipeline, size, pipeline.micro_batches // 2)
        if pipeline.micro_batch_size % 2 == 0:
            size = pipeline.micro_batch_size // 2
            if all(stage.max_data_degree <= size for stage in editable_pipeline.stages):
                yield partial(_resize_micro_batches, editable_pipeline, size, pipeline.micro_batches * 2)


def _resize_micro_batches(pipeline: EditablePipeline, size: int, micro_batches: int) -> Plan:
    stages = [stage.with_rows(size) for stage in pipeline.stages]
    return with_stage_configs(pipeline.plan, pipeline.index, stages, micro_batches)


def change_sharding(editable: Sequence[EditablePipeline]) -> Iterator[Move]:
    """Change the sharding of all stages or of one replicated stage."""
    for sharding in Sharding:
        yield partial(with_sharding, editable[0].plan, sharding)
    for pipeline in editable:
        for number in pipeline.slowest_first:
            stage = pipeline.stages[number]
            if stage.max_data_degree > 1:
                for sharding in Sharding:
                    yield partial(_change_sharding_of_layers, pipeline, number, range(len(stage.layers)), sharding)


def save_memory(editable: Sequence[EditablePipeline]) -> Iterator[Move]:
    """Recompute or shard some layers less or more; repair adds back only the recompute that memory requires."""
    for pipeline in editable:
        if any(layer.strategy.recompute for stage in pipeline.stages for layer in stage.layers):
            yield partial(_stop_all_recompute, pipeline)
        for number in pipeline.slowest_first:
            stage = pipeline.stages[number]
            recomputed = [index for index, layer in enumerate(stage.layers) if layer.strategy.recompute]
            for chosen in (recomputed[-1:], recomputed[len(recomputed) // 2 :], recomputed):
                if chosen:
                    yield partial(_stop_recompute, pipeline, number, chosen)
            for current, replacement in ((Sharding.ZERO2, Sharding.ZERO3), (Sharding.ZERO3, Sharding.ZERO2)):
                numbers = [index for index, layer in enumerate(stage.layers) if layer.strategy.sharding is current]
                for chosen in (numbers[-1:], numbers[len(numbers) // 2 :]):
                    if chosen and stage.layers[chosen[0]].strategy.data > 1:
                        yield partial(_change_sharding_of_layers, pipeline, number, chosen, replacement)


def _stop_recompute(pipeline: EditablePipeline, number: int, chosen: Container[int]) -> Plan:
    return pipeline.replace_stages(
        {number: pipeline.stages[number].map_some_layers(chosen, lambda layer: layer.with_strategy(recompute=False))}
    )


def _change_sharding_of_layers(
    pipeline: EditablePipeline, number: int, chosen: Container[int], sharding: Sharding
) -> Plan:
    return pipeline.replace_stages(
        {number: pipeline.stages[number].map_some_layers(chosen, lambda layer: layer.with_strategy(sharding=sharding))}
    )


def _stop_all_recompute(pipeline: EditablePipeline) -> Plan:
    return pipeline.replace_stages(
        {
            number: stage.map_layers(lambda layer: layer.with_strategy(recompute=False))
            for number, stage in enumerate(pipeline.stages)
        }
    )


def change_schedule(editable: Sequence[EditablePipeline]) -> Iterator[Move]:
    """Change to the other schedule, where that differs."""
    plan = editable[0].plan
    for schedule in other_schedules(plan):
        yield partial(replace, plan, schedule=schedule)


def other_schedules(plan: Plan) -> Iterator[Schedule]:
    """Yield the other schedules; none without pipelining."""
    if any(len(pipeline.stages) > 1 < pipeline.micro_batches for pipeline in plan.pipelines):
        yield from (schedule for schedule in Schedule if schedule is not plan.schedule)
