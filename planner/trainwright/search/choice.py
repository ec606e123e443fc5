"""What searches share: which degrees are open, ranking, and why nothing fits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from trainwright.cost.estimate import estimate_in, lacking_memory, memory_by_device
from trainwright.plan import Plan
from trainwright.search.degrees import Degrees, enumerate_degrees, profiled, tensor_degrees
from trainwright.search.protocol import Candidate, NoFeasiblePlan, Problem


def accelerators_of(problem: Problem) -> tuple[str, ...]:
    """Names of the accelerators that the nodes carry."""
    return tuple(dict.fromkeys(problem.cluster.accelerator_of(device).name for device in problem.devices))


def check_profiled(problem: Problem) -> None:
    """Raises ValueError naming the first layer kind that was not profiled at degree 1 on some accelerator."""
    for accelerator in accelerators_of(problem):
        for kind in problem.model.kinds:
            if 1 not in problem.profiles.tensor_degrees(accelerator, kind.name):
                problem.profiles.cost(accelerator, kind.name, 1, 1)


def degrees_of(problem: Problem, *, max_pipeline: int, max_tensor: int | None = None) -> Iterator[Degrees]:
    """Every (pipeline, data, tensor) over all devices whose tensor degree was profiled on every accelerator."""
    devices = len(problem.devices)
    limit = min(problem.limits.max_tensor_degree or devices, max_tensor or devices)
    tensors = tuple(
        degree
        for degree in tensor_degrees(problem.model, devices, limit)
        if profiled(problem.model, problem.profiles, accelerators_of(problem), degree)
    )
    return enumerate_degrees(devices, tensors, max_pipeline)


def lack_of(problem: Problem, plan: Plan) -> tuple[int, str | None]:
    """Bytes that the plan lacks on the device that is shortest, and the same in words; (<= 0, None) where it fits."""
    held = memory_by_device(plan, problem.setting)
    lack = max(size - problem.cluster.accelerator_of(device).memory_bytes for device, size in held)
    return lack, lacking_memory(held, problem.setting)


def rank(problem: Problem, plans: Iterable[Plan]) -> list[Candidate]:
    """Feasible candidates without repetition, fastest first; equally fast ones by memory."""
    candidates = [Candidate(plan, estimate_in(plan, problem.setting)) for plan in dict.fromkeys(plans)]
    return sorted(
        (candidate for candidate in candidates if candidate.estimate.feasible),
        key=lambda candidate: (candidate.estimate.iteration_seconds, candidate.estimate.peak_memory_bytes),
    )


def why_nothing_fits(problem: Problem, plans: Iterable[Plan]) -> NoFeasiblePlan:
    """The refusal, with the plan that comes closest to fitting."""
    closest: tuple[int, str, str | None] | None = None
    for plan in plans:
        lack, reason = lack_of(problem, plan)
        if closest is None or lack < closest[0]:
            closest = (lack, plan.summary(), reason)
    if closest is None:
        return NoFeasiblePlan(
            f"no plan uses all {len(problem.devices)} devices with {len(problem.model.layers)} layers, a global "
            f"batch of {problem.global_batch_size} rows and the profiled tensor degrees; change the batch size or the "
            "number of devices"
        )
    return NoFeasiblePlan(f"no plan fits into memory; the closest is {closest[1]}, and there {closest[2]}")
