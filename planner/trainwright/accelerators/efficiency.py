"""Achievable shares of data-sheet rates that are alike on all accelerators; `data_sheets.yaml` has those of a generation.

Every number is an assumption about hardware and libraries. They follow public experience with streaming kernels (75-90 % of
the bandwidth). None is fitted to one device. STREAMING_RATIOS were chosen in view of times of a BERT layer on V100, so these
do not test them independently. `Runtime.host_seconds_per_operator` and BACKWARD_HOST_RATIO are of hosts with an H200 and an
H100.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from trainwright.runtime import Kernels

KERNEL_SECONDS: Final = 5e-6
"""Minimum time of one operator on the device: launch, filling and draining the multiprocessors."""

CALLS_PER_OPERATOR: Final = 3
"""Calls of the host that an operator of a family stands for on average, in `host_seconds_per_operator`."""

BACKWARD_HOST_RATIO: Final = 2.2
"""Host time to issue a layer's backward over that of its forward: a product becomes two, and gradients accumulate.

Eager blocks of GPT-2, BERT and Llama that the host alone bounds took 0.60 and 1.30, 0.46 and 1.28, 0.80 and 1.85 ms in
our worker beside one H200, and torch's own encoder layer 0.63 and 1.55 ms: 2.2 to 2.8 times as long.
"""

BACKWARD_KERNEL_RATIO: Final = 0.68
"""Host time of a kernel of the backward, which autograd issues, over that of an operator of the forward, which Python calls.

The 1.30 ms of that block of GPT-2 are of 32 kernels, at 60 µs an operator of the forward.
"""

MEMORY_RATIO: Final = 0.80
"""Share of the memory bandwidth that streaming kernels reach."""


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

ATTENTION_BLOCK: Final = 128
"""Queries and keys of a block of fused attention; a causal mask saves whole blocks, those on the diagonal are computed."""

SELECTIVE_PRODUCTS_RATIO: Final = 0.37
"""Share of a layer's matrix products that torchtitan's selective recompute computes again: every second one, that is those
of the keys, the output and one half of the gate of a Llama (https://github.com/pytorch/torchtitan,
distributed/activation_checkpoint.py)."""

BACKWARD_ATTENTION_PRODUCTS: Final = 2.5
"""Ratio of backward to forward products in fused attention: five to two (Dao et al. 2022, algorithm 4)."""
