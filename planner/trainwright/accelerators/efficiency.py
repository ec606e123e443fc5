"""Achievable shares of data-sheet rates, by hardware generation.

Every number is an assumption about hardware and libraries of its generation. They follow public experience with large
matrix products (cuBLAS reaches 70-90 % of the dense peak, rocBLAS less) and streaming kernels (75-90 % of the
bandwidth). None is fitted to one device. SOFTMAX_KERNELS and HOST_SECONDS were chosen in view of layer times of
OPT-350M on V100 and A100 (published with Sailor), so these do not test them independently.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from trainwright.accelerators.data_sheets import Generation

KERNEL_SECONDS: Final = 5e-6
"""Minimum time of one operator on the device: launch, filling and draining the multiprocessors."""

HOST_SECONDS: Final = 30e-6
"""Time of an eager runtime's host to issue one operator: about three calls of 10 µs (product, bias, view).

The host runs ahead of the device, so a layer takes the longer of the two, not their sum.
"""

MEMORY_RATIO: Final = 0.80
"""Share of the memory bandwidth that streaming kernels reach."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Achievable shares of one generation.

    Attributes:
        general_ratio: of the float32 peak in large matrix products on the general (CUDA) units.
        matrix_ratio: of the peak of the tensor (matrix) units in large matrix products.
        attention_ratio: of the rate of large matrix products in fused attention.
        general_flops_per_joule, matrix_flops_per_joule: rate that the power limit sustains. It binds on small GPUs (T4,
            L4, H100 PCIe), whose clock falls far below boost under sustained products; larger GPUs of the generation
            reach their ratio within their limit.
    """

    general_ratio: float
    matrix_ratio: float
    attention_ratio: float
    general_flops_per_joule: float
    matrix_flops_per_joule: float


EFFICIENCIES: Final[dict[Generation, Efficiency]] = {
    "pascal": Efficiency(0.90, 0.90, 0.40, 0.075e12, 0.15e12),
    "volta": Efficiency(0.90, 0.80, 0.40, 0.075e12, 0.35e12),
    "turing": Efficiency(0.90, 0.80, 0.40, 0.075e12, 0.35e12),
    "ampere": Efficiency(0.90, 0.85, 0.65, 0.10e12, 0.75e12),
    "ampere_rtx": Efficiency(0.80, 0.85, 0.65, 0.12e12, 0.40e12),
    "ada": Efficiency(0.80, 0.85, 0.65, 0.26e12, 0.85e12),
    "hopper": Efficiency(0.85, 0.75, 0.65, 0.15e12, 1.0e12),
    "blackwell": Efficiency(0.85, 0.75, 0.65, 0.15e12, 1.9e12),
    "cdna2": Efficiency(0.80, 0.70, 0.50, 0.20e12, 0.70e12),
    "cdna3": Efficiency(0.80, 0.55, 0.50, 0.30e12, 1.1e12),
}


@dataclass(frozen=True, slots=True)
class MatmulTile:
    """Tile of a matrix product's result that one multiprocessor computes at a time.

    Attributes:
        ratio: rate relative to the largest tile's; a small tile reads its operands more often.
        splits: parts of the inner dimension that are computed in parallel.
    """

    rows: int
    columns: int
    ratio: float
    splits: int = 1


TILES: Final = (
    MatmulTile(256, 128, 1.0),
    MatmulTile(128, 128, 0.97),
    MatmulTile(128, 64, 0.85),
    MatmulTile(64, 64, 0.70),
    MatmulTile(32, 32, 0.40),
    MatmulTile(128, 128, 0.92, splits=4),
    MatmulTile(64, 64, 0.60, splits=8),
)
"""Tiles of matrix products; the library uses the fastest for the shape."""

INNER_OVERHEAD: Final = 32
"""Cost of filling the pipeline and writing a tile's result, in steps of the inner dimension."""

SOFTMAX_KERNELS: Final = 3
"""Kernels over stored attention scores in an eager runtime (mask, softmax, dropout); each reads and writes all scores."""

BACKWARD_ATTENTION_PRODUCTS: Final = 2.5
"""Ratio of backward to forward products in fused attention: five to two (Dao et al. 2022, algorithm 4)."""
