"""How long a rank's passes last on an emulated device: seconds of computation between one communication and the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainwright.cluster import Emulation
from trainwright.model import Model
from trainwright_worker.emulation import Piece, backward_pieces, forward_pieces
from trainwright_worker.executor.stage import RankLayer, RankStage


@dataclass(frozen=True, slots=True)
class StagePace:
    """Seconds of a rank's passes, cut where communication lies in between; empty on a real device.

    Attributes:
        last_backward: of the last micro-batch, beside which some gradients are summed.
    """

    forward: tuple[float, ...] = ()
    backward: tuple[float, ...] = ()
    last_backward: tuple[float, ...] = ()
    update: tuple[float, ...] = ()

    @classmethod
    def of(cls, emulation: Emulation | None, model: Model, stage: RankStage, rank: int) -> StagePace:
        if emulation is None:
            return cls()
        pieces = {layer.number: _pieces(emulation, model, layer, rank) for layer in stage.layers}
        return cls(
            _forward(stage, pieces),
            _backward(stage, pieces, is_last=False),
            _backward(stage, pieces, is_last=True),
            (emulation.update_seconds(stage.updated_values),),
        )


class _Chunks:
    """Lengths that grow until a cut."""

    def __init__(self) -> None:
        self.lengths = [0.0]

    def cut(self) -> None:
        self.lengths.append(0.0)

    def add(self, pieces: Sequence[Piece], *, sequence_parallel: bool) -> None:
        """What ends in an all-reduce begins with an all-gather and ends in a reduce-scatter in sequence parallelism."""
        for piece in pieces:
            if piece.ends_in_all_reduce and sequence_parallel:
                self.cut()
            self.lengths[-1] += piece.seconds
            if piece.ends_in_all_reduce:
                self.cut()


def _pieces(emulation: Emulation, model: Model, layer: RankLayer, rank: int) -> tuple[Piece, ...]:
    start, stop = layer.run.rows_of(rank)
    return forward_pieces(emulation, model.kind_of(layer.number), rows=stop - start, tensor=layer.run.tensor)


def _forward(stage: RankStage, pieces: dict[int, tuple[Piece, ...]]) -> tuple[float, ...]:
    chunks = _Chunks()
    for place, run in enumerate(stage.runs):
        if place and moves(stage, place):
            chunks.cut()
        for layer in run:
            if layer.gathers:
                chunks.cut()
            chunks.add(pieces[layer.number], sequence_parallel=layer.is_sequence_parallel)
            if layer.collects_boundary:
                chunks.cut()
    return tuple(chunks.lengths)


def _backward(stage: RankStage, pieces: dict[int, tuple[Piece, ...]], *, is_last: bool) -> tuple[float, ...]:
    chunks = _Chunks()
    for place in reversed(range(len(stage.runs))):
        for layer in reversed(stage.runs[place]):
            if layer.gathers:
                chunks.cut()
            if layer.recomputes:
                chunks.add(pieces[layer.number], sequence_parallel=layer.is_sequence_parallel)
            chunks.add(backward_pieces(pieces[layer.number]), sequence_parallel=layer.is_sequence_parallel)
            if layer.parts_boundary:
                chunks.cut()
            if is_last and layer.reduces_beside_backward:
                chunks.cut()
        if place and moves(stage, place):
            chunks.cut()
    return tuple(chunks.lengths)


def moves(stage: RankStage, place: int) -> bool:
    """Whether rows move before the run with that place (in a backward: behind it)."""
    return not stage.runs[place - 1][0].run.is_arranged_as(stage.runs[place][0].run)
