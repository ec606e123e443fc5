"""Budget of a search: how fine its dynamic program is, by number of devices."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Resolution:
    """Resolution of the DP: blocks per line, cuts between layers, orders of node kinds."""

    blocks: int
    layer_cuts: int
    kind_orders: int


@dataclass(frozen=True, slots=True)
class SearchBudget:
    """Effort of the DP.

    Attributes:
        max_tensor_degree: largest tensor group that may span nodes.
        patience: consecutive worse micro-batch sizes after which a line is left.
        reuses_best_sizes: lines after the first search only sizes near the best size of the first.
        refined_choices: number of best coarse (line, size) pairs that are searched finely.
        shared_end_lines: number of lines with one node split over both ends.
        striped_lines: number of lines whose stages take few devices each of many nodes, where links inside nodes are slow.
        starts_with_smallest: search micro-batch sizes from the smallest instead of the middle.
    """

    coarse: Resolution
    fine: tuple[Resolution, ...]
    max_tensor_degree: int
    patience: int
    reuses_best_sizes: bool
    refined_choices: int
    shared_end_lines: int
    striped_lines: int = 0
    starts_with_smallest: bool = False


SMALL_CLUSTER = SearchBudget(
    Resolution(16, 13, 24),
    (Resolution(16, 28, 24),),
    8,
    100,
    reuses_best_sizes=False,
    refined_choices=8,
    shared_end_lines=24,
    striped_lines=1,
)
MEDIUM_CLUSTER = SearchBudget(
    Resolution(12, 13, 6),
    (Resolution(24, 32, 6), Resolution(12, 32, 6)),
    0,
    2,
    reuses_best_sizes=False,
    refined_choices=3,
    shared_end_lines=6,
    striped_lines=1,
)
LARGE_CLUSTER = SearchBudget(
    Resolution(12, 13, 2),
    (Resolution(24, 28, 2),),
    0,
    1,
    reuses_best_sizes=True,
    refined_choices=3,
    shared_end_lines=1,
    striped_lines=1,
)
MANY_STAGES = SearchBudget(
    Resolution(32, 24, 4),
    (Resolution(32, 44, 4),),
    8,
    1,
    reuses_best_sizes=False,
    refined_choices=2,
    shared_end_lines=4,
    striped_lines=1,
    starts_with_smallest=True,
)
LARGE_TENSOR_GROUPS = replace(MANY_STAGES, max_tensor_degree=64)
"""For models whose layers are too large for the tensor groups of `MANY_STAGES`."""
SUBCLUSTER = SearchBudget(
    Resolution(16, 13, 2), (Resolution(16, 28, 2),), 0, 2, reuses_best_sizes=True, refined_choices=2, shared_end_lines=2
)
LARGE_SUBCLUSTER = SearchBudget(
    Resolution(16, 13, 2), (Resolution(24, 28, 2),), 0, 1, reuses_best_sizes=True, refined_choices=2, shared_end_lines=1
)
SMALL_CLUSTER_DEVICES, MEDIUM_CLUSTER_DEVICES = 16, 64
"""Maximum devices of `SMALL_CLUSTER` and of `MEDIUM_CLUSTER`."""
MANY_STAGES_DEVICES = 6
"""Devices filled by the model's state from which `MANY_STAGES` applies: coarse blocks would allow too few stages."""
