"""Benchmark of OPT-350M on half A100, half V100: our plans in the simulator that published planners were compared by."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from statistics import fmean

from rich.console import Console
from rich.table import Table

from opt_350m_simulator import SimulatedPlan, Simulator
from opt_350m_splits import Cut, best_fitting, one_accelerator, pipeline_plan, two_stage_splits
from opt_350m_tables import MODEL, Tables
from trainwright.cost.estimate import estimate_with_context
from trainwright.plan import Plan
from trainwright.search import SEARCHES, Candidate, NoFeasiblePlan, Problem, SearchControl, run

PUBLISHED = {16: (0.0435, 0.0445), 32: (0.0769, 0.0829), 64: (0.1351, 0.1505), 128: (0.2171, 0.2697)}
"""Iterations per second by devices: the best published planner, and the best two-stage split; both by the simulator."""
PLANNERS = ("megatron", "amp", "galvatron-bmw", "alpa", "auto")
BUDGET_SECONDS = 60.0
TOP = 50
"""Candidates for the simulator; trials would measure fewer."""
SLOW, FAST = "V100-16", "A100-40"


@dataclass(frozen=True)
class Found:
    """Candidates of one planner, best first by our estimate, each with the simulator's result or the reason without one."""

    cpu_seconds: float
    judged: tuple[tuple[Candidate, SimulatedPlan | str], ...]

    @property
    def best(self) -> tuple[Candidate, SimulatedPlan] | None:
        """Return the fastest simulated candidate that fits into the simulated memory."""
        fitting = [
            (one, verdict) for one, verdict in self.judged if isinstance(verdict, SimulatedPlan) and verdict.fits
        ]
        return min(fitting, key=lambda pair: pair[1].seconds, default=None)


def main() -> None:
    """Print the tables; without the data, one sentence."""
    console = Console(width=150)
    console.rule("OPT-350M, batch 1,024, sequence 2,048, float32: half A100, half V100, four devices a node")
    try:
        tables = Tables.of_environment()
    except ValueError as missing:
        console.print(f"{missing}\n")
        return
    console.print(_two_cost_models(tables))
    console.print(_agreement(tables))
    for devices in PUBLISHED:
        console.print(_searches(tables, devices))
    missing_planners = [name for name in PLANNERS if name not in SEARCHES]
    if missing_planners:
        console.print(f"There is no planner {' or '.join(missing_planners)} yet.")
    console.print(
        f"Planners have {BUDGET_SECONDS:.0f} s. The simulator judges the first {TOP} candidates of each; a star marks what "
        "goes beyond its own equations.\n"
    )


def _problem(tables: Tables, devices: int) -> Problem:
    return tables.problem({SLOW: devices // 2, FAST: devices // 2})


def _searches(tables: Tables, devices: int) -> Table:
    """Return a table of planners and of enumeration by the simulator, in iterations per second."""
    problem = _problem(tables, devices)
    simulator = Simulator(tables, problem.cluster)
    published, published_split = PUBLISHED[devices]
    table = Table(
        *(
            "planner",
            "first choice",
            "our estimate",
            "simulator",
            f"best of {TOP} by the simulator",
            "simulator",
            "CPU s",
        ),
        title=f"{devices} devices, iterations per second",
    )
    table.add_row("published planners", "", "", f"{published:.4f}")
    half = {SLOW: devices // 2, FAST: devices // 2}
    for name, plans in (
        (f"enumerated: {FAST} alone", one_accelerator(problem.cluster, FAST, devices // 2)),
        (f"enumerated: {FAST}, {SLOW}", two_stage_splits(problem.cluster, (FAST, SLOW), half)),
        (f"enumerated: {SLOW}, {FAST}", two_stage_splits(problem.cluster, (SLOW, FAST), half)),
    ):
        best = best_fitting(simulator, plans)
        if best is not None:
            estimated = 1 / estimate_with_context(best[0], problem.cost_context).iteration_seconds
            table.add_row(name, best[0].summary(), f"{estimated:.4f}", f"{best[1].per_second:.4f}")
    table.add_row("  published", "", "", f"{published_split:.4f}", end_section=True)
    for name in PLANNERS:
        if name in SEARCHES:
            table.add_row(name, *_cells(_find(name, _problem(tables, devices), simulator)))
    return table


def _find(planner: str, problem: Problem, simulator: Simulator) -> Found | str:
    """Return the planner's candidates, or why there are none."""
    started = time.process_time()
    try:
        candidates = run(planner, problem, top=TOP, control=SearchControl.with_budget(BUDGET_SECONDS))
    except NoFeasiblePlan as reason:
        return str(reason)
    spent = time.process_time() - started
    return Found(spent, tuple((one, _judge(simulator, one.plan)) for one in candidates))


def _judge(simulator: Simulator, plan: Plan) -> SimulatedPlan | str:
    try:
        return simulator.judge(plan)
    except ValueError as reason:
        return str(reason)


def _cells(found: Found | str) -> Iterator[str]:
    if isinstance(found, str):
        yield found
        return
    first, verdict = found.judged[0]
    yield first.plan.summary()
    yield f"{1 / first.estimate.iteration_seconds:.4f}"
    yield _told(verdict)
    best = found.best
    yield best[0].plan.summary() if best else "none fits"
    yield _told(best[1]) if best else ""
    yield f"{found.cpu_seconds:.2f}"


def _told(verdict: SimulatedPlan | str) -> str:
    if isinstance(verdict, str):
        return "not judged"
    return f"{verdict.per_second:.4f}{'*' if verdict.unmodelled else ''}{'' if verdict.fits else ', does not fit'}"


def _agreement(tables: Tables) -> Table:
    """Return a table of how far our estimate is from the simulator, over every third of the enumerated plans."""
    table = Table("devices", "plans", "mean error", "mean", "verdicts on memory that differ", title="agreement")
    for devices in PUBLISHED:
        problem, half = _problem(tables, devices), {SLOW: devices // 2, FAST: devices // 2}
        simulator = Simulator(tables, problem.cluster)
        plans = chain(
            one_accelerator(problem.cluster, FAST, devices // 2),
            two_stage_splits(problem.cluster, (FAST, SLOW), half),
            two_stage_splits(problem.cluster, (SLOW, FAST), half),
        )
        pairs = [
            (estimate_with_context(plan, problem.cost_context), verdict)
            for plan in islice(plans, 0, None, 3)
            if isinstance(verdict := _judge(simulator, plan), SimulatedPlan)
        ]
        errors = [own.iteration_seconds / verdict.seconds - 1 for own, verdict in pairs]
        differing = sum(own.feasible != verdict.fits for own, verdict in pairs)
        cells = (devices, len(pairs), f"{fmean(map(abs, errors)):.1%}", f"{fmean(errors):+.1%}", differing)
        table.add_row(*map(str, cells))
    return table


def _two_cost_models(tables: Tables) -> Table:
    """Return a table of two-stage splits, V100 first, by our estimate and by the simulator."""
    table = Table(
        *(
            "devices",
            "tensor",
            "data",
            "rows",
            "layers",
            "simulator /s",
            "fits",
            "ours /s",
            "fits",
            "seconds, ours less",
        ),
        title="the same plans by the simulator and by our estimate",
    )
    for devices, cases in {
        16: ((1, 2, 7), (1, 2, 6), (2, 4, 7), (1, 4, 7)),
        32: ((1, 2, 7), (2, 4, 7), (2, 4, 6)),
        64: ((1, 2, 7), (2, 4, 7), (2, 4, 6), (4, 8, 7)),
        128: ((1, 2, 7), (2, 4, 7), (2, 4, 6), (4, 4, 7), (4, 8, 7)),
    }.items():
        problem = _problem(tables, devices)
        simulator = Simulator(tables, problem.cluster)
        for tensor, rows, layers in cases:
            data = devices // 2 // tensor
            cuts = (Cut(SLOW, tensor, data, layers), Cut(FAST, tensor, data, len(MODEL.layers)))
            plan = pipeline_plan(problem.cluster, cuts, rows * data)
            verdict, own = simulator.judge(plan), estimate_with_context(plan, problem.cost_context)
            table.add_row(
                *map(str, (devices, tensor, data, rows, layers)),
                f"{verdict.per_second:.4f}",
                "yes" if verdict.fits else "no",
                f"{1 / own.iteration_seconds:.4f}",
                "yes" if own.feasible else "no",
                f"{1 - own.iteration_seconds / verdict.seconds:+.1%}",
            )
    return table
