"""The strategies that Galvatron-BMW compares (§VII-A): one strategy for all layers, and searches over parts of the space."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter

from trainwright.bench.assignments import even_blocks
from trainwright.bench.batch_sizes import STEP, Climb
from trainwright.bench.galvatron_search import Balance, Part, best_plans
from trainwright.cluster import Device
from trainwright.cost.estimate import estimate_in
from trainwright.plan import LayerRun, Pipeline, Plan, Schedule, Sharding, Stage
from trainwright.search import Candidate, Problem

ONE_F_ONE_B = Schedule.ONE_FORWARD_ONE_BACKWARD
COSTED = 3
"""How many of a search's plans that fit, those best by Eq. 8, are costed exactly."""
DOUBLING, QUADRUPLING, WIDE = Climb(factor=2, halvings=3), Climb(factor=4, halvings=2), Climb(factor=8, halvings=2)
BEYOND = Climb(factor=2, halvings=1)
"""From the batch of a smaller part of the space on."""


@dataclass(frozen=True, slots=True)
class Uniform:
    """One strategy for all layers, under GPipe.

    Attributes:
        degrees: pipeline, data and tensor degree by the number of devices.
        includes: strategies whose plans are plans of this one, too.
    """

    degrees: Callable[[int], tuple[int, int, int]]
    sharding: Sharding = Sharding.NONE
    climb: Climb = DOUBLING
    includes: tuple[str, ...] = ()

    def least_batch(self, devices: int) -> int:
        """The smallest batch that gives every replica a row."""
        return max(STEP, self.degrees(devices)[1])

    def best(self, problem: Problem) -> Candidate | None:
        """The fastest number of micro-batches that fits; None where none does."""
        return min(_fitting(problem, self.plans(problem)), key=_seconds, default=None)

    def plans(self, problem: Problem) -> Iterator[Plan]:
        """A plan for every number of micro-batches in powers of two; a single stage takes the batch in one."""
        batch = problem.global_batch_size
        pipeline, data, tensor = self.degrees(len(problem.devices))
        ends = even_blocks(problem.model, pipeline)
        if ends is None or problem.model.max_tensor_degree % tensor:
            return
        for power in range(batch.bit_length() if pipeline > 1 else 1):
            micro_batches = 2**power
            size, rest = divmod(batch, micro_batches)
            if rest or size % data:
                break
            run = LayerRun(0, 1, tensor, data, (size // data,) * data, sharding=self.sharding)
            stages = _stages(run, problem.devices, ends)
            yield Plan(len(problem.model.layers), batch, (Pipeline(micro_batches, size, stages),), Schedule.GPIPE)


@dataclass(frozen=True, slots=True)
class Searched:
    """Galvatron's search over a part of its space.

    Attributes:
        includes: strategies whose plans are plans of this one, too.
    """

    part: Part
    climb: Climb
    includes: tuple[str, ...]

    def least_batch(self, _: int) -> int:
        """The smallest batch that is tried."""
        return STEP

    def best(self, problem: Problem) -> Candidate | None:
        """The best plan by the exact model among the best by Eq. 8; None where none fits."""
        fitting = _fitting(problem, best_plans(problem, self.part))
        return min(islice(fitting, COSTED), key=_seconds, default=None)


def _fitting(problem: Problem, plans: Iterable[Plan]) -> Iterator[Candidate]:
    costed = (Candidate(plan, estimate_in(plan, problem.setting)) for plan in plans)
    return (candidate for candidate in costed if candidate.estimate.feasible)


_seconds = attrgetter("estimate.iteration_seconds")


def _stages(like: LayerRun, devices: tuple[Device, ...], ends: tuple[int, ...]) -> tuple[Stage, ...]:
    """Stages with these ends, all of whose layers are run alike."""
    size = len(devices) // len(ends)
    groups = (devices[first : first + size] for first in range(0, len(devices), size))
    return tuple(
        Stage(group, (LayerRun(first, end - first, like.tensor, like.data, like.rows, sharding=like.sharding),))
        for group, first, end in zip(groups, (0, *ends), ends, strict=False)
    )


def _cube(devices: int) -> tuple[int, int, int]:
    """DeepSpeed's example: 2 × 2 × 2 on eight devices, 4 × 4 × 4 on 64; on 16 the data degree is doubled."""
    side = 2 if devices < 64 else 4
    return side, devices // side**2, side


def plain(run: LayerRun) -> bool:
    """Without CKPT."""
    return not run.recompute


def _data_and_tensor(run: LayerRun) -> bool:
    return not run.recompute and run.sharding is Sharding.NONE


def _data(run: LayerRun) -> bool:
    return _data_and_tensor(run) and run.tensor == 1


def _anything(_: LayerRun) -> bool:
    return True


DP, TP, PP, SDP = "PyTorch DDP (DP)", "Megatron (TP)", "PyTorch GPipe (PP)", "FSDP/ZeRO-3 (SDP)"
DEEPSPEED, GALVATRON, BASE, BMW = "DeepSpeed 3D", "Galvatron", "Galvatron-Base", "Galvatron-BMW"
DP_TP, DP_PP, BI_OBJECTIVE = "Galvatron (DP+TP)", "Galvatron (DP+PP)", "Galvatron (1F1B+Bi-obj)"

STRATEGIES: Mapping[str, Uniform | Searched] = {
    DP: Uniform(lambda devices: (1, devices, 1)),
    TP: Uniform(lambda devices: (1, 1, devices)),
    PP: Uniform(lambda devices: (devices, 1, 1)),
    SDP: Uniform(lambda devices: (1, devices, 1), Sharding.ZERO3),
    DEEPSPEED: Uniform(_cube),
    DP_TP: Searched(Part(_data_and_tensor, max_pipeline=1), QUADRUPLING, (DP, TP)),
    DP_PP: Searched(Part(_data), QUADRUPLING, (DP, PP)),
    GALVATRON: Searched(Part(plain), QUADRUPLING, (SDP, DEEPSPEED, DP_TP, DP_PP)),
    BI_OBJECTIVE: Searched(Part(plain, Balance.BOTH, ONE_F_ONE_B), BEYOND, (GALVATRON,)),
    BASE: Searched(Part(_anything), WIDE, (GALVATRON,)),
    BMW: Searched(Part(_anything, Balance.BOTH, ONE_F_ONE_B), BEYOND, (BI_OBJECTIVE, BASE)),
}
"""By the names that the paper's tables give them, those that include others behind them."""
