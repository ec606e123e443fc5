"""What devices cost, where the best plan is the cheapest."""

from __future__ import annotations

from dataclasses import replace

from trainwright.cluster import Cluster
from trainwright.plan import Plan
from trainwright_operator.api.spec import DevicesSpec, Objective
from trainwright_operator.flow.book import Book, Failed
from trainwright_operator.flow.discovery import Discovery
from trainwright_operator.flow.reasons import Reason, message


def check_prices(book: Book, discovery: Discovery) -> None:
    """Raises Failed where cost is the objective and the price of an accelerator that was found is not known."""
    prices = book.spec.devices.prices_per_hour
    unknown = [accelerator.name for accelerator in discovery.accelerators if accelerator.name not in prices]
    if book.spec.search.objective is Objective.COST and unknown:
        what = (
            f"search.objective is Cost, but devices.pricesPerHour has no price of {', '.join(unknown)}; create a plan "
            "that gives it, or leaves these out by devices.products"
        )
        raise Failed(Reason.SPEC_INVALID, message(Reason.SPEC_INVALID, what=what))


def with_prices(cluster: Cluster, devices: DevicesSpec) -> Cluster:
    """The cluster, with the prices that are given."""
    if not devices.prices_per_hour:
        return cluster
    priced = tuple(
        replace(accelerator, price_per_hour=devices.prices_per_hour.get(accelerator.name))
        for accelerator in cluster.accelerators
    )
    return replace(cluster, accelerators=priced)


def price_per_sample(plan: Plan, seconds: float, discovery: Discovery, devices: DevicesSpec) -> float | None:
    """Price of training on one row where an iteration takes so long; None where a price is not known."""
    accelerators = {node.name: node.accelerator for node in discovery.nodes}
    prices = [devices.prices_per_hour.get(accelerators[device.node]) for device in plan.devices]
    known = [price for price in prices if price is not None]
    if len(known) < len(prices):
        return None
    return sum(known) / 3600 * seconds / plan.global_batch_size
