"""Phase `Planned`: the search over the measured tables, in its own process."""

from __future__ import annotations

import hashlib
from datetime import datetime
from typing import Final

from trainwright import documents
from trainwright.cluster import Cluster
from trainwright.profiles import Profiles
from trainwright.runtime import Runtime
from trainwright_operator.api.conditions import ConditionType
from trainwright_operator.api.spec import Baseline
from trainwright_operator.api.status import ConfigMapReference, Phase
from trainwright_operator.flow.actions import AnnotateConfigMap, PlanningRequest, StartPlanner, StoredRole
from trainwright_operator.flow.gangs.worker_log import parse_strict
from trainwright_operator.flow.names import SEARCH_STARTED_ANNOTATION
from trainwright_operator.flow.phases.acceptance import model_from_spec
from trainwright_operator.flow.phases.discovery import DOCUMENT_KEY
from trainwright_operator.flow.phases.result import with_prices
from trainwright_operator.flow.reasons import Reason, message
from trainwright_operator.flow.snapshot import PlannerFacts, PlannerState
from trainwright_operator.flow.status_update import Book, PhaseFailed
from trainwright_operator.flow.trials.planned_trials import BASELINE_COUNT, PlannedTrials

RUNTIME_KEY: Final = "runtime.json"
SEARCH_DEADLINE_SECONDS: Final = 1800
"""Search limit, well above the largest search.budgetSeconds. A longer search would cost more than the trials it
saves."""


def plan(book: Book, cluster: Cluster, runtime: Runtime, profiles: Profiles) -> PlannedTrials | None:
    """Return the planned trials once stored. Raise PhaseFailed where there are none."""
    cluster = with_prices(cluster, book.spec.devices)
    _keep_cluster(book, cluster, runtime)
    name = book.names.candidates(book.spec.trials.top_k)
    stored = book.snapshot.find(name)
    if stored is not None:
        planned: PlannedTrials = parse_strict(stored.data.get(DOCUMENT_KEY, ""), PlannedTrials, name)
        book.fields["candidates_ref"] = ConfigMapReference(config_map=name)
        book.say(
            ConditionType.PLANNED,
            "True",
            Reason.PLANNED,
            trials=len(planned.trials),
            planner=planned.planner,
            seconds=planned.search_seconds,
            best=planned.best.predicted_seconds,
            stopped=", stopped by search.budgetSeconds" if planned.stopped_by_budget else "",
            left=f" ({planned.without_room} more are too large to be kept)" if planned.without_room else "",
        )
        return planned
    _advance_search(book, name, planning_request(book, cluster, runtime, profiles))
    return None


def planning_request(book: Book, cluster: Cluster, runtime: Runtime, profiles: Profiles) -> PlanningRequest:
    """Return the search request."""
    spec = book.spec
    parts = tuple(documents.dumps(noun) for noun in (cluster, model_from_spec(spec), profiles, runtime))
    baselines = BASELINE_COUNT if spec.trials.baseline is Baseline.MEGATRON and spec.trials.top_k > 0 else 0
    question = f"{book.names.base} {spec.trials.top_k} {parts}"
    return PlanningRequest(
        key=hashlib.sha256(question.encode()).hexdigest(),
        cluster=parts[0],
        model=parts[1],
        profiles=parts[2],
        runtime=parts[3],
        global_batch_size=spec.training.global_batch_size,
        optimizer=spec.training.optimizer,
        planner=spec.search.planner.search,
        objective=spec.search.objective.search,
        tolerance=spec.search.tolerance,
        effort=spec.search.effort,
        budget_seconds=spec.search.budget_seconds,
        top_k=spec.trials.top_k,
        baselines=baselines,
        max_tensor_degree=spec.search.limits.max_tensor_degree,
    )


def _advance_search(book: Book, name: str, request: PlanningRequest) -> None:
    planner = book.snapshot.planner
    asked = f"{book.plan.generation} {request.key}"
    stored_start = _stored_search_start(book, asked)
    if planner.key != request.key:
        planner = PlannerFacts()
    state = planner.state
    since = stored_start or planner.started_at
    if state is PlannerState.INFEASIBLE:
        raise PhaseFailed(Reason.NO_FEASIBLE_PLAN, message(Reason.NO_FEASIBLE_PLAN, what=planner.message))
    if state is PlannerState.FAILED:
        raise PhaseFailed(Reason.PLANNER_FAILED, message(Reason.PLANNER_FAILED, what=planner.message))
    if state is PlannerState.DONE:
        book.store(name, {DOCUMENT_KEY: planner.answer}, role=StoredRole.DOCUMENT)
    elif since is not None and (book.now - since).total_seconds() > SEARCH_DEADLINE_SECONDS:
        raise PhaseFailed(
            Reason.PLANNING_TIMED_OUT, message(Reason.PLANNING_TIMED_OUT, seconds=SEARCH_DEADLINE_SECONDS)
        )
    elif state is PlannerState.IDLE:
        book.do(StartPlanner(request))
    elif stored_start is None and planner.started_at is not None and book.snapshot.find(book.names.cluster) is not None:
        # Makes the deadline hold across restarts of the operator, each of which restarts the search.
        started = f"{planner.started_at.isoformat()} {asked}"
        book.do(AnnotateConfigMap(book.names.cluster, {SEARCH_STARTED_ANNOTATION: started}))
    book.tell_progress(Phase.PLANNING, "searches", 0, 1)
    doing = f"waits for {planner.ahead} of other plans" if planner.ahead else "runs"
    book.say(ConditionType.PLANNED, "Unknown", Reason.RUNNING, what=f"the search {request.planner} {doing}")


def _stored_search_start(book: Book, asked: str) -> datetime | None:
    """Return when the search for this generation and request began, possibly before a restart of the operator."""
    stored = book.snapshot.find(book.names.cluster)
    started, _, what = (stored.annotations if stored else {}).get(SEARCH_STARTED_ANNOTATION, "").partition(" ")
    return datetime.fromisoformat(started) if what == asked else None


def _keep_cluster(book: Book, cluster: Cluster, runtime: Runtime) -> None:
    """Store the cluster and its runtime so that users can repeat the predictions; the operator never reads them."""
    name = book.names.cluster
    if book.snapshot.find(name) is None:
        data = {DOCUMENT_KEY: documents.dumps(cluster), RUNTIME_KEY: documents.dumps(runtime)}
        book.store(name, data, role=StoredRole.DOCUMENT)
    book.fields["cluster_ref"] = ConfigMapReference(config_map=name)
