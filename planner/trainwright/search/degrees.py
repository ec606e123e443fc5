"""Which degrees and micro-batch sizes there are to choose from."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from trainwright.model import Model
from trainwright.profiles import Profiles


@dataclass(frozen=True, slots=True, order=True)
class Degrees:
    """AMP's (pp, dp, tmp); their product is the number of devices."""

    pipeline: int
    data: int
    tensor: int


def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def tensor_degrees(model: Model, devices: int, max_tensor_degree: int | None) -> tuple[int, ...]:
    """Tensor degrees that divide the devices and the model (its heads), ascending.

    Plans at a higher degree than a node has devices are slow but valid; the cost model says how slow.
    """
    limit = min(model.max_tensor_degree, max_tensor_degree or devices)
    return tuple(d for d in divisors(devices) if d <= limit and model.max_tensor_degree % d == 0)


def profiled(model: Model, profiles: Profiles, accelerators: tuple[str, ...], tensor: int) -> bool:
    """Whether every layer kind was profiled on every accelerator at what this tensor degree needs."""
    return all(
        (tensor if kind.is_tensor_parallel else 1) in profiles.tensor_degrees(accelerator, kind.name)
        for kind in model.kinds
        for accelerator in accelerators
    )


def enumerate_degrees(devices: int, tensors: tuple[int, ...], max_pipeline: int) -> Iterator[Degrees]:
    """Every (pipeline, data, tensor) whose product is the number of devices (Algorithm 1, enumerate_degrees)."""
    for tensor in tensors:
        for pipeline in divisors(devices // tensor):
            if pipeline <= max_pipeline:
                yield Degrees(pipeline, devices // tensor // pipeline, tensor)


def micro_batch_sizes(global_batch_size: int, data: int) -> tuple[int, ...]:
    """Rows that one replica may take at a time (AMP's mbs): every divisor of its share of the batch; often none."""
    return divisors(global_batch_size // data) if global_batch_size % data == 0 else ()
