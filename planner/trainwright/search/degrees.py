"""Parallel degrees and micro-batch sizes to choose from, and the layer profiles that they require."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainwright.cluster import Node
from trainwright.model import Model, least_rows
from trainwright.plan import divisors
from trainwright.profiles import Profiles
from trainwright.search.problem import Problem
from trainwright.strategy import Strategy


@dataclass(frozen=True, slots=True, order=True)
class Degrees:
    """AMP's (pp, dp, tmp); their product is the number of devices."""

    pipeline: int
    data: int
    tensor: int

    @property
    def strategy(self) -> Strategy:
        """Strategy of each stage."""
        return Strategy(self.tensor, self.data)


def tensor_degrees(model: Model, devices: int, max_tensor_degree: int | None) -> tuple[int, ...]:
    """Return the tensor degrees that divide both the devices and the model (its heads), ascending.

    Degrees above a node's number of devices are included: they are slow but valid.
    """
    limit = min(model.max_tensor_degree, max_tensor_degree or devices)
    return tuple(d for d in divisors(devices) if d <= limit and model.max_tensor_degree % d == 0)


def is_profiled(model: Model, profiles: Profiles, accelerators: tuple[str, ...], tensor: int) -> bool:
    """Return whether every layer kind has a profile on every accelerator at the degree that it needs."""
    return all(
        profiles.has(accelerator, kind.name, tensor)
        or (not kind.is_tensor_parallel and profiles.has(accelerator, kind.name, 1))
        for kind in model.kinds
        for accelerator in accelerators
    )


def is_open(problem: Problem, strategy: Strategy, accelerators: tuple[str, ...]) -> bool:
    """Return whether the degrees of a strategy are within the limits, divide the model and are profiled."""
    return (
        problem.limits.allows(strategy)
        and strategy.indivisible_degree(problem.model.max_tensor_degree) is None
        and is_profiled(problem.model, problem.profiles, accelerators, strategy.tensor)
    )


def open_strategies(problem: Problem, devices: int, accelerators: tuple[str, ...]) -> tuple[Strategy, ...]:
    """Return the open degrees of a stage on a number of devices of these accelerators, by ascending tensor degree."""
    every = (Strategy(tensor, devices // tensor) for tensor in divisors(devices))
    return tuple(strategy for strategy in every if is_open(problem, strategy, accelerators))


def enumerate_degrees(devices: int, tensors: tuple[int, ...], max_pipeline: int) -> Iterator[Degrees]:
    """Yield every (pipeline, data, tensor) whose product is the number of devices (Algorithm 1, enumerate_degrees)."""
    for tensor in tensors:
        for pipeline in divisors(devices // tensor):
            if pipeline <= max_pipeline:
                yield Degrees(pipeline, devices // tensor // pipeline, tensor)


def micro_batch_sizes(global_batch_size: int, data: int) -> tuple[int, ...]:
    """Return the rows that one replica may take at a time (AMP's mbs): the divisors of its share of the batch, often none."""
    return divisors(global_batch_size // data) if global_batch_size % data == 0 else ()


MAX_PROFILED_ROWS = 8
"""Rows beyond which a device is saturated: profiles are extrapolated along their last segment."""
MAX_TENSOR_GROUP_DEVICES = 8
"""Maximum tensor degree across nodes of a stage that does not use all devices."""


@dataclass(frozen=True, slots=True)
class RequiredProfile:
    """Profiling run: all layer kinds on one accelerator at one tensor degree, for each number of rows."""

    accelerator: str
    tensor_degree: int
    rows: tuple[int, ...]


def required_profiles(
    nodes: Sequence[Node], model: Model, global_batch_size: int, max_tensor_degree: int | None = None
) -> tuple[RequiredProfile, ...]:
    """Return every accelerator with every tensor degree that a plan on these nodes may use, in the nodes' order.

    Rows are those that one replica may take at a time, doubled from the least, up to MAX_PROFILED_ROWS, or twice the least.
    """
    least = least_rows(model, global_batch_size)
    most = min(max(MAX_PROFILED_ROWS, 2 * least), global_batch_size)
    rows = tuple(least * 2**power for power in range(MAX_PROFILED_ROWS.bit_length()) if least * 2**power <= most)
    degrees = _degrees(nodes, model, max_tensor_degree)
    return tuple(
        RequiredProfile(accelerator, tensor, rows)
        for accelerator in dict.fromkeys(node.accelerator for node in nodes)
        for tensor in degrees
    )


def _degrees(nodes: Sequence[Node], model: Model, max_tensor_degree: int | None) -> tuple[int, ...]:
    """Return the tensor degrees of uniform plans, which divide all devices, and of stages on some of the devices.

    Such a stage has a power of two of devices, or all devices of a node.
    """
    devices = sum(node.devices for node in nodes)
    widest = max(min(MAX_TENSOR_GROUP_DEVICES, devices), *(node.devices for node in nodes))
    powers = (2**power for power in range(widest.bit_length()) if 2**power <= widest)
    sizes = {devices, *(node.devices for node in nodes), *powers}
    return tuple(sorted({degree for size in sizes for degree in tensor_degrees(model, size, max_tensor_degree)}))
