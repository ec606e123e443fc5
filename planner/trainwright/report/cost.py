"""Cost of plans: what is priced, and what a whole run takes and costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from trainwright.cluster import PricedBy
from trainwright.report.remark import Remark
from trainwright.report.units import rate
from trainwright.search import Candidate, Objective, Problem
from trainwright.training_run import days

PRICED: Final = {PricedBy.NODE: "of whole nodes", PricedBy.DEVICE: "of the devices in use"}


def is_priced(problem: Problem) -> bool:
    """Return whether an answer to the problem states costs."""
    return problem.limits.objective is not Objective.TIME


def cost_legend(problem: Problem) -> str:
    """Return the legend of the column of costs."""
    return f"cost: of 1000 rows, in the cluster's currency, by the price {PRICED[problem.cluster.priced_by]}"


def pricing_fields(problem: Problem) -> dict[str, Any]:
    """Return by what plans are priced, for JSON output."""
    return {"priced_by": problem.cluster.priced_by}


def run_columns(problem: Problem) -> Sequence[tuple[str, Callable[[Candidate], str]]]:
    """Return the heading and the cell of the whole run; none where it is not stated."""
    run = problem.limits.run
    return () if run is None else (("run", lambda candidate: days(candidate.run_seconds(run))),)


def run_fields(candidate: Candidate, problem: Problem) -> dict[str, Any]:
    """Return the seconds and the price of the whole run for JSON output; empty where it is not stated."""
    run = problem.limits.run
    return {} if run is None else {"run_seconds": candidate.run_seconds(run), "run_price": candidate.run_price(run)}


def whole_run(candidate: Candidate, problem: Problem) -> Remark:
    """Return how long the run takes by a plan, and what it costs."""
    run = problem.limits.run
    if run is None:
        return Remark()
    price = candidate.run_price(run)
    costs = "" if price is None else f" and costs {rate(price)} by the price {PRICED[problem.cluster.priced_by]}"
    iterations, taken = run.iterations(candidate.plan.global_batch_size), candidate.run_seconds(run)
    sentences = [f"The run of {iterations:,} iterations takes {days(taken)}{costs}, without interruptions."]
    if taken > run.within_seconds:
        sentences.append(f"That is longer than {days(run.within_seconds)}.")
    return Remark(tuple(sentences), run_fields(candidate, problem))
