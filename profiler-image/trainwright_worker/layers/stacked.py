"""Families whose boundaries are all alike: one tensor of (positions, width) between any two layers."""

from __future__ import annotations

from trainwright.families import Bert, Gpt, Llama, Moe, Vit
from trainwright.layer import Attention


class StackedLayers:
    """Which kind every layer is, and what lies between two of them."""

    def __init__(self, family: Gpt | Llama | Bert | Moe | Vit) -> None:
        self.kinds = family.stack(Attention.FUSED).layers
        self.hidden = family.sequence_length, family.hidden_size

    def boundary(self, layer: int) -> tuple[tuple[int, ...], ...]:
        """Shapes behind that layer, of one row; none behind the last."""
        return () if layer == len(self.kinds) - 1 else (self.hidden,)
