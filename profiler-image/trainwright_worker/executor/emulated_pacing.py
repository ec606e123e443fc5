"""Emulated seconds of a rank's passes between two communications."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainwright.cluster import Emulation
from trainwright.model import Model
from trainwright_worker.emulation import ComputeSegment, Pacer, backward_segments, forward_segments
from trainwright_worker.executor.stage_module import RankLayer, StageModule
from trainwright_worker.layers.operators.operator_layer import OperatorLayer
from trainwright_worker.layers.operators.operator_pace import OperatorPace


@dataclass(frozen=True, slots=True)
class EmulatedStagePace:
    """Emulated seconds of a rank's passes, split at each communication; empty on a real device.

    None for passes of a stage with shardings of operators, which state their seconds while they compute.

    Attributes:
        last_backward: backward of the last micro-batch, during which some gradients are reduced.
    """

    forward: tuple[float, ...] | None = ()
    backward: tuple[float, ...] | None = ()
    last_backward: tuple[float, ...] | None = ()
    update: tuple[float, ...] = ()

    @classmethod
    def of(cls, emulation: Emulation | None, model: Model, stage: StageModule, rank: int) -> EmulatedStagePace:
        if emulation is None:
            return cls()
        segments = {layer.number: _layer_segments(emulation, model, layer, rank) for layer in stage.layers}
        backwards = {
            number: backward_segments(forward, model.kind_of(number).backward_share)
            for number, forward in segments.items()
        }
        return cls(
            _forward_seconds(stage, segments),
            _backward_seconds(stage, segments, backwards, is_last=False),
            _backward_seconds(stage, segments, backwards, is_last=True),
            (emulation.update_seconds(stage.updated_parameters),),
        )


def pace_operators(
    emulation: Emulation | None, model: Model, stage: StageModule, micro_batch_size: int, pacer: Pacer
) -> EmulatedStagePace:
    """Let the operators of a stage state their emulated seconds to a pacer.

    An operator takes its share of the layer's FLOPs as long as the layer would take if it were divided as the operator is.
    """
    if emulation is None:
        return EmulatedStagePace()
    for layer in stage.layers:
        if isinstance(layer.module, OperatorLayer):
            kind = model.kind_of(layer.number)
            whole = sum(operator.forward_flops_per_row for operator in kind.operators)
            seconds = {}
            for operator, share in zip(kind.operators, kind.flops_shares, strict=True):
                flops = whole * micro_batch_size / layer.module.operators.part_count(operator.name)
                seconds[operator.name] = share * emulation.compute_seconds(flops)
            layer.module.operators.pace = OperatorPace(seconds, pacer.add)
    return EmulatedStagePace(None, None, None, (emulation.update_seconds(stage.updated_parameters),))


class _PacedSegments:
    """Emulated seconds, accumulated between cuts."""

    def __init__(self) -> None:
        self.seconds = [0.0]

    def cut(self) -> None:
        self.seconds.append(0.0)

    def add(self, segments: Sequence[ComputeSegment], *, sequence_parallel: bool) -> None:
        """Add a layer's segments; under sequence parallelism an all-gather precedes each whose input's gradients are summed."""
        for piece in segments:
            if piece.sums_gradients and sequence_parallel:
                self.cut()
            self.seconds[-1] += piece.seconds
            if piece.sums_output or piece.gathers_statistics:
                self.cut()


def _layer_segments(emulation: Emulation, model: Model, layer: RankLayer, rank: int) -> tuple[ComputeSegment, ...]:
    start, stop = layer.run.row_interval_of(rank)
    kind = model.kind_of(layer.number)
    return forward_segments(
        emulation, model.divided_kind(kind) or kind, rows=stop - start, tensor=layer.run.arrangement.tensor
    )


def _forward_seconds(stage: StageModule, segments: dict[int, tuple[ComputeSegment, ...]]) -> tuple[float, ...]:
    paced = _PacedSegments()
    for run_index, run in enumerate(stage.runs):
        if run_index and needs_relayout(stage, run_index):
            paced.cut()
        for layer in run:
            if layer.has_sharded_weights:
                paced.cut()
            paced.add(segments[layer.number], sequence_parallel=layer.is_sequence_parallel)
            if layer.gathers_boundary:
                paced.cut()
    return tuple(paced.seconds)


def _backward_seconds(
    stage: StageModule,
    segments: dict[int, tuple[ComputeSegment, ...]],
    backwards: dict[int, tuple[ComputeSegment, ...]],
    *,
    is_last: bool,
) -> tuple[float, ...]:
    paced = _PacedSegments()
    for run_index in reversed(range(len(stage.runs))):
        for layer in reversed(stage.runs[run_index]):
            if layer.without_backward:
                continue
            if layer.has_sharded_weights:
                paced.cut()
            if layer.is_recomputed:
                paced.add(segments[layer.number], sequence_parallel=layer.is_sequence_parallel)
            paced.add(backwards[layer.number], sequence_parallel=layer.is_sequence_parallel)
            if layer.scatters_boundary:
                paced.cut()
            if is_last and layer.overlaps_reduction:
                paced.cut()
        if run_index and needs_relayout(stage, run_index):
            paced.cut()
    return tuple(paced.seconds)


def needs_relayout(stage: StageModule, run_index: int) -> bool:
    """Return whether rows move before the run with this index (after it in a backward)."""
    return not stage.runs[run_index - 1][0].run.is_equivalent(stage.runs[run_index][0].run)
