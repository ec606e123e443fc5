"""What training costs, where the cluster names prices."""

from __future__ import annotations

from trainwright.cluster import Cluster
from trainwright.plan import Plan


def cost_per_sample(plan: Plan, iteration_seconds: float, cluster: Cluster) -> float | None:
    """Price of one row in the cluster's currency: of every device that the plan uses; None where one has no price."""
    prices = [cluster.accelerator_of(device).price_per_hour for device in plan.devices]
    known = [price for price in prices if price is not None]
    if len(known) < len(prices):
        return None
    return sum(known) / 3600 * iteration_seconds / plan.global_batch_size
