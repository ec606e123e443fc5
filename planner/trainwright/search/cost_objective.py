"""Search for cost: searches on subclusters, and the Pareto front of time and price."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice, product

from trainwright.cluster import Device, price_per_hour
from trainwright.cost.work_bound import work_bound_seconds
from trainwright.search.node_order import device_order
from trainwright.search.problem import Candidate, NoFeasiblePlan, Problem, Search, SearchControl, SearchProgress
from trainwright.training_run import days, price_per_row

MAX_SUBCLUSTERS = 64
_STEPS_PER_SUBCLUSTER = 1000
"""Progress steps of the search on one subcluster."""


def cheapest_first(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Sort candidates by price per row, then by iteration seconds."""
    return sorted(candidates, key=lambda candidate: (_price(candidate), candidate.estimate.iteration_seconds))


def _price(candidate: Candidate) -> float:
    return candidate.price_per_row or 0.0


def in_time(candidates: Sequence[Candidate], problem: Problem) -> list[Candidate]:
    """Return the candidates that end the run of the limits in time. Raises NoFeasiblePlan if there are some, but none does."""
    run = problem.limits.run
    if run is None or not candidates:
        return list(candidates)
    seconds = [candidate.run_seconds(run) for candidate in candidates]
    chosen = [candidate for candidate, taken in zip(candidates, seconds, strict=True) if taken <= run.within_seconds]
    if not chosen:
        raise NoFeasiblePlan(
            f"no plan that was found ends the run within {days(run.within_seconds)}; the fastest takes {days(min(seconds))}: "
            "give it more time, or more devices"
        )
    return chosen


def on_subclusters(
    search: Search, problem: Problem, control: SearchControl, top: int | None, *, max_subclusters: int = MAX_SUBCLUSTERS
) -> list[Candidate]:
    """Return the search's candidates, subcluster by subcluster, each in the order of the search.

    All nodes come first, with half of the budget, then subclusters from small to large, with equal shares of what is left.
    Raises ValueError if an accelerator has no price, NoFeasiblePlan if no plan is feasible on any subcluster.
    """
    _check_prices(problem)
    largest, *others = subclusters(problem, max_subclusters)
    parts = [largest, *sorted(others, key=lambda part: len(part.devices))]
    return _search_parts(search, parts, control, top, lambda number: 2 if number == 0 else len(parts) - number)


def on_subclusters_in_time(
    search: Search, problem: Problem, control: SearchControl, top: int | None, *, max_subclusters: int = MAX_SUBCLUSTERS
) -> list[Candidate]:
    """Return the search's candidates for the cheapest plan that ends the run of the limits in time.

    All nodes come first, which shows what time is possible, then subclusters in the order of `on_growing_subclusters`, with its
    shares of the budget. Once a plan ends in time, left out are subclusters that by the work bound cannot, or whose plans cost
    more than the cheapest that does. Raises ValueError if an accelerator has no price, NoFeasiblePlan if no plan is feasible on
    any subcluster.
    """
    _check_prices(problem)
    largest, *others = [(subcluster, _price_bound(subcluster)) for subcluster in subclusters(problem, max_subclusters)]
    bounded = [largest, *sorted(others, key=_promise)]
    most = problem.limits.row_seconds * problem.global_batch_size

    def is_left_out(number: int, candidates: Sequence[Candidate]) -> bool:
        subproblem, bound = bounded[number]
        prices = [_price(candidate) for candidate in candidates if candidate.estimate.iteration_seconds <= most]
        return bool(prices) and (bound >= min(prices) or _bound_seconds(subproblem) > most)

    parts = [subproblem for subproblem, _ in bounded]
    return _search_parts(search, parts, control, top, lambda number: min(len(parts) - number, 4), is_left_out)


def _search_parts(  # noqa: PLR0913, PLR0917 - a search, what it searches, and in which order and shares
    search: Search,
    parts: Sequence[Problem],
    control: SearchControl,
    top: int | None,
    budget_parts: Callable[[int], float],
    is_left_out: Callable[[int, Sequence[Candidate]], bool] = lambda _number, _candidates: False,
) -> list[Candidate]:
    """Return the search's candidates on the parts of a cluster, in their order.

    Once there are candidates, parts after the end of the budget are left out. `budget_parts`: one in how many parts of the
    remaining budget the n-th part of the cluster takes. `is_left_out`: whether it need not be searched, by the candidates so far.
    """
    candidates: list[Candidate] = []
    infeasible: NoFeasiblePlan | None = None
    for number, part in enumerate(parts):
        if candidates and control.expired():
            break
        if is_left_out(number, candidates):
            continue
        least = min((candidate.estimate.iteration_seconds for candidate in candidates), default=None)
        share = replace(control.part(budget_parts(number)), report=_report_share(control, number, len(parts), least))
        try:
            candidates += search(part, share, top)
        except NoFeasiblePlan as error:
            infeasible = infeasible or error
    if infeasible is not None and not candidates:
        raise infeasible
    return candidates


def on_growing_subclusters(
    search: Search, problem: Problem, control: SearchControl, top: int | None, *, max_subclusters: int = MAX_SUBCLUSTERS
) -> list[Candidate]:
    """Return the search's candidates, from few to many accelerators, without those that hardly give the cheapest plan.

    Subclusters of one accelerator come by its work bound, small ones first; then larger mixes. Each has a quarter of the budget
    that is left, so that the first ones, which are the likeliest, have most, and none has all of it.

    Left out is a subcluster of which each next smaller one was left out or was not cheaper than those below it: what more nodes
    cost in messages and waiting seldom pays again. So is one whose plans, if they use a device of each node, cost more by the
    work bound than the cheapest plan found: plans that do not are on a smaller subcluster. Raises ValueError if an accelerator
    has no price, NoFeasiblePlan if no plan is feasible on any subcluster.
    """
    _check_prices(problem)
    bounded = [(subcluster, _price_bound(subcluster)) for subcluster in subclusters(problem, max_subclusters)]
    bounded.sort(key=_promise)
    candidates: list[Candidate] = []
    least: dict[frozenset[str], float] = {}
    paying: set[frozenset[str]] = set()
    infeasible: NoFeasiblePlan | None = None
    for number, (subproblem, bound) in enumerate(bounded):
        if candidates and control.expired():
            break
        nodes = frozenset(subproblem.nodes)
        smaller = [other for other in (frozenset(part.nodes) for part, _ in bounded) if other < nodes]
        below = [node_set for node_set in smaller if not any(node_set < other for other in smaller)]
        if (below and not paying.intersection(below)) or bound >= min(least.values(), default=math.inf):
            continue
        best_seconds = min((candidate.estimate.iteration_seconds for candidate in candidates), default=None)
        report = _report_share(control, number, len(bounded), best_seconds)
        try:
            share = control.part(min(len(bounded) - number, 4))
            of_subcluster = search(subproblem, replace(share, report=report), top)
        except NoFeasiblePlan as error:
            of_subcluster, infeasible = [], error
        candidates += of_subcluster
        least[nodes] = min(map(_price, of_subcluster), default=math.inf)
        if not of_subcluster or least[nodes] < min(
            (least.get(node_set, math.inf) for node_set in below), default=math.inf
        ):
            paying.add(nodes)
    if infeasible is not None and not candidates:
        raise infeasible
    return candidates


def _promise(subcluster: tuple[Problem, float]) -> tuple[int, float, float]:
    """Return the key by which subclusters are ordered: a part of another one is always before it."""
    problem, bound = subcluster
    accelerators = {problem.cluster.node(name).accelerator for name in problem.nodes}
    devices = len(problem.devices)
    if len(accelerators) == 1:  # the bound is the same for any number of nodes, but for rounding
        return 1, float(f"{bound:.6g}"), devices
    return len(accelerators), devices, bound


def _price_bound(problem: Problem) -> float:
    """Return what a row costs at least of a plan that uses a device of each node; of nodes that are alike, of every plan."""
    prices = {problem.cluster.node(name).price_per_hour for name in problem.nodes}
    is_single = len(problem.accelerators) == 1 and len(prices) == 1
    devices = problem.devices if is_single else [Device(name, 0) for name in problem.nodes]
    price = price_per_hour(problem.cluster, devices) or 0.0
    return price_per_row(price, _bound_seconds(problem), problem.global_batch_size)


def _bound_seconds(problem: Problem) -> float:
    return work_bound_seconds(problem.cost_context, problem.nodes, problem.global_batch_size)


def subclusters(problem: Problem, max_subclusters: int = MAX_SUBCLUSTERS) -> Iterator[Problem]:
    """Yield the problem, then the problem on fewer nodes of each accelerator, size and price, best connected nodes first.

    It tries every number of nodes if that makes at most `max_subclusters`; else powers of two; else all or none.
    """
    names = dict.fromkeys(device.node for device in device_order(problem).devices)
    groups: dict[tuple[str, int, float | None], list[str]] = {}
    for name in names:
        node = problem.cluster.node(name)
        groups.setdefault((node.accelerator, node.devices, node.price_per_hour), []).append(name)
    members = list(groups.values())
    for counts in islice(_node_counts([len(group) for group in members], max_subclusters), max_subclusters):
        node_names = tuple(name for group, count in zip(members, counts, strict=True) for name in group[:count])
        yield (
            problem
            if len(node_names) == len(names)
            else replace(problem, limits=replace(problem.limits, use_nodes=node_names))
        )


def _node_counts(sizes: Sequence[int], max_counts: int) -> Iterator[tuple[int, ...]]:
    """Return the numbers of nodes per group, the largest first, without the empty subcluster."""
    options = [list(range(size, -1, -1)) for size in sizes]
    for reduce_options in (_powers_of_two, _all_or_none):
        total = 1
        for option in options:
            total *= len(option)
        if total > max_counts + 1:
            options = [reduce_options(size) for size in sizes]
    return (counts for counts in product(*options) if any(counts))


def _powers_of_two(size: int) -> list[int]:
    return [size, *(2**power for power in reversed(range(size.bit_length())) if 2**power < size), 0]


def _all_or_none(size: int) -> list[int]:
    return [size, 0]


def _check_prices(problem: Problem) -> None:
    for name in problem.nodes:
        if price_per_hour(problem.cluster, [Device(name, 0)]) is None:
            raise ValueError(
                f"planning for cost needs the price of every accelerator, and {problem.cluster.node(name).accelerator} has none; give "
                "its price_per_hour in the cluster, spare it, or plan for time"
            )


def _report_share(
    control: SearchControl, number: int, subclusters: int, best_seconds: float | None
) -> Callable[[SearchProgress], None]:
    """Return a callback that reports a subcluster's progress as a share of all."""

    def report(progress: SearchProgress) -> None:
        done = number * _STEPS_PER_SUBCLUSTER + _STEPS_PER_SUBCLUSTER * progress.done // max(progress.total, 1)
        best = [seconds for seconds in (best_seconds, progress.best_seconds) if seconds is not None]
        control.report_progress(done, subclusters * _STEPS_PER_SUBCLUSTER, min(best, default=None))

    return report


def pareto(
    search: Search, problem: Problem, control: SearchControl, top: int | None, *, max_subclusters: int = MAX_SUBCLUSTERS
) -> list[Candidate]:
    """Return the Pareto front of the search's candidates on all subclusters tried, fastest first.

    `top` are requested of each. Raises ValueError if an accelerator has no price, NoFeasiblePlan if no plan is feasible on any
    subcluster.
    """
    return pareto_front(on_subclusters(search, problem, control, top, max_subclusters=max_subclusters))


def pareto_front(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the candidates that no other matches or beats in both iteration seconds and price per row, fastest first.

    The first of equals stays. Raises ValueError if a candidate has no price.
    """
    front: list[Candidate] = []
    cheapest: float | None = None
    for seconds_and_price, candidate in sorted(
        ((_seconds_and_price(candidate), candidate) for candidate in candidates), key=lambda item: item[0]
    ):
        if cheapest is None or seconds_and_price[1] < cheapest:
            front.append(candidate)
            cheapest = seconds_and_price[1]
    return front


def _seconds_and_price(candidate: Candidate) -> tuple[float, float]:
    if candidate.price_per_row is None:
        raise ValueError("a front of time and cost needs the price of every accelerator that a candidate uses")
    return candidate.estimate.iteration_seconds, candidate.price_per_row


def subsampled(candidates: Sequence[Candidate], most: int | None) -> list[Candidate]:
    """Return at most `most` candidates, evenly spread and with both ends (the first alone if `most` is 1)."""
    if most is None or len(candidates) <= most:
        return list(candidates)
    if most == 1:
        return [candidates[0]]
    last = len(candidates) - 1
    return [candidates[round(number * last / (most - 1))] for number in range(most)]
