"""Strategies that Galvatron-BMW compares (§VII-A): one for all layers, or searched in a part of the space."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter

from trainwright.cluster import Device
from trainwright.cost.estimate import estimate_with_context
from trainwright.plan import LayerRun, Pipeline, Plan, Schedule, Stage
from trainwright.search import Candidate, Problem
from trainwright.strategy import Sharding, Strategy
from trainwright_papers.amp_settings import split_blocks_evenly
from trainwright_papers.galvatron_search import PartitionBalance, SearchSpace, best_plans
from trainwright_papers.galvatron_settings import BATCH_STEP, BatchSizeSearch

ONE_F_ONE_B = Schedule.ONE_FORWARD_ONE_BACKWARD
EXACT_ESTIMATES = 3
"""Number of fitting plans of a search, best by Eq. 8, that get an exact estimate."""
DOUBLING = BatchSizeSearch(growth=2, bisections=3)
QUADRUPLING = BatchSizeSearch(growth=4, bisections=2)
OCTUPLING = BatchSizeSearch(growth=8, bisections=2)
FROM_INCLUDED = BatchSizeSearch(growth=2, bisections=1)
"""Short search, for strategies that start from the batch size of a strategy that they include."""


@dataclass(frozen=True, slots=True)
class UniformStrategy:
    """One strategy for all layers, under GPipe.

    Attributes:
        degrees: pipeline, data and tensor degree for a number of devices.
        includes: strategies all of whose plans belong to this one.
    """

    degrees: Callable[[int], tuple[int, int, int]]
    sharding: Sharding = Sharding.NONE
    batch_sizes: BatchSizeSearch = DOUBLING
    includes: tuple[str, ...] = ()

    def min_batch(self, devices: int) -> int:
        """Return the smallest batch that gives each replica a row."""
        return max(BATCH_STEP, self.degrees(devices)[1])

    def best(self, problem: Problem) -> Candidate | None:
        """Return the candidate with the fastest number of micro-batches, or None if none fits."""
        return min(_fitting(problem, self.plans(problem)), key=_iteration_seconds, default=None)

    def plans(self, problem: Problem) -> Iterator[Plan]:
        """Yield a plan for each power of two of micro-batches; a single stage has one micro-batch."""
        batch = problem.global_batch_size
        pipeline, data, tensor = self.degrees(len(problem.devices))
        stage_ends = split_blocks_evenly(problem.model, pipeline)
        if stage_ends is None or problem.model.max_tensor_degree % tensor:
            return
        for power in range(batch.bit_length() if pipeline > 1 else 1):
            micro_batches = 2**power
            size, rest = divmod(batch, micro_batches)
            if rest or size % data:
                break
            run = LayerRun(0, 1, Strategy(tensor, data, sharding=self.sharding), (size // data,) * data)
            stages = _uniform_stages(run, problem.devices, stage_ends)
            yield Plan(len(problem.model.layers), batch, (Pipeline(micro_batches, size, stages),), Schedule.GPIPE)


@dataclass(frozen=True, slots=True)
class SearchedStrategy:
    """Strategies by layer, from Galvatron's search over a part of its space.

    Attributes:
        includes: strategies all of whose plans belong to this one.
    """

    space: SearchSpace
    batch_sizes: BatchSizeSearch
    includes: tuple[str, ...]

    def min_batch(self, _: int) -> int:
        """Return the smallest batch to try."""
        return BATCH_STEP

    def best(self, problem: Problem) -> Candidate | None:
        """Return the best exact candidate among the best by Eq. 8, or None if none fits."""
        fitting = _fitting(problem, best_plans(problem, self.space))
        return min(islice(fitting, EXACT_ESTIMATES), key=_iteration_seconds, default=None)


def _fitting(problem: Problem, plans: Iterable[Plan]) -> Iterator[Candidate]:
    candidates = (Candidate(plan, estimate_with_context(plan, problem.cost_context)) for plan in plans)
    return (candidate for candidate in candidates if candidate.estimate.feasible)


_iteration_seconds = attrgetter("estimate.iteration_seconds")


def _uniform_stages(like: LayerRun, devices: tuple[Device, ...], stage_ends: tuple[int, ...]) -> tuple[Stage, ...]:
    """Return stages with these ends, whose layers all run like `like`."""
    size = len(devices) // len(stage_ends)
    groups = (devices[first : first + size] for first in range(0, len(devices), size))
    return tuple(
        Stage(
            group,
            (
                LayerRun(
                    first,
                    end - first,
                    Strategy(like.strategy.tensor, like.strategy.data, sharding=like.strategy.sharding),
                    like.rows,
                ),
            ),
        )
        for group, first, end in zip(groups, (0, *stage_ends), stage_ends, strict=False)
    )


def _deepspeed_3d(devices: int) -> tuple[int, int, int]:
    """Return DeepSpeed's example degrees: 2 × 2 × 2 on 8 devices, 2 × 4 × 2 on 16, 4 × 4 × 4 on 64."""
    side = 2 if devices < 64 else 4
    return side, devices // side**2, side


def is_without_checkpointing(run: LayerRun) -> bool:
    """Return whether activations are stored (no CKPT)."""
    return not run.strategy.recompute


def _is_data_or_tensor(run: LayerRun) -> bool:
    return not run.strategy.recompute and run.strategy.sharding is Sharding.NONE


def _is_data(run: LayerRun) -> bool:
    return _is_data_or_tensor(run) and run.strategy.tensor == 1


def _is_any(_: LayerRun) -> bool:
    return True


DP, TP, PP, SDP = "PyTorch DDP (DP)", "Megatron (TP)", "PyTorch GPipe (PP)", "FSDP/ZeRO-3 (SDP)"
DEEPSPEED, GALVATRON, BASE, BMW = "DeepSpeed 3D", "Galvatron", "Galvatron-Base", "Galvatron-BMW"
DP_TP, DP_PP, BI_OBJECTIVE = "Galvatron (DP+TP)", "Galvatron (DP+PP)", "Galvatron (1F1B+Bi-obj)"

STRATEGIES: Mapping[str, UniformStrategy | SearchedStrategy] = {
    DP: UniformStrategy(lambda devices: (1, devices, 1)),
    TP: UniformStrategy(lambda devices: (1, 1, devices)),
    PP: UniformStrategy(lambda devices: (devices, 1, 1)),
    SDP: UniformStrategy(lambda devices: (1, devices, 1), Sharding.ZERO3),
    DEEPSPEED: UniformStrategy(_deepspeed_3d),
    DP_TP: SearchedStrategy(SearchSpace(_is_data_or_tensor, max_pipeline=1), QUADRUPLING, (DP, TP)),
    DP_PP: SearchedStrategy(SearchSpace(_is_data), QUADRUPLING, (DP, PP)),
    GALVATRON: SearchedStrategy(SearchSpace(is_without_checkpointing), QUADRUPLING, (SDP, DEEPSPEED, DP_TP, DP_PP)),
    BI_OBJECTIVE: SearchedStrategy(
        SearchSpace(is_without_checkpointing, PartitionBalance.BOTH, ONE_F_ONE_B), FROM_INCLUDED, (GALVATRON,)
    ),
    BASE: SearchedStrategy(SearchSpace(_is_any), OCTUPLING, (GALVATRON,)),
    BMW: SearchedStrategy(
        SearchSpace(_is_any, PartitionBalance.BOTH, ONE_F_ONE_B), FROM_INCLUDED, (BI_OBJECTIVE, BASE)
    ),
}
"""Strategies by their names in the paper's tables, each after those that it includes."""
