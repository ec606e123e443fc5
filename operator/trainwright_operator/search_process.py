"""Search process: a request as JSON on standard input, the plans to try on standard output.

Exit 0: standard output holds a `PlannedTrials` document. Exit 3: no plan is feasible, and standard output holds the
reason. Otherwise (4: out of memory) the last line of standard error holds the failure.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, zip_longest
from typing import Final

from trainwright import documents
from trainwright.answer import Answer, Question, Stop, compose
from trainwright.answer.formats import objective_value
from trainwright.answer.question import sparing_small
from trainwright.cluster import Cluster
from trainwright.exports import TARGETS
from trainwright.model import Model
from trainwright.outside.plain_text import plain_line
from trainwright.plan import Plan
from trainwright.profiles import Profiles
from trainwright.report import plan_summary
from trainwright.runtime import Runtime
from trainwright.search import (
    Candidate,
    Limits,
    NoFeasiblePlan,
    Objective,
    Preference,
    Problem,
    SearchControl,
    SearchProgress,
)
from trainwright.search.candidates import DeviceSymmetry
from trainwright.training import Optimizer
from trainwright.trial_selection import TrialHistory
from trainwright.worker_api import PROGRESS_MARKER, Progress
from trainwright_operator.flow.actions import PlanningRequest
from trainwright_operator.flow.documents.planned_trials import PlannedTrial, PlannedTrials, Role, Uncertainty
from trainwright_operator.flow.snapshot import PlannerState
from trainwright_operator.memory_limit import allowed_bytes, limit_memory

MAX_PLANS_BYTES: Final = 900_000
"""Limit on the plans in a ConfigMap, which holds 1 MiB together with their metadata."""
_OPTIMIZERS: dict[str, Optimizer] = {"adam": "adam", "sgd": "sgd"}


def search(request: PlanningRequest, report: Callable[[SearchProgress], None] | None = None) -> str:
    """Return the `PlannedTrials` document for a request. `report`: callback for progress.

    Raise NoFeasiblePlan, or ValueError for an invalid request.
    """
    started = time.monotonic()
    question = question_of(request)
    control = SearchControl.with_budget(request.budget_seconds, effort=request.effort, report=report)
    answer = compose(question, control)
    # The trial and the task of its workers have the number format beside the plan, as former versions do.
    candidates, baselines = map(_in_any_format, (answer.candidates, _known_baselines(answer)))
    ordered_trials = order_trials(candidates, baselines, question.objective)
    trials = fit_into_config_map(ordered_trials)
    free = next(
        (candidate.unlimited_seconds for candidate in answer.candidates if candidate.unlimited_seconds is not None),
        None,
    )
    return documents.dumps(
        PlannedTrials(
            planner=request.planner,
            search_seconds=time.monotonic() - started,
            trials=trials,
            uncertainty=_uncertainty(answer.problem, trials),
            stopped_by_budget=answer.stopped is Stop.BUDGET,
            without_room=len(ordered_trials) - len(trials),
            slow_format=_slow_words(answer),
            unlimited_seconds=free,
            node_worth=answer.node_worths,
            why=_why(answer),
        )
    )


def _slow_words(answer: Answer) -> str:
    if answer.slow is None:
        return ""
    from trainwright.report.format_sentences import slow_format  # noqa: PLC0415 - tables are slow to import, and rarely needed

    cluster = answer.problem.cluster
    (sentence,) = slow_format(answer.slow, cluster, cluster.accelerators_of(answer.best.plan.nodes)).sentences
    return sentence.removesuffix(".")


def _why(answer: Answer) -> str:
    """Return why the best plan takes less or more time than the heuristic's; empty without the heuristic's plan."""
    if answer.baselines is None or answer.baselines.better is None:
        return ""
    from trainwright.report.breakdown import why  # noqa: PLC0415 - tables are slow to import
    from trainwright.report.worth import heuristic_difference  # noqa: PLC0415

    difference = heuristic_difference(answer.best, answer.baselines, answer.problem)
    (sentence,) = why(difference, answer.problem, what="it").sentences
    return sentence.removesuffix(".").removeprefix("It ")


def question_of(request: PlanningRequest) -> Question:
    """Return the question; what the search leaves of its budget is for the worth of nodes, where time is the objective.

    Its problems are in the number formats in which some accelerator has enough memory. Raise NoFeasiblePlan if there are none.
    """
    problems, refusals = list[Problem](), list[NoFeasiblePlan]()
    models, tables = (request.model, *request.further_models), (request.profiles, *request.further_profiles)
    for model, profiles in zip(models, tables, strict=True):
        try:
            problems.append(_problem(request, model, profiles))
        except NoFeasiblePlan as refusal:
            refusals.append(refusal)
    if not problems:
        raise refusals[0]
    return Question(
        tuple(problems),
        request.planner,
        max(request.top_k, 1),
        baselines=request.baselines,
        worth_share=0.0 if Objective(request.objective) is Objective.TIME else None,
    )


def _problem(request: PlanningRequest, model: str, tables: str) -> Problem:
    """Return the problem in one number format, without accelerators that lack memory or are not profiled in it."""
    cluster: Cluster = documents.loads(request.cluster, Cluster, source="cluster")
    profiles: Profiles = documents.loads(tables, Profiles, source="profiles")
    runtime: Runtime = documents.loads(request.runtime, Runtime, source="runtime")
    limits = Limits(
        max_tensor_degree=request.max_tensor_degree,
        objective=Objective(request.objective),
        spare=_unprofiled(cluster, profiles),
        expressible_by=TARGETS[request.expressible_by].capabilities if request.expressible_by else None,
    )
    return Problem(
        cluster=cluster,
        model=documents.loads(model, Model, source="model"),
        profiles=profiles,
        global_batch_size=request.global_batch_size,
        limits=sparing_small(limits.leaving_unknown_memory(runtime, cluster), cluster, profiles),
        optimizer=_OPTIMIZERS[request.optimizer],
        runtime=runtime,
        preference=Preference(
            request.tolerance, documents.loads(request.keep, Plan, source="running plan") if request.keep else None
        ),
        chooses_format=request.chooses_format,
    )


def _unprofiled(cluster: Cluster, profiles: Profiles) -> tuple[str, ...]:
    """Return accelerators that are not profiled in this number format."""
    profiled = {layer.accelerator for layer in profiles.layers} | {entry.accelerator for entry in profiles.too_large}
    return tuple(
        dict.fromkeys(node.accelerator for node in cluster.nodes if profiled and node.accelerator not in profiled)
    )


def _uncertainty(problem: Problem, trials: tuple[PlannedTrial, ...]) -> Uncertainty | None:
    """Return the uncertainty of the trials by the best one's profiles; None where those lack devices of another."""
    if not {device.node for trial in trials for device in trial.plan.devices} <= set(problem.nodes):
        return None
    posterior = TrialHistory.of([trial.plan for trial in trials], problem.cost_context).posterior
    covariance = tuple(tuple(row) for row in posterior.seconds.covariance.tolist())
    return Uncertainty(covariance, tuple(posterior.memory.expected.tolist()))


def _known_baselines(answer: Answer) -> list[Candidate]:
    """Return the baselines, those that are a candidate on other devices of the same kind as that candidate."""
    if answer.baselines is None:
        return []
    symmetry = DeviceSymmetry(answer.problem.cluster)
    candidates = {
        (candidate.dtype, symmetry.canonical_key(candidate.plan)): candidate for candidate in answer.candidates
    }
    return [candidates.get((plan.dtype, symmetry.canonical_key(plan.plan)), plan) for plan in answer.baselines.plans]


def _in_any_format(candidates: Iterable[Candidate]) -> list[Candidate]:
    return [replace(candidate, plan=candidate.plan.in_any_format) for candidate in candidates]


def order_trials(
    candidates: list[Candidate], baselines: list[Candidate], objective: Objective = Objective.TIME
) -> tuple[PlannedTrial, ...]:
    """Alternate candidates and baselines, so that an early end leaves both; a plan in both lists is tried once."""
    candidate_plans = {candidate.plan for candidate in candidates}
    baseline_plans = {baseline.plan for baseline in baselines}
    values: dict[Plan, float] = {c.plan: objective_value(c, objective) for c in (*baselines, *candidates)}
    overall = {plan: number for number, plan in enumerate(sorted(values, key=lambda plan: values[plan]), start=1)}

    def trial(role: Role, rank: int, candidate: Candidate) -> PlannedTrial:
        return PlannedTrial(
            name=f"{role.lower()}-{rank}",
            role=role,
            counts_as_baseline=candidate.plan in baseline_plans,
            rank=rank,
            overall_rank=overall[candidate.plan],
            predicted_seconds=candidate.estimate.iteration_seconds,
            predicted_peak_memory_bytes=candidate.estimate.peak_memory_bytes,
            summary=plan_summary.name(candidate.plan),
            plan=candidate.plan,
            dtype=candidate.dtype,
        )

    first = [trial(Role.CANDIDATE, rank, candidate) for rank, candidate in enumerate(candidates, start=1)]
    second = [
        trial(Role.BASELINE, rank, baseline)
        for rank, baseline in enumerate(baselines, start=1)
        if baseline.plan not in candidate_plans
    ]
    return tuple(t for pair in zip_longest(first, second) for t in pair if t is not None)


def fit_into_config_map(trials: Sequence[PlannedTrial]) -> tuple[PlannedTrial, ...]:
    """Return as many of the first trials as one ConfigMap holds, at least one: a plan of 4000 devices takes 270 KB."""
    sizes = accumulate(len(documents.dumps(trial.plan).encode()) for trial in trials)
    return tuple(
        trial
        for number, (trial, size) in enumerate(zip(trials, sizes, strict=True))
        if not number or size <= MAX_PLANS_BYTES
    )


EXIT_INFEASIBLE: Final = 3
EXIT_OUT_OF_MEMORY: Final = 4
MAX_WORDS: Final = 500
"""Length of the words on a failure."""
_SHARE: Final = 0.6
"""Share of the container's memory for all searches; the rest is for the operator and the processes' start."""
USUAL_PRIORITY: Final = "usual-priority"
"""Second argument of a process that does not give way; it also reports its progress on standard error, as workers do."""
_REPORT_SECONDS: Final = 0.5
"""Pause between two lines of progress."""
_NICENESS = 10
"""Low priority: a search occupies a whole core, and measurements on the same machine go first."""


def read_end(code: int, output: str, errors: str) -> tuple[PlannerState, str]:
    """Return the state in which a search process ended, with its answer or why it has none."""
    if code == 0:
        return PlannerState.DONE, output
    if code == EXIT_INFEASIBLE:
        return PlannerState.INFEASIBLE, plain_line(output)
    lines = [line for line in errors.splitlines() if line.strip() and not line.startswith(PROGRESS_MARKER)]
    last = lines[-1] if lines else ""
    return PlannerState.FAILED, plain_line(f"exit code {code}: {last}")[:MAX_WORDS]


def progress_writer() -> Callable[[SearchProgress], None]:
    """Return a callback that writes progress to standard error, but not every step."""
    due = 0.0

    def write(step: SearchProgress) -> None:
        nonlocal due
        if time.monotonic() >= due:
            progress = Progress(min(step.done, step.total), step.total, "steps of the search")
            sys.stderr.write(f"{PROGRESS_MARKER} {documents.dumps(progress)}\n")
            sys.stderr.flush()
            due = time.monotonic() + _REPORT_SECONDS

    return write


def begin(concurrent: int, *, gives_way: bool = True) -> int | None:
    """Give this process its priority and its share of the memory, and return that; None without a limit.

    `concurrent`: the number of processes that share the memory; `gives_way`: whether measurements run on this machine meanwhile.
    """
    if gives_way:
        os.nice(_NICENESS)
    gc.freeze()  # what imports made stays: collections need not walk through it
    allowed = allowed_bytes(_SHARE / concurrent)
    if allowed is not None:
        limit_memory(allowed)
    return allowed


def main(concurrent: int, *, gives_way: bool = True) -> int:
    """Answer one request; the arguments are those of `begin`."""
    allowed = begin(concurrent, gives_way=gives_way)
    request = PlanningRequest(**json.load(sys.stdin))
    try:
        answer = search(request, None if gives_way else progress_writer())
    except NoFeasiblePlan as refusal:
        answer = str(refusal)
        sys.stdout.write(answer)
        return EXIT_INFEASIBLE
    except MemoryError:
        share = f"its limit of {allowed >> 20} MiB" if allowed is not None else "is available"
        sys.stderr.write(
            f"out of memory: the search needs more than {share}; raise the operator's memory limit "
            "(resources.limits.memory), or bound the search with search.limits.maxTensorDegree or devices.max\n"
        )
        return EXIT_OUT_OF_MEMORY
    sys.stdout.write(answer)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), gives_way=sys.argv[2:] != [USUAL_PRIORITY]))
