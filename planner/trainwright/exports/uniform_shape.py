"""Uniform plans: one pipeline whose stages share their degrees, which is what trainers support."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from trainwright.cluster import Device
from trainwright.layer import Dtype
from trainwright.plan import LayerRun, Pipeline, Plan, Schedule, Stage, split_rows
from trainwright.strategy import RankOrder, Strategy


@dataclass(frozen=True)
class UniformShape:
    """Uniform plan in the terms of trainers.

    The first layer of a model is its embedding and the last one its head; those between are blocks.

    Attributes:
        ends: `[stage]` index after the stage's last layer.
        strategy: of all layers, without recompute and with the tensor degree innermost.
        rows: of a micro-batch on one replica (Megatron's micro-batch size).
        recomputed_blocks: first blocks of every stage that are recomputed; embedding and head never are.
        dtype: number format of the plan; None where it states none.
        devices: by rank, with the tensor degree innermost and the stages outermost (Megatron's tp-dp-pp).
    """

    ends: tuple[int, ...]
    strategy: Strategy
    rows: int
    micro_batches: int
    recomputed_blocks: int
    schedule: Schedule
    devices: tuple[Device, ...]
    dtype: Dtype | None = None

    @property
    def layers(self) -> int:
        return self.ends[-1]

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """`[stage]` first layer and index after the last one."""
        return tuple(pairwise((0, *self.ends)))

    @property
    def blocks(self) -> tuple[int, ...]:
        """`[stage]` number of blocks."""
        return tuple(len(_blocks(first, end, self.layers)) for first, end in self.spans)

    @property
    def global_batch_size(self) -> int:
        return self.strategy.data * self.rows * self.micro_batches

    def with_strategy(self, **changes: Any) -> UniformShape:
        """Return the shape with some fields of its strategy changed."""
        return replace(self, strategy=self.strategy.replace(**changes))

    def plan(self) -> Plan:
        """Return the plan; its layer runs are as long as they can be."""
        width = self.strategy.width
        stages = tuple(
            Stage(self.devices[number * width : (number + 1) * width], self._runs(first, end))
            for number, (first, end) in enumerate(self.spans)
        )
        pipeline = Pipeline(self.micro_batches, self.rows * self.strategy.data, stages)
        return Plan(self.layers, self.global_batch_size, (pipeline,), self.schedule, self.dtype)

    def _runs(self, first: int, end: int) -> tuple[LayerRun, ...]:
        recomputed = _blocks(first, end, self.layers)[: self.recomputed_blocks]
        inner = (recomputed.start, recomputed.stop) if recomputed else (first, first)
        return tuple(
            LayerRun(start, stop - start, self.strategy.replace(recompute=recompute), (self.rows,) * self.strategy.data)
            for start, stop, recompute in ((first, inner[0], False), (*inner, True), (inner[1], end, False))
            if stop > start
        )


def _blocks(first: int, end: int, layers: int) -> range:
    """Return the layers `first … end - 1` without embedding and head."""
    return range(max(first, 1), max(min(end, layers - 1), first, 1))


def ranks(plan: Plan) -> tuple[Device, ...]:
    """Return the devices by rank, with the tensor groups of a stage one after another.

    That is the order of Megatron, torchtitan, DeepSpeed and Accelerate. A plan with the data degree innermost keeps its groups.
    """
    return tuple(
        device
        for stage in plan.stages
        for device in RankOrder.TENSOR_INNER.members(stage.layers[0].strategy.tensor_groups(stage.devices))
    )


def blocks_by_stage(plan: Plan) -> tuple[range, ...]:
    """Return the blocks of every stage of every pipeline."""
    return tuple(_blocks(stage.first, stage.end, plan.model_layers) for stage in plan.stages)


def recomputed_blocks(plan: Plan) -> int | None:
    """Return the first blocks of every stage that are recomputed; None if stages do not have that in common."""
    recomputed = [
        [layer for run in stage.layers if run.strategy.recompute for layer in range(run.first, run.end)]
        for stage in plan.stages
    ]
    count = max(map(len, recomputed))
    is_common = all(
        recomputed_here == [*blocks[:count]]
        for recomputed_here, blocks in zip(recomputed, blocks_by_stage(plan), strict=True)
    )
    return count if is_common else None


def even_ends(layers: int, stages: int) -> tuple[int, ...]:
    """Return the ends of stages whose numbers of layers differ by one at most, as trainers without uneven stages divide them."""
    return tuple(accumulate(split_rows(layers, stages)))


def shape_of(plan: Plan) -> UniformShape | None:
    """Return the shape of a uniform plan; None if the plan is not uniform."""
    runs = [run for stage in plan.stages for run in stage.layers]
    head, count = runs[0], recomputed_blocks(plan)
    if len(plan.pipelines) > 1 or count is None or len(set(head.rows)) > 1 or plan.has_operators:
        return None
    if any((_shared_strategy(run), run.rows) != (_shared_strategy(head), head.rows) for run in runs) or mixes_orders(
        plan
    ):
        return None
    return UniformShape(
        ends=tuple(stage.end for stage in plan.stages),
        strategy=_shared_strategy(head),
        rows=head.rows[0],
        micro_batches=plan.pipelines[0].micro_batches,
        recomputed_blocks=count,
        schedule=plan.schedule,
        devices=ranks(plan),
        dtype=plan.dtype,
    )


def _shared_strategy(run: LayerRun) -> Strategy:
    """Return what layers of a uniform plan have in common: recompute may differ, and the order where groups do not."""
    return run.strategy.effective.replace(order=RankOrder.TENSOR_INNER, recompute=False)


def mixes_orders(plan: Plan) -> bool:
    """Return whether layers of a stage have other tensor groups than its first layer."""
    return any(
        run.strategy.tensor_groups(stage.devices) != stage.layers[0].strategy.tensor_groups(stage.devices)
        for stage in plan.stages
        for run in stage.layers
    )
