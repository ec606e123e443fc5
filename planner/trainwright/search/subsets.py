"""Planning for cost: leaving devices out may make a sample cheaper, so searches run on parts of the cluster too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice, product

from trainwright.search.node_order import device_order
from trainwright.search.protocol import Candidate, Control, NoFeasiblePlan, Problem, Progress, Search

MAX_SUBSETS = 64
_STEPS = 1000
"""What the progress of the search on one part counts for."""


def cheapest(
    search: Search, problem: Problem, control: Control, top: int | None, *, most_parts: int = MAX_SUBSETS
) -> list[Candidate]:
    """Candidates of the search on every part of the cluster that is looked at, the cheapest sample first.

    Raises ValueError where an accelerator has no price, NoFeasiblePlan where nothing can run on any part.
    """
    found = on_parts(search, problem, control, top, most_parts=most_parts)
    return sorted(found, key=lambda candidate: (candidate.price_per_row or 0.0, candidate.estimate.iteration_seconds))


def on_parts(
    search: Search, problem: Problem, control: Control, top: int | None, *, most_parts: int = MAX_SUBSETS
) -> list[Candidate]:
    """The same, part by part, each as the search orders them."""
    _check_prices(problem)
    parts = list(parts_of(problem, most_parts))
    found: list[Candidate] = []
    refusal: NoFeasiblePlan | None = None
    for number, part in enumerate(parts):
        if found and control.expired():
            break
        least = min((candidate.estimate.iteration_seconds for candidate in found), default=None)
        try:
            found += search(part, replace(control, report=_share(control, number, len(parts), least)), top)
        except NoFeasiblePlan as error:
            refusal = refusal or error
    if refusal is not None and not found:
        raise refusal
    return found


def parts_of(problem: Problem, most: int = MAX_SUBSETS) -> Iterator[Problem]:
    """The whole problem, then the same on fewer nodes: so many of each accelerator and size, the best connected first.

    Every number of nodes is tried where that makes at most `most` parts; else powers of two; else all or none.
    """
    names = dict.fromkeys(device.node for device in device_order(problem).devices)
    groups: dict[tuple[str, int], list[str]] = {}
    for name in names:
        node = problem.cluster.node(name)
        groups.setdefault((node.accelerator, node.devices), []).append(name)
    members = list(groups.values())
    for counts in islice(_counts([len(group) for group in members], most), most):
        used = tuple(name for group, count in zip(members, counts, strict=True) for name in group[:count])
        yield problem if len(used) == len(names) else replace(problem, limits=replace(problem.limits, use_nodes=used))


def _counts(sizes: Sequence[int], most: int) -> Iterator[tuple[int, ...]]:
    """How many nodes of each group, the most first; never none of all."""
    options = [list(range(size, -1, -1)) for size in sizes]
    for thinner in (_powers_of_two, _all_or_none):
        total = 1
        for option in options:
            total *= len(option)
        if total > most + 1:
            options = [thinner(size) for size in sizes]
    return (counts for counts in product(*options) if any(counts))


def _powers_of_two(size: int) -> list[int]:
    return [size, *(2**power for power in reversed(range(size.bit_length())) if 2**power < size), 0]


def _all_or_none(size: int) -> list[int]:
    return [size, 0]


def _check_prices(problem: Problem) -> None:
    used = {problem.cluster.node(name).accelerator for name in problem.nodes}
    for accelerator in problem.cluster.accelerators:
        if accelerator.name in used and accelerator.price_per_hour is None:
            raise ValueError(
                f"planning for cost needs the price of every accelerator, and {accelerator.name} has none; give its "
                "price_per_hour in the cluster, spare it, or plan for time"
            )


def _share(control: Control, number: int, parts: int, least: float | None) -> Callable[[Progress], None]:
    """Reports a part's progress as that of the whole."""

    def report(progress: Progress) -> None:
        done = number * _STEPS + _STEPS * progress.done // max(progress.total, 1)
        best = [seconds for seconds in (least, progress.best_seconds) if seconds is not None]
        control.step(done, parts * _STEPS, min(best, default=None))

    return report
