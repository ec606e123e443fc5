"""One rank's layers, and how long their passes last on an emulated device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn

from trainwright.cluster import Emulation
from trainwright.layer import LayerKind
from trainwright.model import Model
from trainwright_worker.emulation import Piece, backward_pieces, chunks, forward_pieces
from trainwright_worker.layers.gpt import SharedWeights, make_layer
from trainwright_worker.layers.tensor_parallel import TensorShard


class StageLayers(nn.Module):
    """The layers `first … end - 1` of the model on one rank: its tensor part of them.

    Attributes:
        shared: the weights of these layers that other layers (here or in other stages) hold too.
    """

    def __init__(self, model: Model, first: int, end: int, *, seed: int, shard: TensorShard) -> None:
        super().__init__()
        self.shared: SharedWeights = {}
        self.is_last = end == len(model.layers)
        self.layers = nn.ModuleList(
            make_layer(model, layer, seed=seed, shard=shard, shared=self.shared) for layer in range(first, end)
        )

    def forward(self, activation: Tensor, targets: Tensor | None, batch_tokens: int) -> Tensor:
        """The boundary tensor, or for the last stage this micro-batch's share of the mean loss."""
        for layer in self.layers[:-1]:
            activation = layer(activation)
        if self.is_last:
            return self.layers[-1](activation, targets, batch_tokens)  # type: ignore[no-any-return]
        return self.layers[-1](activation)  # type: ignore[no-any-return]

    @cached_property
    def number_of_values(self) -> int:
        """Values held by this rank, a weight that two of its layers share counted once."""
        return sum(parameter.numel() for parameter in self.parameters())


@dataclass(frozen=True, slots=True)
class StagePace:
    """Seconds of a stage's passes on an emulated device, cut where all-reduces lie in between; empty on a real one."""

    forward: tuple[float, ...] = ()
    backward: tuple[float, ...] = ()
    update: tuple[float, ...] = ()

    @classmethod
    def of(
        cls, emulation: Emulation | None, kinds: Sequence[LayerKind], *, rows: int, tensor: int, values: int
    ) -> StagePace:
        """The pace of these layers for `rows` rows; `values` is how many the rank's optimizer updates."""
        if emulation is None:
            return cls()
        pieces: list[Piece] = []
        for kind in kinds:
            pieces += forward_pieces(emulation, kind, rows=rows, tensor=tensor)
        return cls(chunks(pieces), chunks(backward_pieces(pieces)), (emulation.update_seconds(values),))
