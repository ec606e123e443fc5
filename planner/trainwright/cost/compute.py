"""Seconds of single layers on one replica: computation from the profiles of its devices, and its collectives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from trainwright.cost.collectives import Collective
from trainwright.cost.setting import Setting
from trainwright.layer import LayerKind
from trainwright.plan import LayerRun


@dataclass(frozen=True, slots=True)
class LayerSeconds:
    """Seconds of one layer for one micro-batch: the slowest member of the tensor group.

    The backward includes the second forward of a layer that is recomputed, its all-reduces too.
    """

    forward_seconds: float
    forward_sync_seconds: float
    backward_seconds: float
    backward_sync_seconds: float

    @staticmethod
    def slowest(several: Iterable[LayerSeconds]) -> LayerSeconds:
        """Of replicas that go in step."""
        them = tuple(several)
        return LayerSeconds(
            max(one.forward_seconds for one in them),
            max(one.forward_sync_seconds for one in them),
            max(one.backward_seconds for one in them),
            max(one.backward_sync_seconds for one in them),
        )


def layer_seconds(  # noqa: PLR0913 - what a layer's time depends on
    kind: LayerKind,
    *,
    accelerators: Iterable[str],
    tensor: int,
    rows: int,
    recompute: bool,
    collective: Collective,
    setting: Setting,
) -> LayerSeconds:
    """One layer on one replica; `collective` is the all-reduce of its tensor group.

    Each device computes by its own profile and all wait for the slowest. A segment's boundary is summed when its
    forward ends, the gradient of its input when its backward ends.
    """
    costs = [setting.layer_cost(name, kind, tensor, rows) for name in accelerators]
    forward = max(cost.forward_seconds for cost in costs)
    backward = max(cost.backward_seconds for cost in costs)
    forward_sync, backward_sync = sync_seconds(kind, tensor, rows * setting.model.dtype.num_bytes, collective)
    if recompute:
        return LayerSeconds(forward, forward_sync, backward + forward, backward_sync + forward_sync)
    return LayerSeconds(forward, forward_sync, backward, backward_sync)


def sync_seconds(kind: LayerKind, tensor: int, unit_bytes: int, collective: Collective) -> tuple[float, float]:
    """Of a layer's forward and backward: all-reduces in its tensor group; so many bytes has one element of all rows."""
    forward = backward = 0.0
    if tensor > 1 and kind.is_tensor_parallel:
        for segment in kind.segments:
            forward += collective.seconds(unit_bytes * segment.forward_all_reduce_elements_per_row)
            backward += collective.seconds(unit_bytes * segment.backward_all_reduce_elements_per_row)
    return forward, backward


def update_seconds(accelerator: str, run: LayerRun, setting: Setting) -> tuple[float, int]:
    """Seconds of the optimizer for all layers of a run on one rank, as if nothing was sharded, and their values.

    Weights that several of the layers share count for each of them.
    """
    seconds, values = 0.0, 0
    for kind, number in setting.kind_counts(run.first, run.end):
        seconds += number * setting.layer_cost(accelerator, kind, run.tensor, min(run.rows)).update_seconds
        values += number * setting.values_at(kind, run.tensor)
    return seconds, values
