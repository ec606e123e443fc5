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
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, zip_longest
from typing import Final

from trainwright import documents
from trainwright.cluster import Cluster
from trainwright.exports import TARGETS
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.plan import Plan
from trainwright.profiles import Profiles
from trainwright.runtime import Runtime
from trainwright.search import Candidate, Limits, NoFeasiblePlan, Objective, Preference, Problem, SearchControl, run
from trainwright.search.baselines import best_on_one_accelerator
from trainwright.search.candidates import DeviceSymmetry
from trainwright.search.format_search import FormatAnswer, in_format, search_problems, slow_format, without
from trainwright.search.node_worth import NodeWorth, node_worths
from trainwright.training import Optimizer
from trainwright.trial_selection import TrialHistory
from trainwright_operator.flow.actions import PlanningRequest
from trainwright_operator.flow.documents.planned_trials import PlannedTrial, PlannedTrials, Role, Uncertainty
from trainwright_operator.memory_limit import allowed_bytes, limit_memory

_BASELINE_PLANNER = "megatron"
MAX_PLANS_BYTES: Final = 900_000
"""Limit on the plans in a ConfigMap, which holds 1 MiB together with their metadata."""
_OPTIMIZERS: dict[str, Optimizer] = {"adam": "adam", "sgd": "sgd"}


def search(request: PlanningRequest) -> str:
    """Return the `PlannedTrials` document for a request.

    Raise NoFeasiblePlan, or ValueError for an invalid request.
    """
    started = time.monotonic()
    problems = _problems(request)
    control = SearchControl.with_budget(request.budget_seconds, effort=request.effort)
    found = _find(request, problems, control)
    problem = found.problem
    baselines = _known(_baselines(request, problems, found), found)
    every = order_trials(list(found.candidates), baselines, problem.limits.objective)
    trials = fit_into_config_map(every)
    uncertainty = _uncertainty(problem, trials)
    seconds, stopped = time.monotonic() - started, control.budget_exhausted.is_set()
    free = next((one.unlimited_seconds for one in found.candidates if one.unlimited_seconds is not None), None)
    return documents.dumps(
        PlannedTrials(
            planner=request.planner,
            search_seconds=seconds,
            trials=trials,
            uncertainty=uncertainty,
            stopped_by_budget=stopped,
            without_room=len(every) - len(trials),
            slow_format=_slow_words(found),
            unlimited_seconds=free,
            node_worth=_node_worth(request, problems, found, control),
        )
    )


def _node_worth(
    request: PlanningRequest, problems: Sequence[Problem], found: FormatAnswer, control: SearchControl
) -> tuple[NodeWorth, ...]:
    """Search without each accelerator in what the search left of its budget; for other objectives than time there is no answer."""
    problem = max(problems, key=lambda one: len(one.accelerators))
    if control.expired() or problem.limits.objective is not Objective.TIME:
        return ()
    best = min(found.candidates, key=lambda one: one.estimate.iteration_seconds)

    def find(one: Problem, part: SearchControl) -> list[Candidate]:
        return run(request.planner, one, top=1, control=part)

    def find_without(name: str, part: SearchControl) -> float:
        left = [
            without(replace(one, preference=Preference()), [name]) for one in problems if {*one.accelerators} - {name}
        ]
        return search_problems(left, find, part, 1).candidates[0].estimate.iteration_seconds

    used = {problem.cluster.node(node).accelerator for node in best.plan.nodes}
    return tuple(node_worths(problem, best.estimate.iteration_seconds, used, find_without, control))


def _find(request: PlanningRequest, problems: Sequence[Problem], control: SearchControl) -> FormatAnswer:
    """Return the best candidates of all number formats, or of the one by name with its price if it is slow."""
    top = max(request.top_k, 1)

    def find(problem: Problem, part: SearchControl) -> list[Candidate]:
        return run(request.planner, problem, top=top, control=part)

    if request.chooses_format:
        try:
            return search_problems(problems, find, control, top)
        except NoFeasiblePlan:
            smaller = _in_float32(problems[0])
            if smaller is None:
                raise
            return search_problems([smaller], find, control, top)
    (problem,) = problems
    candidates = find(problem, control)
    return FormatAnswer(problem, tuple(candidates), slow_format(problem, candidates, find, control))


def _in_float32(problem: Problem) -> Problem | None:
    """Return the problem in float32, whose state is smaller, by scaled profiles; None without data sheets to scale by."""
    try:
        return None if problem.model.dtype is Dtype.FLOAT32 else in_format(problem, Dtype.FLOAT32)
    except ValueError:
        return None


def _slow_words(found: FormatAnswer) -> str:
    if found.slow is None:
        return ""
    from trainwright.report import slow_sentence  # noqa: PLC0415 - tables are slow to import, and rarely needed

    cluster = found.problem.cluster
    used = {cluster.node(node).accelerator for node in found.candidates[0].plan.nodes}
    return slow_sentence(found.slow, cluster, used).removesuffix(".")


def _problems(request: PlanningRequest) -> list[Problem]:
    """Return the problem in each number format in which some accelerator has enough memory.

    Raise NoFeasiblePlan if there is none.
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
    return problems


def _problem(request: PlanningRequest, model: str, tables: str) -> Problem:
    """Return the problem in one number format, without accelerators that lack memory or are not profiled in it."""
    cluster: Cluster = documents.loads(request.cluster, Cluster, source="cluster")
    profiles: Profiles = documents.loads(tables, Profiles, source="profiles")
    runtime: Runtime = documents.loads(request.runtime, Runtime, source="runtime")
    return Problem(
        cluster=cluster,
        model=documents.loads(model, Model, source="model"),
        profiles=profiles,
        global_batch_size=request.global_batch_size,
        limits=Limits(
            max_tensor_degree=request.max_tensor_degree,
            objective=Objective(request.objective),
            spare=_unusable(cluster, profiles),
            expressible_by=TARGETS[request.expressible_by].capabilities if request.expressible_by else None,
        ).leaving_unknown_memory(runtime, cluster),
        optimizer=_OPTIMIZERS[request.optimizer],
        runtime=runtime,
        preference=Preference(
            request.tolerance, documents.loads(request.keep, Plan, source="running plan") if request.keep else None
        ),
    )


def _unusable(cluster: Cluster, profiles: Profiles) -> tuple[str, ...]:
    """Return accelerators too small for some layer, and those that are not profiled in this number format.

    Raise NoFeasiblePlan if all that are profiled are too small.
    """
    lacking = profiles.accelerators_without_memory()
    known = {one.accelerator for one in profiles.layers} | {one.accelerator for one in profiles.too_large}
    other = tuple(dict.fromkeys(node.accelerator for node in cluster.nodes if known and node.accelerator not in known))
    if lacking and {node.accelerator for node in cluster.nodes} <= {*lacking, *other}:
        told = ", ".join(f"{kind} on {accelerator}" for accelerator, kind in lacking.items())
        raise NoFeasiblePlan(f"no accelerator has enough memory for every layer, even with one row; too large: {told}")
    return (*lacking, *other)


def _uncertainty(problem: Problem, trials: tuple[PlannedTrial, ...]) -> Uncertainty | None:
    """Return the uncertainty of the trials by the best one's profiles; None where those lack devices of another."""
    if not {device.node for trial in trials for device in trial.plan.devices} <= set(problem.nodes):
        return None
    known = TrialHistory.of([trial.plan for trial in trials], problem.cost_context).posterior
    covariance = tuple(tuple(row) for row in known.seconds.covariance.tolist())
    return Uncertainty(covariance, tuple(known.memory.expected.tolist()))


def _baselines(request: PlanningRequest, problems: Sequence[Problem], found: FormatAnswer) -> list[Candidate]:
    """Return as many of the heuristic's plans as are asked for, best first; none if none fits.

    They are the best one on all devices, in the best candidate's number format, the best one on the devices of one
    accelerator, in the format that is best there, and the next ones on all devices. If one is asked for, it is the better of
    the first two.
    """
    count, control = request.baselines, SearchControl()
    if not count:
        return []

    def find(one: Problem, part: SearchControl) -> list[Candidate]:
        return run(_BASELINE_PLANNER, one, top=count, control=part)

    formats = [found.problem, *(one for one in problems if one is not found.problem)]
    asked = [replace(one, preference=Preference()) for one in formats]
    of_all: tuple[Candidate, ...] = ()
    with suppress(NoFeasiblePlan):
        of_all = search_problems(asked[:1], find, control, count).candidates
    of_equal = best_on_one_accelerator(asked, find, control)
    every = (*of_all[:1], *(of_equal.candidates if of_equal is not None else ()), *of_all[1:])
    symmetry = DeviceSymmetry(found.problem.cluster)
    distinct: dict[Hashable, Candidate] = {}
    for one in every:
        distinct.setdefault(symmetry.canonical_key(one.plan), one)
    objective = found.problem.limits.objective
    kept = sorted([*distinct.values()][: max(count, 2)], key=lambda one: _value(one, objective))
    return [one if request.chooses_format else replace(one, dtype=None) for one in kept[:count]]


def _known(baselines: Sequence[Candidate], found: FormatAnswer) -> list[Candidate]:
    """Return the baselines, those that are a candidate on other devices of the same kind as that candidate."""
    symmetry = DeviceSymmetry(found.problem.cluster)
    candidates = {(one.dtype, symmetry.canonical_key(one.plan)): one for one in found.candidates}
    return [candidates.get((one.dtype, symmetry.canonical_key(one.plan)), one) for one in baselines]


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


def _value(candidate: Candidate, objective: Objective) -> float:
    """Return the value that the objective minimises."""
    if objective is Objective.COST and candidate.price_per_row is not None:
        return candidate.price_per_row
    return candidate.estimate.iteration_seconds


EXIT_INFEASIBLE: Final = 3
EXIT_OUT_OF_MEMORY: Final = 4
_SHARE: Final = 0.6
"""Share of the container's memory for all searches; the rest is for the operator and the processes' start."""
_NICENESS = 10
"""Low priority: a search occupies a whole core, and measurements on the same machine go first."""


def main(concurrent: int) -> int:
    """Answer one request; `concurrent`: the number of searches that share the memory."""
    os.nice(_NICENESS)
    gc.freeze()  # what imports made stays: collections need not walk through it
    allowed = allowed_bytes(_SHARE / concurrent)
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


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
