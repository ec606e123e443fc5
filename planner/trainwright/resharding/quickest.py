"""The quickest way to reshard, and its seconds."""

from __future__ import annotations

from trainwright.cost.fabric import Fabric
from trainwright.resharding.deliveries import Deliveries
from trainwright.resharding.messages import Delivery, MessagePlan
from trainwright.resharding.sharded import Sharded


def message_plan(
    source: Sharded, target: Sharded, fabric: Fabric, bytes_per_element: int, delivery: Delivery | None = None
) -> MessagePlan:
    """Who sends which slice to whom, so that a tensor that lies as `source` lies as `target` too.

    `delivery` says how slices reach replicas; where none is given it is the quickest, of equally quick ones the simplest.
    Raises ValueError where the shapes differ or the cluster lacks a link that is needed.
    """
    deliveries = Deliveries(source, target, fabric, bytes_per_element)
    if delivery is not None:
        return deliveries.plan(delivery)
    return min(deliveries.plans(), key=lambda plan: plan.seconds(fabric))


def resharding_seconds(source: Sharded, target: Sharded, fabric: Fabric, bytes_per_element: int) -> float:
    """Seconds of the quickest delivery of a tensor from one sharding to another, while nothing else runs (Alpa §6).

    One direction: the activation of a boundary is `resharding_seconds(source, target)`. Its gradient has the same shape
    and lies on the target's devices as the activation does there, summed already: replicas of a tile hold the same sum,
    because the stage's own backward sums what its devices add (Megatron's all-reduce, or a reduce-scatter). So nothing is
    summed on the way back, and it takes `resharding_seconds(target, source)`.
    """
    return message_plan(source, target, fabric, bytes_per_element).seconds(fabric)
