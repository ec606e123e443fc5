"""Emulated seconds of a rank's passes between two communications."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainwright.cluster import Emulation
from trainwright.model import Model
from trainwright_worker.emulation import ComputeSegment, backward_segments, forward_segments
from trainwright_worker.executor.stage_module import RankLayer, StageModule


@dataclass(frozen=True, slots=True)
class EmulatedStagePace:
    """Emulated seconds of a rank's passes, split at each communication; empty on a real device.

    Attributes:
        last_backward: backward of the last micro-batch, during which some gradients are reduced.
    """

    forward: tuple[float, ...] = ()
    backward: tuple[float, ...] = ()
    last_backward: tuple[float, ...] = ()
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
