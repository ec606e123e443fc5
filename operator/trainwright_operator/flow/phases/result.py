"""Phase `Succeeded`: the winner with its speed-up over the baseline and its price."""

from __future__ import annotations

from dataclasses import replace

from trainwright import documents
from trainwright.cluster import Cluster
from trainwright.plan import Plan
from trainwright_operator.api.conditions import ConditionType
from trainwright_operator.api.spec import DevicesSpec, Objective
from trainwright_operator.api.status import Winner
from trainwright_operator.flow.phases.discovery import DiscoveredDevices
from trainwright_operator.flow.reasons import Reason, message
from trainwright_operator.flow.status_update import Book, PhaseFailed
from trainwright_operator.flow.trials.planned_trials import PlannedTrial, PlannedTrials, Role
from trainwright_operator.flow.trials.trial_status import TriedPlan


def check_prices(book: Book, discovery: DiscoveredDevices) -> None:
    """Raise PhaseFailed where cost is the objective and the price of a discovered accelerator is unknown."""
    prices = book.spec.devices.prices_per_hour
    unknown = [accelerator.name for accelerator in discovery.accelerators if accelerator.name not in prices]
    if book.spec.search.objective is Objective.COST and unknown:
        what = (
            f"search.objective is Cost, but devices.pricesPerHour has no price of {', '.join(unknown)}; create a plan "
            "that gives it, or leaves these out by devices.products"
        )
        raise PhaseFailed(Reason.SPEC_INVALID, message(Reason.SPEC_INVALID, what=what))


def with_prices(cluster: Cluster, devices: DevicesSpec) -> Cluster:
    """Return the cluster with the spec's prices."""
    if not devices.prices_per_hour:
        return cluster
    priced = tuple(
        replace(accelerator, price_per_hour=devices.prices_per_hour.get(accelerator.name))
        for accelerator in cluster.accelerators
    )
    return replace(cluster, accelerators=priced)


def price_per_sample(plan: Plan, seconds: float, discovery: DiscoveredDevices, devices: DevicesSpec) -> float | None:
    """Return the price of training on one row, given seconds per iteration, or None where a price is unknown."""
    accelerators = {node.name: node.accelerator for node in discovery.nodes}
    prices = [devices.prices_per_hour.get(accelerators[device.node]) for device in plan.devices]
    known = [price for price in prices if price is not None]
    if len(known) < len(prices):
        return None
    return sum(known) / 3600 * seconds / plan.global_batch_size


def select_predicted_winner(book: Book, discovery: DiscoveredDevices, planned: PlannedTrials) -> None:
    """Select the planner's first candidate without trials or measured values."""
    best = planned.best
    book.fields["winner"] = _winner(book, discovery, best)
    for condition in (ConditionType.TRIALS_COMPLETED, ConditionType.SUCCEEDED):
        book.say(condition, "True", Reason.PLANNED_ONLY, best=best.predicted_seconds)


def select_measured_winner(book: Book, discovery: DiscoveredDevices, tried: tuple[TriedPlan, ...]) -> None:
    """Select the fastest measured plan (the cheapest where cost is the objective), candidates and baselines alike."""
    measured = [(plan.seconds, plan.planned) for plan in tried if plan.seconds is not None]
    is_cost = book.spec.search.objective is Objective.COST

    def worth(pair: tuple[float, PlannedTrial]) -> tuple[float, int]:
        seconds, plan = pair
        price = _price(book, discovery, plan, seconds) if is_cost else None
        return (seconds if price is None else price), plan.overall_rank

    seconds, winner = min(measured, key=worth)
    baselines = [took for took, plan in measured if plan.role is Role.BASELINE or plan.counts_as_baseline]
    speedup = min(baselines) / seconds if baselines else None
    price = _price(book, discovery, winner, seconds)
    book.fields["winner"] = _winner(book, discovery, winner, seconds=seconds, speedup=speedup)
    book.say(
        ConditionType.SUCCEEDED,
        "True",
        Reason.BEST_TRIAL_SELECTED,
        trial=winner.name,
        seconds=seconds,
        price=f", {price:.4g} a sample" if price is not None else "",
        speedup=f", {speedup:.2f} × as fast as the baseline" if speedup is not None else "",
        emulated=" (emulated devices)" if discovery.emulations() else "",
    )


def _price(book: Book, discovery: DiscoveredDevices, plan: PlannedTrial, seconds: float) -> float | None:
    return price_per_sample(plan.plan, seconds, discovery, book.spec.devices)


def _winner(
    book: Book,
    discovery: DiscoveredDevices,
    plan: PlannedTrial,
    *,
    seconds: float | None = None,
    speedup: float | None = None,
) -> Winner:
    return Winner(
        trial=plan.name if seconds is not None else None,
        summary=plan.summary[:512],
        predicted_rank=plan.overall_rank,
        predicted_seconds=plan.predicted_seconds,
        measured_seconds=seconds,
        speedup_over_baseline=speedup,
        price_per_sample=_price(book, discovery, plan, plan.predicted_seconds if seconds is None else seconds),
        emulated=bool(discovery.emulations()),
        plan=documents.dump(plan.plan),
    )
