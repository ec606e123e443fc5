"""Feed-forwards without biases; a tensor degree divides their inner width."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def gated(values: Tensor, expand: Tensor, contract: Tensor) -> Tensor:
    """SwiGLU of (…, width): down(silu(gate) × up).

    Args:
        values: (…, width).
        expand: (2, inner, width); the gate, then what it lets through. One product computes both.
        contract: (width, inner).
    """
    gate, up = functional.linear(values, expand.flatten(0, 1)).chunk(2, -1)
    return functional.linear(functional.silu(gate) * up, contract)


def rectified(values: Tensor, expand: Tensor, contract: Tensor) -> Tensor:
    """Two products with a ReLU between them: `expand` (inner, width) and `contract` (width, inner)."""
    return functional.linear(functional.relu(functional.linear(values, expand)), contract)
