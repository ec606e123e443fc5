"""Running the search: what happens in the search's own process, away from the operator's event loop."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, zip_longest
from typing import Final

from trainwright import documents
from trainwright.cluster import Cluster
from trainwright.experiment import Study
from trainwright.model import Model
from trainwright.plan import Plan
from trainwright.profiles import Profiles
from trainwright.runtime import Runtime
from trainwright.search import Candidate, Control, Limits, NoFeasiblePlan, Objective, Preference, Problem, run
from trainwright.training import Optimizer
from trainwright_operator.flow.actions import PlanningRequest
from trainwright_operator.flow.candidates import PlannedTrial, PlannedTrials, Role, Uncertainty

_BASELINE_PLANNER = "megatron"
ROOM_BYTES: Final = 900_000
"""Of the plans in a ConfigMap, which holds a mebibyte; the rest is for what stands beside them."""
_OPTIMIZERS: dict[str, Optimizer] = {"adam": "adam", "sgd": "sgd"}


def search(request: PlanningRequest) -> str:
    """The `PlannedTrials` document for a request. Raises NoFeasiblePlan, or ValueError for what cannot be searched."""
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
            spare=_without_room(cluster, profiles),
        ),
        optimizer=_OPTIMIZERS[request.optimizer],
        runtime=documents.loads(request.runtime, Runtime, source="runtime"),
        preference=Preference(request.tolerance),
    )
    control = Control.within(request.budget_seconds, effort=request.effort)
    candidates = run(request.planner, problem, top=max(request.top_k, 1), control=control)
    baselines = _baselines(problem, request.baselines) if request.baselines else []
    every = arrange(candidates, baselines, problem.limits.objective)
    trials = with_room(every)
    uncertainty = _uncertainty(problem, trials)
    seconds, stopped = time.monotonic() - started, control.stopped.is_set()
    return documents.dumps(
        PlannedTrials(request.planner, seconds, trials, uncertainty, stopped, len(every) - len(trials))
    )


def _without_room(cluster: Cluster, profiles: Profiles) -> tuple[str, ...]:
    """Accelerators that lack the memory for some layer, which plans leave out. Raises NoFeasiblePlan where all do."""
    lacking = profiles.without_room()
    if lacking and {node.accelerator for node in cluster.nodes} <= lacking.keys():
        told = ", ".join(f"{kind} on {accelerator}" for accelerator, kind in lacking.items())
        raise NoFeasiblePlan(
            f"no accelerator has the memory for every layer by itself, with however few rows: too large are {told}"
        )
    return tuple(lacking)


def _uncertainty(problem: Problem, trials: tuple[PlannedTrial, ...]) -> Uncertainty:
    known = Study.of([trial.plan for trial in trials], problem.setting).known
    covariance = tuple(tuple(row) for row in known.seconds.covariance.tolist())
    return Uncertainty(covariance, tuple(known.memory.expected.tolist()))


def _baselines(problem: Problem, count: int) -> list[Candidate]:
    """The heuristic's best; none where it has no plan that fits, which is its loss and not the planner's."""
    try:
        return run(_BASELINE_PLANNER, replace(problem, preference=Preference()), top=count)
    except NoFeasiblePlan:
        return []


def arrange(
    candidates: list[Candidate], baselines: list[Candidate], objective: Objective = Objective.TIME
) -> tuple[PlannedTrial, ...]:
    """Candidates and baselines in turn, so that an early end leaves both; a plan in both lists is tried once."""
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


def with_room(trials: Sequence[PlannedTrial]) -> tuple[PlannedTrial, ...]:
    """As many of the first as one ConfigMap holds, and one at least: a plan of four thousand devices takes 270 KB."""
    sizes = accumulate(len(documents.dumps(trial.plan).encode()) for trial in trials)
    return tuple(
        trial
        for number, (trial, size) in enumerate(zip(trials, sizes, strict=True))
        if not number or size <= ROOM_BYTES
    )


def _value(candidate: Candidate, objective: Objective) -> float:
    """What is least in the best candidate."""
    if objective is Objective.COST and candidate.price_per_row is not None:
        return candidate.price_per_row
    return candidate.estimate.iteration_seconds
