"""Running the search: what happens in the search's own process, away from the operator's event loop."""

from __future__ import annotations

import time
from itertools import zip_longest

from trainwright import documents
from trainwright.cluster import Cluster
from trainwright.experiment import Study
from trainwright.model import Model
from trainwright.plan import Plan
from trainwright.profiles import Profiles
from trainwright.search import Candidate, Limits, NoFeasiblePlan, Problem, run
from trainwright.training import Optimizer
from trainwright_operator.flow.actions import PlanningRequest
from trainwright_operator.flow.candidates import PlannedTrial, PlannedTrials, Role, Uncertainty

_BASELINE_PLANNER = "megatron"
_OPTIMIZERS: dict[str, Optimizer] = {"adam": "adam", "sgd": "sgd"}


def search(request: PlanningRequest) -> str:
    """The `PlannedTrials` document for a request. Raises NoFeasiblePlan, or ValueError for what cannot be searched."""
    started = time.monotonic()
    problem = Problem(
        cluster=documents.loads(request.cluster, Cluster, source="cluster"),
        model=documents.loads(request.model, Model, source="model"),
        profiles=documents.loads(request.profiles, Profiles, source="profiles"),
        global_batch_size=request.global_batch_size,
        limits=Limits(max_tensor_degree=request.max_tensor_degree),
        optimizer=_OPTIMIZERS[request.optimizer],
    )
    candidates = run(request.planner, problem, top=max(request.top_k, 1))
    baselines = _baselines(problem, request.baselines) if request.baselines else []
    trials = arrange(candidates, baselines)
    uncertainty = _uncertainty(problem, trials)
    return documents.dumps(PlannedTrials(request.planner, time.monotonic() - started, trials, uncertainty))


def _uncertainty(problem: Problem, trials: tuple[PlannedTrial, ...]) -> Uncertainty:
    known = Study.of([trial.plan for trial in trials], problem.setting).known
    covariance = tuple(tuple(row) for row in known.seconds.covariance.tolist())
    return Uncertainty(covariance, tuple(known.memory.expected.tolist()))


def _baselines(problem: Problem, count: int) -> list[Candidate]:
    """The heuristic's best; none where it has no plan that fits, which is its loss and not the planner's."""
    try:
        return run(_BASELINE_PLANNER, problem, top=count)
    except NoFeasiblePlan:
        return []


def arrange(candidates: list[Candidate], baselines: list[Candidate]) -> tuple[PlannedTrial, ...]:
    """Candidates and baselines in turn, so that an early end leaves both; a plan in both lists is tried once."""
    candidate_plans = {candidate.plan for candidate in candidates}
    baseline_plans = {baseline.plan for baseline in baselines}
    seconds: dict[Plan, float] = {c.plan: c.estimate.iteration_seconds for c in (*baselines, *candidates)}
    overall = {plan: number for number, plan in enumerate(sorted(seconds, key=lambda plan: seconds[plan]), start=1)}

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
