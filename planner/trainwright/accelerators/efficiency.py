"""Achievable shares of data-sheet rates, by hardware generation.

Every number is an assumption about hardware and libraries of its generation. They follow public experience with large
matrix products (cuBLAS reaches 70-90 % of the dense peak, rocBLAS less) and streaming kernels (75-90 % of the
bandwidth). None is fitted to one device. STREAMING_RATIOS were chosen in view of times of a BERT layer on V100, and
`Runtime.host_seconds_per_operator` of layer times of OPT-350M on V100 and A100 (published with Sailor), so these do not
test them independently. BACKWARD_HOST_RATIO is of one host with an H200.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from trainwright.accelerators.data_sheets import Generation
from trainwright.runtime import AttentionLibrary, Kernels

KERNEL_SECONDS: Final = 5e-6
"""Minimum time of one operator on the device: launch, filling and draining the multiprocessors."""

BACKWARD_HOST_RATIO: Final = 2.2
"""Host time to issue a layer's backward over that of its forward: a product becomes two, and gradients accumulate.

Eager blocks of GPT-2, BERT and Llama that the host alone bounds took 0.60 and 1.30, 0.46 and 1.28, 0.80 and 1.85 ms in
our worker beside one H200, and torch's own encoder layer 0.63 and 1.55 ms: 2.2 to 2.8 times as long.
"""

MEMORY_RATIO: Final = 0.80
"""Share of the memory bandwidth that streaming kernels reach."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Achievable shares of one generation.

    Attributes:
        general_ratio: of the float32 peak in large matrix products on the general (CUDA) units.
        matrix_ratio: of the peak of the tensor (matrix) units in large matrix products. On A100 a product of 8192³ normally
            distributed values reaches 257 of 312 TFLOP/s (https://www.thonking.ai/p/strangely-matrix-multiplications).
        attention_ratio: of the rate of large matrix products in PyTorch's fused attention, forward and backward. Where that
            is FlashAttention-2, it follows its plots for A100 (160 to 200 of 312 TFLOP/s) and H100 (260 to 340 of 989) at
            2,048 to 16,384 tokens (Dao 2023, figures 4 and 7, https://arxiv.org/abs/2307.08691).
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
    "ampere": Efficiency(0.90, 0.83, 0.62, 0.10e12, 0.75e12),
    "ampere_rtx": Efficiency(0.80, 0.85, 0.62, 0.12e12, 0.40e12),
    "ada": Efficiency(0.80, 0.85, 0.62, 0.26e12, 0.85e12),
    "hopper": Efficiency(0.85, 0.75, 0.40, 0.15e12, 1.0e12),
    "blackwell": Efficiency(0.85, 0.75, 0.40, 0.15e12, 1.9e12),
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

STREAMING_RATIOS: Final[dict[Kernels, float]] = {Kernels.EAGER: 3.0, Kernels.FUSED: 2.05, Kernels.COMPILED: 1.7}
"""Actual over ideal traffic of operators that memory bounds: kernels that read and write the same tensors again, layouts
that do not coalesce, the gaps between kernels.

A layer of BERT-large on V100 in half precision takes 9.14 and 18.43 ms in PyTorch, 7.6 and 16.19 ms with DeepSpeed's fused
kernels, 6.87 and 15.42 ms fused over the whole layer, as a compiler may at best (8 × 512 and 96 × 128 tokens; Ivanov et
al. 2021, https://github.com/spcl/substation). Beyond our 4.31 and 11.03 ms of matrix products these are 2.9 to 3.1, 2.05
to 2.1 and 1.6 to 1.75 times our 1.57 and 2.52 ms of ideal traffic.
"""

LIBRARY_ATTENTION_RATIOS: Final[dict[AttentionLibrary, dict[Generation, float]]] = {
    AttentionLibrary.PYTORCH: {},
    AttentionLibrary.FLASH_ATTENTION_1: {"ampere": 0.38, "ampere_rtx": 0.38, "ada": 0.38, "hopper": 0.24},
    AttentionLibrary.CUDNN: {"hopper": 0.60},
}
"""`Efficiency.attention_ratio` of other libraries, where it differs from PyTorch's.

FlashAttention reaches 30 to 50 % of A100's peak forward and 25 to 35 % backward (Dao 2023, section 1), about 0.6 of
FlashAttention-2. On H100 cuDNN reaches 400 to 600 TFLOP/s where FlashAttention-2 reaches 320 to 370 (Shah et al. 2024,
figure 5, https://arxiv.org/abs/2407.08608).
"""

ATTENTION_BLOCK: Final = 128
"""Queries and keys of a block of fused attention; a causal mask saves whole blocks, those on the diagonal are computed."""

SELECTIVE_PRODUCTS_RATIO: Final = 0.37
"""Share of a layer's matrix products that torchtitan's selective recompute computes again: every second one, that is those
of the keys, the output and one half of the gate of a Llama (https://github.com/pytorch/torchtitan,
distributed/activation_checkpoint.py)."""

BACKWARD_ATTENTION_PRODUCTS: Final = 2.5
"""Ratio of backward to forward products in fused attention: five to two (Dao et al. 2022, algorithm 4)."""
