"""Benchmark of trial selection: how fast it finds the true best plan, against trying in order, on simulated truths."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table
from trial_oracle import (
    Error,
    at_random,
    believed_fastest,
    expected_improvement,
    mean_error,
    proposed,
    run,
    run_by_measurement,
    true_seconds,
)

from trainwright.accelerators import cluster_of, estimate_profiles
from trainwright.families import Gpt
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.plan import Plan
from trainwright.search import NoFeasiblePlan, Problem
from trainwright.search import run as search
from trainwright.trial_selection import Rule, TrialHistory, TrialPosterior, propose

GPT2, WIDER = Gpt(24, 1024, 16, 1024, 52256), Gpt(24, 2048, 16, 1024, 52256)
CASES: Sequence[tuple[Mapping[str, int], Gpt, int]] = (
    ({"p3.8xlarge": 4}, GPT2, 64),
    ({"p3.8xlarge": 3, "g4dn.12xlarge": 1}, GPT2, 32),
    ({"p3.8xlarge": 2, "g4dn.12xlarge": 2}, GPT2, 64),
    ({"p4d.24xlarge": 1, "p3.8xlarge": 2}, WIDER, 64),
    ({"g5.12xlarge": 2, "g4dn.12xlarge": 1}, GPT2, 48),
    ({"p3.8xlarge": 1, "g4dn.12xlarge": 1, "g5.12xlarge": 1}, GPT2, 32),
)
PLANNERS = ("amp", "galvatron-base", "galvatron-bmw", "megatron")
CANDIDATES, TRUTHS, TRIALS = 24, 40, 8
"""Candidates of each case, truths drawn for each, and trials of each truth."""


Lister = Callable[[Problem], list[Plan]]


def _amp(problem: Problem) -> list[Plan]:
    return [candidate.plan for candidate in search("amp", problem, top=CANDIDATES)]


def _all(problem: Problem) -> list[Plan]:
    """Return the CANDIDATES best plans of all planners, best first."""
    seconds: dict[Plan, float] = {}
    for planner in PLANNERS:
        try:
            found = search(planner, problem, top=CANDIDATES)
        except NoFeasiblePlan:
            continue
        seconds |= {candidate.plan: candidate.estimate.iteration_seconds for candidate in found}
    return sorted(seconds, key=seconds.__getitem__)[:CANDIDATES]


SCENARIOS: Sequence[tuple[str, Lister, Error]] = (
    ("AMP's best plans, residual of 3 %", _amp, Error()),
    (
        "the best of four planners, residual of 3 %, most of it shared by plans of the same degrees",
        _all,
        Error(alike=0.026, own=0.015),
    ),
    ("the best of four planners, residual of 3 %, every plan's own", _all, Error()),
)
"""Title, candidates and error model; in the last one candidates differ almost only by noise, so trials teach little."""
STRATEGIES = {
    "at random": at_random,
    "calibrated order": believed_fastest,
    "expected improvement": expected_improvement,
    "proposed": proposed,
}
THRESHOLDS = (0.02, 0.01, 0.005)


@dataclass(frozen=True)
class Simulated:
    """Prior knowledge before any trial, and the true seconds of each plan."""

    known: TrialPosterior
    truth: list[float]
    seed: tuple[int, int]


def main() -> None:
    """Print the curves."""
    console = Console(width=150)
    console.rule("Choosing what to try")
    problems = [_problem(*case) for case in CASES]
    for title, candidates, error in SCENARIOS:
        _compare(
            console,
            title,
            [one for number, of in enumerate(problems) for one in _simulated(number, of, candidates(of), error)],
        )
    console.print()


def _simulated(number: int, problem: Problem, plans: list[Plan], error: Error) -> Iterator[Simulated]:
    known = TrialHistory.of(plans, problem.cost_context).posterior
    for truth in range(TRUTHS):
        draw = np.random.default_rng([number, truth])
        yield Simulated(known, true_seconds(plans, problem.cost_context, error, draw), (number, truth))


def _compare(console: Console, title: str, problems: list[Simulated]) -> None:
    errors = [mean_error(np.exp(one.known.seconds.means).tolist(), one.truth) for one in problems]
    missed = np.mean([int(np.argmin(one.truth)) != 0 for one in problems])
    console.print(
        f"[bold]{title}[/]: {len(problems)} truths on {len(CASES)} clusters, {CANDIDATES} candidates each; mean error of the "
        f"cost model {np.mean(errors):.1%}, its first plan is not the fastest in {missed:.0%}; noise 1.5 %",
        highlight=False,
    )
    started = time.process_time()
    in_order = [run_by_measurement(p.truth, p.known.noise, TRIALS, p.seed) for p in problems]
    curves = {"in order, fastest measured": in_order} | {
        name: [run(p.known, p.truth, strategy, TRIALS, p.seed) for p in problems]
        for name, strategy in STRATEGIES.items()
    }
    spent = (time.process_time() - started) / len(problems) / len(STRATEGIES) / TRIALS
    regrets = {name: _mean([one.regrets for one in runs]) for name, runs in curves.items()}
    found = {name: _mean([one.found for one in runs]) for name, runs in curves.items()}
    _print_curve(console, "mean regret by number of trials", regrets, "{:.2%}")
    _print_curve(console, "the true best is found", found, "{:.0%}")
    _print_ratios(console, regrets["in order, fastest measured"], regrets["proposed"])
    _print_stops(console, problems)
    console.print(f"CPU milliseconds of a choice: {1000 * spent:.2g}\n", highlight=False)


def _mean(rows: Sequence[Sequence[float]]) -> list[float]:
    return [float(value) for value in np.mean(np.array(rows, dtype=np.float64), axis=0)]


def _problem(machines: Mapping[str, int], gpt: Gpt, batch: int) -> Problem:
    cluster, model = cluster_of(dict(machines)), Model.of(gpt, Dtype.FLOAT16)
    names = [accelerator.name for accelerator in cluster.accelerators]
    rows = tuple(2**power for power in range(7))
    return Problem(cluster, model, estimate_profiles(model, names, tensor_degrees=[1, 2, 4, 8], rows=rows), batch)


def _print_curve(console: Console, title: str, curves: dict[str, list[float]], form: str) -> None:
    table = Table("", *(str(trial) for trial in range(1, TRIALS + 1)), title=title, title_justify="left")
    for name, values in curves.items():
        table.add_row(name, *(form.format(value) for value in values))
    console.print(table)


def _print_ratios(console: Console, in_order: list[float], ours: list[float]) -> None:
    ratios = ", ".join(f"{in_order[trial - 1] / ours[trial - 1]:.2f} after {trial}" for trial in (2, 3, 4, 5, 6, 8))
    console.print(f"regret of the list in order over that of the proposals: {ratios}", highlight=False)
    for count in (4, 6, 8):
        needed = next((trial for trial, regret in enumerate(ours, 1) if regret <= in_order[count - 1]), None)
        console.print(f"what {count} trials in order reach, {needed} proposed ones do", highlight=False)


def _print_stops(console: Console, problems: list[Simulated]) -> None:
    table = Table("stop below", "trials", "expected regret then", "true regret then", title="when to stop")
    for threshold in THRESHOLDS:
        trials, expected, true = zip(*(_stopped(one, Rule(regret_below=threshold)) for one in problems), strict=True)
        table.add_row(f"{threshold:.1%}", f"{np.mean(trials):.1f}", f"{np.mean(expected):.2%}", f"{np.mean(true):.2%}")
    console.print(table)


def _stopped(problem: Simulated, rule: Rule) -> tuple[int, float, float]:
    """Return the number of trials until the rule stops, and the expected and true regret at that point."""
    known, noise = problem.known, np.random.default_rng([*problem.seed, 1]).normal(0, problem.known.noise, CANDIDATES)
    while (answer := propose(known, rule)).trial is not None:
        known = known.after_seconds(answer.trial, problem.truth[answer.trial] * float(np.exp(noise[answer.trial])))
    assert answer.best is not None
    return len(known.measured), answer.regret, problem.truth[answer.best] / min(problem.truth) - 1
