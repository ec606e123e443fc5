"""Moves of layers between stages, and of whole stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from trainwright.plan import Plan
from trainwright.search.auto.layer_rebalancing import LayerStrategy, StageConfig, scale_rows, with_stage_configs
from trainwright.search.auto.neighbourhood.device_moves import Devices, EditablePipeline, Move
from trainwright.strategy import Sharding

LAYER_COUNTS = (1, 2, 4)
"""Numbers of layers moved at once."""
MAX_LAYER_MOVES = 48
"""Maximum layer moves tried, largest expected gain first."""


def move_layers(editable: Sequence[EditablePipeline]) -> Iterator[Move]:
    """Move layers between stages, shifting the stages between; largest expected gain first."""
    moves: list[tuple[float, int, Move]] = []
    for pipeline in editable:
        count = len(pipeline.stages)
        for giver in range(count):
            for taker in range(count):
                for layers in LAYER_COUNTS if abs(giver - taker) == 1 else LAYER_COUNTS[:1]:
                    if giver != taker and len(pipeline.stages[giver].layers) > layers:
                        difference = pipeline.seconds[giver] - pipeline.seconds[taker]
                        layer_seconds = pipeline.seconds[giver] / len(pipeline.stages[giver].layers)
                        gain_after_move = difference - layers * layer_seconds
                        moves.append(
                            (-gain_after_move, len(moves), partial(_move_layers, pipeline, giver, taker, layers))
                        )
    moves.sort(key=lambda item: item[:2])
    yield from (move for _, _, move in moves[:MAX_LAYER_MOVES])


def _move_layers(pipeline: EditablePipeline, giver: int, taker: int, count: int) -> Plan:
    step = 1 if giver < taker else -1
    changed: dict[int, StageConfig] = {}
    for number in range(giver, taker + step, step):
        stage = pipeline.stages[number]
        layers = stage.layers
        if number != giver:
            layers = (*(layers[0],) * count, *layers) if step == 1 else (*layers, *(layers[-1],) * count)
        if number != taker:
            layers = layers[:-count] if step == 1 else layers[count:]
        changed[number] = replace(stage, layers=layers)
    return pipeline.replace_stages(changed)


def change_strategy_boundaries(editable: Sequence[EditablePipeline]) -> Iterator[Move]:
    """Extend a layer's strategy to its neighbours inside a stage."""
    for pipeline in editable:
        for number in pipeline.slowest_first:
            stage = pipeline.stages[number]
            layers = stage.layers
            for border in (index for index in range(1, len(layers)) if layers[index - 1] != layers[index]):
                for count in LAYER_COUNTS:
                    if border + count <= len(layers):
                        yield partial(_copy_strategy, pipeline, number, range(border, border + count), border - 1)
                    if border - count >= 0:
                        yield partial(_copy_strategy, pipeline, number, range(border - count, border), border)


def _copy_strategy(pipeline: EditablePipeline, number: int, layer_range: range, template: int) -> Plan:
    stage = pipeline.stages[number]
    return pipeline.replace_stages({number: stage.map_some_layers(layer_range, lambda _: stage.layers[template])})


def insert_or_remove_stages(editable: Sequence[EditablePipeline]) -> Iterator[Move]:
    """Remove a stage, or insert one on one or all unused devices of a node."""
    for pipeline in editable:
        count = len(pipeline.stages)
        for number in range(count) if count > 1 else ():
            yield partial(_remove_stage, pipeline, number)
        for devices in _unused_groups(pipeline):
            for number in range(count + 1):
                if len(pipeline.stages[min(number, count - 1)].layers) > 1:
                    yield partial(_insert_stage, pipeline, number, devices)


def _unused_groups(pipeline: EditablePipeline) -> list[Devices]:
    """Return one and all unused devices of each of a few nodes."""
    every = ((some[:1], some) for some in pipeline.unused_by_node)
    return list(dict.fromkeys(group for pair in every for group in pair if len(group) <= pipeline.rows))


def _remove_stage(pipeline: EditablePipeline, number: int) -> Plan:
    remaining = [*pipeline.stages[:number], *pipeline.stages[number + 1 :]]
    layers = len(pipeline.stages[number].layers)
    if number:
        neighbour = remaining[number - 1]
        remaining[number - 1] = replace(neighbour, layers=(*neighbour.layers, *(neighbour.layers[-1],) * layers))
    else:
        neighbour = remaining[0]
        remaining[0] = replace(neighbour, layers=(*(neighbour.layers[0],) * layers, *neighbour.layers))
    return with_stage_configs(pipeline.plan, pipeline.index, remaining)


def _insert_stage(pipeline: EditablePipeline, number: int, devices: Devices) -> Plan:
    """Insert a stage with half the layers of the next stage, or of the last."""
    giver = min(number, len(pipeline.stages) - 1)
    stage = pipeline.stages[giver]
    moved_layers = len(stage.layers) // 2
    rows = scale_rows((1,) * len(devices), pipeline.rows)
    template = stage.layers[0].strategy
    sharding = template.sharding if template.data > 1 else Sharding.ZERO1
    strategy = LayerStrategy(rows, template.replace(tensor=1, data=len(rows), sharding=sharding))
    if number == giver:
        changed = [StageConfig(devices, (strategy,) * moved_layers), replace(stage, layers=stage.layers[moved_layers:])]
    else:
        changed = [
            replace(stage, layers=stage.layers[:-moved_layers]),
            StageConfig(devices, (strategy,) * moved_layers),
        ]
    return with_stage_configs(
        pipeline.plan, pipeline.index, [*pipeline.stages[:giver], *changed, *pipeline.stages[giver + 1 :]]
    )
