"""Messages in which replicas reduce gradients and gather weights; each takes the latency of its whole ring."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np

from trainwright.cost.layer_sums import Array
from trainwright.layer import LayerKind
from trainwright.plan import LayerRun
from trainwright.runtime import Messages, Runtime

if TYPE_CHECKING:
    from trainwright.cost.context import CostContext

Numbers = TypeVar("Numbers", float, Array)


def message_count(num_bytes: Numbers, tensors: Numbers, runtime: Runtime) -> Numbers | float:
    """Return the messages that carry `num_bytes` of `tensors` tensors; below 1 for layers that share a bucket."""
    if runtime.messages is Messages.TENSOR:
        return tensors
    return num_bytes / runtime.bucket_bytes if runtime.messages is Messages.BUCKET else 1.0


def stage_messages(values: Array, num_bytes: Array, context: CostContext) -> Array | float:
    """Return the messages of stages with `values` parameters, in tensors of the model's mean size."""
    if context.runtime.messages is Messages.ALL:
        return 1.0
    layers = len(context.model.layers)
    parameters = sum(count * kind.parameters for kind, count in context.kind_counts(0, layers))
    tensors = values * (weight_tensors(context, 0, layers) / max(parameters, 1))
    at_least_one: Array = np.maximum(message_count(num_bytes, tensors, context.runtime), 1.0)
    return at_least_one


def weight_tensors(context: CostContext, first: int, end: int) -> int:
    """Return the tensors that hold the parameters of the layers `first … end - 1`."""
    return sum(count * kind.weight_tensors for kind, count in context.kind_counts(first, end))


def run_messages(run: LayerRun, num_bytes: float, context: CostContext) -> float:
    """Return the messages that carry `num_bytes` of a run's parameters after the last backward."""
    tensors = float(weight_tensors(context, run.first, run.end))
    return max(message_count(num_bytes, tensors, context.runtime), 1.0)


def gather_messages(kind: LayerKind, runtime: Runtime) -> int:
    """Return the messages in which a layer's sharded weights are gathered for a pass."""
    return max(kind.weight_modules, 1) if runtime.gathers_by_module else 1
