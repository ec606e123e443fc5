"""What memory tells of how many pipelines there can be: each holds the whole model's state, at least once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainwright.cost.memory import parameter_bytes
from trainwright.search.auto.bound.options import Array
from trainwright.search.protocol import Problem

_ROUNDING_BYTES = 16
_SAFE = 1 - 1e-6


def usable_bytes(problem: Problem, accelerators: Sequence[str]) -> Array:
    """[accelerator] bytes of a device that a plan decides on."""
    held = {one.name: one.memory_bytes for one in problem.setting.cluster.accelerators}
    room = np.array([held[name] for name in accelerators], dtype=np.float64)
    return np.maximum(room - problem.runtime.constant_bytes + _ROUNDING_BYTES, 1.0)


def copy_bytes(problem: Problem) -> float:
    """Of weights, gradients and optimizer state, on all devices of a pipeline together: replicas share out no more than one."""
    model = problem.model
    return model.parameters * parameter_bytes(model, problem.optimizer, problem.setting.gradient_dtype) * _SAFE


def may_be_several(problem: Problem) -> bool:
    """Whether two pipelines have rows, devices and memory."""
    devices = problem.devices
    if problem.global_batch_size == 1 or len(devices) == 1:
        return False
    names = [problem.cluster.node(device.node).accelerator for device in devices]
    return float(usable_bytes(problem, names).sum()) >= 2 * copy_bytes(problem)
