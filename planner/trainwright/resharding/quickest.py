"""Fastest delivery of a resharding, and its seconds."""

from __future__ import annotations

from trainwright.cost.network import Network
from trainwright.resharding.deliveries import Deliveries
from trainwright.resharding.messages import Delivery, MessagePlan
from trainwright.resharding.sharded import ShardedTensor


def message_plan(
    source: ShardedTensor,
    target: ShardedTensor,
    fabric: Network,
    bytes_per_element: int,
    delivery: Delivery | None = None,
) -> MessagePlan:
    """Return the messages that reshard a tensor from `source` to `target`.

    Without a `delivery` the fastest is used, the simplest of equally fast ones. Raises ValueError if the shapes differ
    or the cluster lacks a link that is needed.
    """
    deliveries = Deliveries(source, target, fabric, bytes_per_element)
    if delivery is not None:
        return deliveries.plan(delivery)
    return min(deliveries.plans(), key=lambda plan: plan.seconds(fabric))


def resharding_seconds(source: ShardedTensor, target: ShardedTensor, fabric: Network, bytes_per_element: int) -> float:
    """Return seconds of the fastest delivery from one sharding to another, while nothing else runs (Alpa §6).

    The activation of a boundary takes `resharding_seconds(source, target)`. Its gradient has the same shape and lies on
    the target's devices as the activation does there, reduced already: the stage's own backward reduces it over the
    tensor group (Megatron's all-reduce, or a reduce-scatter), so that replicas of a tile are equal. The way back
    reduces nothing and takes `resharding_seconds(target, source)`.
    """
    return message_plan(source, target, fabric, bytes_per_element).seconds(fabric)
