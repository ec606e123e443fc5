"""Search process: a request as JSON on standard input, the plans to try on standard output.

Exit 0: standard output holds a `PlannedTrials` document. Exit 3: no plan is feasible, and standard output holds the
reason. Otherwise (4: out of memory) the last line of standard error holds the failure.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import Final

from trainwright import documents
from trainwright.cluster import Cluster
from trainwright.model import Model
from trainwright.plan import Plan
from trainwright.profiles import Profiles
from trainwright.runtime import Runtime
from trainwright.search import Candidate, Limits, NoFeasiblePlan, Objective, Preference, Problem, SearchControl, run
from trainwright.training import Optimizer
from trainwright.trial_selection import TrialHistory
from trainwright_operator.flow.actions import PlanningRequest
from trainwright_operator.flow.trials.planned_trials import PlannedTrial, PlannedTrials, Role, Uncertainty

_BASELINE_PLANNER = "megatron"
MAX_PLANS_BYTES: Final = 900_000
"""Limit on the plans in a ConfigMap, which holds 1 MiB together with their metadata."""
_OPTIMIZERS: dict[str, Optimizer] = {"adam": "adam", "sgd": "sgd"}


def search(request: PlanningRequest) -> str:
    """Return the `PlannedTrials` document for a request.

    Raise NoFeasiblePlan, or ValueError for an invalid request.
    """
    started = time.monotonic()
    cluster: Cluster = documents.loads(request.cluster, Cluster, source="cluster")
    profiles: Profiles = documents.loads(request.profiles, Profiles, source="profiles")
    problem = Problem(
        cluster=cluster,
        model=documents.loads(request.model, Model, source="model"),
        profiles=profiles,
        global_batch_size=request.global_batch_size,
        limits=Limits(
            max_tensor_degree=request.max_tensor_degree,
            objective=Objective(request.objective),
            spare=_accelerators_without_memory(cluster, profiles),
        ),
        optimizer=_OPTIMIZERS[request.optimizer],
        runtime=documents.loads(request.runtime, Runtime, source="runtime"),
        preference=Preference(request.tolerance),
    )
    control = SearchControl.with_budget(request.budget_seconds, effort=request.effort)
    candidates = run(request.planner, problem, top=max(request.top_k, 1), control=control)
    baselines = _baselines(problem, request.baselines) if request.baselines else []
    every = order_trials(candidates, baselines, problem.limits.objective)
    trials = fit_into_config_map(every)
    uncertainty = _uncertainty(problem, trials)
    seconds, stopped = time.monotonic() - started, control.budget_exhausted.is_set()
    return documents.dumps(
        PlannedTrials(request.planner, seconds, trials, uncertainty, stopped, len(every) - len(trials))
    )


def _accelerators_without_memory(cluster: Cluster, profiles: Profiles) -> tuple[str, ...]:
    """Return accelerators too small for some layer, which plans omit. Raise NoFeasiblePlan if all are."""
    lacking = profiles.accelerators_without_memory()
    if lacking and {node.accelerator for node in cluster.nodes} <= lacking.keys():
        told = ", ".join(f"{kind} on {accelerator}" for accelerator, kind in lacking.items())
        raise NoFeasiblePlan(f"no accelerator has enough memory for every layer, even with one row; too large: {told}")
    return tuple(lacking)


def _uncertainty(problem: Problem, trials: tuple[PlannedTrial, ...]) -> Uncertainty:
    known = TrialHistory.of([trial.plan for trial in trials], problem.cost_context).posterior
    covariance = tuple(tuple(row) for row in known.seconds.covariance.tolist())
    return Uncertainty(covariance, tuple(known.memory.expected.tolist()))


def _baselines(problem: Problem, count: int) -> list[Candidate]:
    """Return the heuristic's best plans, or none if none of its plans fits."""
    try:
        return run(_BASELINE_PLANNER, replace(problem, preference=Preference()), top=count)
    except NoFeasiblePlan:
        return []


def order_trials(
    candidates: list[Candidate], baselines: list[Candidate], objective: Objective = Objective.TIME
) -> tuple[PlannedTrial, ...]:
    """Alternate candidates and baselines, so that an early end leaves both; a plan in both lists is tried once."""
    candidate_plans = {candidate.plan for candidate in candidates}
    baseline_plans = {baseline.plan for baseline in baselines}
    values: dict[Plan, float] = {c.plan: _value(c, objective) for c in (*baselines, *candidates)}
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
            summary=candidate.plan.summary(),
            plan=candidate.plan,
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


def _value(candidate: Candidate, objective: Objective) -> float:
    """Return the value that the objective minimises."""
    if objective is Objective.COST and candidate.price_per_row is not None:
        return candidate.price_per_row
    return candidate.estimate.iteration_seconds


EXIT_INFEASIBLE: Final = 3
EXIT_OUT_OF_MEMORY: Final = 4
CONTAINER_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")
_SHARE: Final = 0.6
"""Share of the container's memory for all searches; the rest is for the operator and the processes' start."""
_NICENESS = 10
"""Low priority: a search occupies a whole core, and measurements on the same machine go first."""


def main(concurrent: int) -> int:
    """Answer one request; `concurrent`: the number of searches that share the memory."""
    os.nice(_NICENESS)
    gc.freeze()  # what imports made stays: collections need not walk through it
    allowed = allowed_bytes(CONTAINER_LIMIT, concurrent)
    if allowed is not None:
        limit_memory(allowed)
    request = PlanningRequest(**json.load(sys.stdin))
    try:
        answer = search(request)
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


def allowed_bytes(container_limit: Path, concurrent: int) -> int | None:
    """Return bytes of the container's memory for each of `concurrent` searches, or None without a limit."""
    try:
        text = container_limit.read_text().strip()
    except OSError:
        return None  # no control groups of version 2: there the kernel ends the process that takes most, alone
    return int(int(text) * _SHARE / concurrent) if text.isdecimal() else None


def limit_memory(allowed: int) -> None:
    """Limit this process to `allowed` bytes more than its present address space.

    With cgroup v2, running out of memory kills the whole container, and the restarted operator would start the search
    again forever. With the limit only the search ends.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + allowed
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
