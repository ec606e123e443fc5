"""Benchmark of calibration: what five trials, drawn at random, teach of plans that they do not hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from statistics import fmean
from typing import Final

import numpy as np
from rich.console import Console
from rich.table import Table

from opt_350m_bench import FAST, SLOW
from opt_350m_simulator import SimulatedPlan, Simulator
from opt_350m_splits import one_accelerator, two_stage_splits
from opt_350m_tables import Tables
from trainwright.calibration import FailedTrial, Trial, Trials, fit
from trainwright.cost.estimate import Estimate, estimate_with_context
from trainwright.plan import Plan
from trainwright.runtime import Runtime
from trainwright.search import Limits, Problem, assuming_process_memory
from trainwright_papers.amp_settings import EXPERIMENTS, TRAINER_OF_2022, amp_plan, amp_problem
from trainwright_papers.comparison import spearman
from trainwright_papers.published import amp_figures

DRAWS: Final = 24
TRIALS: Final = 5
DEVICES: Final = 16
EVERY: Final = 15
"""Of the enumerated plans of OPT-350M one in this many is taken."""


@dataclass(frozen=True)
class Outcome:
    """Measured outcome of running a plan.

    Attributes:
        peak_bytes: of the fullest device; None where it is not known.
    """

    plan: Plan
    seconds: float
    runs: bool = True
    peak_bytes: int | None = None


@dataclass(frozen=True)
class Scores:
    """Predictions of plans without a trial: rank correlation and mean errors of those that run, and wrong verdicts on memory.

    Attributes:
        tried: share of the trials that ran and are refused.
    """

    rank: float | None
    seconds: float
    memory: float | None
    refused: float
    accepted: float | None
    tried: float


def main() -> None:
    """Print the tables."""
    console = Console(width=130)
    console.rule(f"Calibration by {TRIALS} trials, means of {DRAWS} draws")
    table = Table(
        *(
            "plans",
            "",
            "rank",
            "error of seconds",
            "error of memory",
            "refused though they run",
            "accepted though they do not",
            "refused though tried",
        )
    )
    for name, problem, outcomes in _sets():
        for title, states_memory in (("", True), (", no trial states its memory", False)):
            if not states_memory and outcomes[0].peak_bytes is None:
                continue
            before, after = zip(*_draws(problem, outcomes, states_memory=states_memory), strict=True)
            table.add_row(f"{name}{title}", "before", *_cells(before))
            table.add_row("", "after", *_cells(after))
    console.print(table)


def _sets() -> Iterator[tuple[str, Problem, Sequence[Outcome]]]:
    """Yield AMP's measured plans, and those of OPT-350M by the public simulator where its tables are here."""
    for setting, experiment in EXPERIMENTS.items():
        measured = [figure for figure in amp_figures().trials if figure.setting == setting]
        problem = amp_problem(setting)
        problem = replace(
            problem, runtime=assuming_process_memory(problem.runtime, problem.cluster, problem.profiles.origin)
        )
        yield experiment.title, problem, [Outcome(amp_plan(figure), figure.seconds) for figure in measured]
    try:
        tables = Tables.of_environment()
    except ValueError:
        return
    problem = replace(tables.problem({SLOW: DEVICES // 2, FAST: DEVICES // 2}), runtime=TRAINER_OF_2022)
    yield f"OPT-350M on {DEVICES} devices", problem, list(_simulated(tables, problem))


def _simulated(tables: Tables, problem: Problem) -> Iterator[Outcome]:
    simulator, half = Simulator(tables, problem.cluster), {SLOW: DEVICES // 2, FAST: DEVICES // 2}
    plans = chain(
        one_accelerator(problem.cluster, FAST, DEVICES // 2),
        two_stage_splits(problem.cluster, (FAST, SLOW), half),
        two_stage_splits(problem.cluster, (SLOW, FAST), half),
    )
    for plan in islice(plans, 0, None, EVERY):
        verdict: SimulatedPlan = simulator.judge(plan)
        yield Outcome(plan, verdict.seconds, verdict.fits, round(verdict.peak_bytes))


def _draws(problem: Problem, outcomes: Sequence[Outcome], *, states_memory: bool) -> Iterator[tuple[Scores, Scores]]:
    """Yield the scores of each draw before and after the fit to its trials."""
    before = _estimates(problem, outcomes, problem.runtime)
    for number in range(DRAWS):
        draw = np.random.default_rng(number)
        order = [outcomes[place] for place in draw.permutation(len(outcomes))]
        tried = order[:TRIALS]
        if not any(outcome.runs for outcome in tried):
            continue
        context = replace(problem, limits=Limits(memory_headroom_ratio=0.0)).cost_context
        fitted = fit(_trials(tried, states_memory=states_memory), context).runtime
        after = _estimates(problem, outcomes, fitted)
        yield _scores(before, tried, order[TRIALS:]), _scores(after, tried, order[TRIALS:])


def _trials(tried: Sequence[Outcome], *, states_memory: bool) -> Trials:
    return Trials(
        tuple(
            Trial(outcome.plan, outcome.seconds, outcome.peak_bytes if states_memory else None)
            for outcome in tried
            if outcome.runs
        ),
        tuple(FailedTrial(outcome.plan, out_of_memory=True) for outcome in tried if not outcome.runs),
    )


def _estimates(problem: Problem, outcomes: Sequence[Outcome], runtime: Runtime) -> dict[Plan, Estimate]:
    """Predict the plans by a runtime, with the head-room that it implies."""
    limits = Limits().leaving_unknown_memory(runtime, problem.cluster)
    context = replace(problem, runtime=runtime, limits=limits).cost_context
    return {outcome.plan: estimate_with_context(outcome.plan, context) for outcome in outcomes}


def _scores(estimates: dict[Plan, Estimate], tried: Sequence[Outcome], untried: Sequence[Outcome]) -> Scores:
    running = [outcome for outcome in untried if outcome.runs]
    seconds = [(estimates[outcome.plan].iteration_seconds, outcome.seconds) for outcome in running]
    peaks = [(estimates[outcome.plan].peak_memory_bytes, outcome.peak_bytes) for outcome in running]
    fits = [(estimates[outcome.plan].feasible, outcome.runs) for outcome in untried]
    return Scores(
        rank=spearman([measured for _, measured in seconds], [predicted for predicted, _ in seconds]),
        seconds=fmean(abs(predicted / measured - 1) for predicted, measured in seconds),
        memory=_mean([abs(predicted / measured - 1) for predicted, measured in peaks if measured is not None]),
        refused=fmean(not feasible for feasible, runs in fits if runs),
        accepted=_mean([float(feasible) for feasible, runs in fits if not runs]),
        tried=fmean(not estimates[outcome.plan].feasible for outcome in tried if outcome.runs),
    )


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _cells(scores: Sequence[Scores]) -> Iterator[str]:
    forms: dict[str, Callable[[float], str]] = {"rank": "{:.3f}".format}
    for name in ("rank", "seconds", "memory", "refused", "accepted", "tried"):
        values = [value for score in scores if (value := getattr(score, name)) is not None]
        yield forms.get(name, "{:.1%}".format)(fmean(values)) if values else ""
