"""Phase `Planned`: the search over the measured tables, in its own process.

Waits for the searches of other plans and for its own. Fails where the search takes more than `SEARCH_DEADLINE_SECONDS`, or
where the operator ended during each of `MAX_SEARCH_STARTS` searches.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from datetime import datetime
from typing import Final

from trainwright import documents
from trainwright.answer import NodeWorth
from trainwright.worker_api import Progress
from trainwright_operator.api.spec import AUTO, Baseline
from trainwright_operator.api.status import ConfigMapReference, NodeWorthStatus, TrainingPlanStatus, UnlimitedStatus
from trainwright_operator.flow.actions import (
    Action,
    AnnotateConfigMap,
    CreateConfigMap,
    PlanningRequest,
    StartPlanner,
    StoredRole,
)
from trainwright_operator.flow.documents.discovered_devices import DiscoveredDevices
from trainwright_operator.flow.documents.number_formats import model_from_spec
from trainwright_operator.flow.documents.planned_trials import BASELINE_COUNT, PlannedTrials
from trainwright_operator.flow.documents.stored_documents import stored_time
from trainwright_operator.flow.measurements.former_revision import former_revision
from trainwright_operator.flow.names import DOCUMENT_KEY, SEARCH_STARTED_ANNOTATION
from trainwright_operator.flow.phase import Done, Failed, Findings, PhaseResult, ReconcileContext, Waiting
from trainwright_operator.flow.reasons import Reason, explain
from trainwright_operator.flow.snapshot import PlannerFacts, PlannerState, StoredConfigMap
from trainwright_operator.flow.trials import trial_gangs

RUNTIME_KEY: Final = "runtime.json"
SEARCH_DEADLINE_SECONDS: Final = 1800
"""Search limit, well above the largest search.budgetSeconds. A longer search would cost more than the trials it
saves."""
MAX_SEARCH_STARTS: Final = 5
"""Starts of one search, each of which gets its whole time: it may be what ends the operator, by its memory."""


def store_cluster(context: ReconcileContext, findings: Findings) -> Done:
    """Store the cluster and its runtime so that users can repeat the predictions; the operator never reads them.

    It comes first: a search that fails leaves the reference in the status.
    """
    name, links = context.names.cluster, findings.links
    actions: tuple[CreateConfigMap, ...] = ()
    if context.snapshot.find(name) is None:
        data = {DOCUMENT_KEY: documents.dumps(links.cluster), RUNTIME_KEY: documents.dumps(links.runtime)}
        actions = (CreateConfigMap(name, StoredRole.DOCUMENT, data),)
    return Done(findings, status=TrainingPlanStatus(cluster_ref=ConfigMapReference(config_map=name)), actions=actions)


def plan(context: ReconcileContext, findings: Findings) -> PhaseResult:
    """Read the planned trials, or search for them and store them."""
    name = context.names.candidates(context.spec.trials.top_k)
    planned = context.stored_document(name, PlannedTrials)
    if planned is None:
        return _search(context, name, planning_request(context, findings))
    _check_devices(planned, findings.discovery, name)
    explanation = explain(
        Reason.PLANNED,
        trials=len(planned.trials),
        planner=planned.planner,
        seconds=planned.search_seconds,
        best=planned.best.predicted_seconds,
        stopped=", stopped by search.budgetSeconds" if planned.stopped_by_budget else "",
        dtype=f" in {planned.best.dtype}" if planned.best.dtype is not None else "",
        slow=f"; {planned.slow_format}" if planned.slow_format else "",
        free=_unlimited_sentence(planned),
        why=f"; it {planned.why}" if planned.why else "",
        left=f" ({planned.without_room} more do not fit into the ConfigMap)" if planned.without_room else "",
    )
    status = TrainingPlanStatus(
        candidates_ref=ConfigMapReference(config_map=name), search_seconds=planned.search_seconds
    )
    if planned.unlimited_seconds is not None:
        gain = UnlimitedStatus(predicted_seconds=planned.unlimited_seconds, gain=planned.unlimited_gain)
        status = status.model_copy(update={"unlimited": gain})
    if planned.node_worth:
        status = status.model_copy(update={"node_worth": tuple(map(_worth_status, planned.node_worth))})
    return Done(replace(findings, planned=planned), explanation, status=status)


def _worth_status(worth: NodeWorth) -> NodeWorthStatus:
    return NodeWorthStatus(
        accelerator=worth.accelerator,
        devices=worth.devices,
        predicted_seconds=worth.without_seconds,
        slowdown=worth.slowdown,
        price_per_hour=worth.price_per_hour,
    )


def _unlimited_sentence(planned: PlannedTrials) -> str:
    if planned.unlimited_seconds is None:
        return ""
    return (
        f"; without search.expressibleBy an iteration would take {planned.unlimited_seconds:.4g} s, "
        f"{planned.unlimited_gain:.1%} less"
    )


def _check_devices(planned: PlannedTrials, discovery: DiscoveredDevices, source: str) -> None:
    """Raise DocumentError where a trial uses a device that was not discovered."""
    devices = {node.name: node.devices for node in discovery.nodes}
    used = (device for trial in planned.trials for device in trial.plan.devices)
    unknown = next((device for device in used if device.slot >= devices.get(device.node, 0)), None)
    if unknown is not None:
        raise documents.DocumentError(f"{source}: a trial uses {unknown}, which is none of the plan's devices")


def planning_request(context: ReconcileContext, findings: Findings) -> PlanningRequest:
    """Return the search request."""
    spec = context.spec
    links = findings.links
    (dtype, profiles), *further = findings.profiles
    nouns = (links.cluster, model_from_spec(spec, dtype), profiles, links.runtime)
    parts = tuple(documents.dumps(noun) for noun in nouns)
    models = tuple(documents.dumps(model_from_spec(spec, dtype)) for dtype, _ in further)
    tables = tuple(documents.dumps(profiles) for _, profiles in further)
    baselines = BASELINE_COUNT if spec.trials.baseline is Baseline.MEGATRON and spec.trials.top_k > 0 else 0
    running = former_revision(context).running_plan
    question = f"{context.names.base} {spec.trials.top_k} {(*parts, *models, *tables)}"
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
        chooses_format=spec.training.dtype == AUTO,
        further_models=models,
        further_profiles=tables,
        keep=documents.dumps(running) if running is not None else "",
        expressible_by=spec.search.expressible_by.target if spec.search.expressible_by is not None else "",
    )


def _search(context: ReconcileContext, name: str, request: PlanningRequest) -> Waiting | Failed:
    planner, stored_cluster = context.snapshot.planner, context.snapshot.find(context.names.cluster)
    request_text = f"{context.plan.generation} {request.key}"
    last_start, starts = _known_starts(stored_cluster, request_text)
    if planner.key != request.key:
        planner = PlannerFacts()
    actions: tuple[Action, ...] = ()
    if planner.state is PlannerState.INFEASIBLE:
        return Failed(explain(Reason.NO_FEASIBLE_PLAN, what=planner.message))
    if planner.state is PlannerState.FAILED:
        return Failed(explain(Reason.PLANNER_FAILED, what=planner.message))
    if planner.state is PlannerState.TIMED_OUT:
        return Failed(explain(Reason.PLANNING_TIMED_OUT, seconds=SEARCH_DEADLINE_SECONDS))
    if planner.state is PlannerState.IDLE and starts >= MAX_SEARCH_STARTS:
        return Failed(explain(Reason.PLANNER_FAILED, what=f"the operator ended during each of {starts} searches"))
    if planner.state is PlannerState.DONE:
        actions = (CreateConfigMap(name, StoredRole.DOCUMENT, {DOCUMENT_KEY: planner.answer}),)
    elif planner.state is PlannerState.IDLE:
        actions = (StartPlanner(request),)
    elif planner.started_at not in (None, last_start) and stored_cluster is not None:
        started = f"{planner.started_at.isoformat()} {starts + 1} {request_text}"
        actions = (AnnotateConfigMap(stored_cluster.name, {SEARCH_STARTED_ANNOTATION: started}),)
    doing = f"waits for {planner.ahead} searches of other plans" if planner.ahead else "is running"
    explanation = explain(Reason.RUNNING, what=f"search {request.planner} {doing}")
    # Most edits that need a new search plan the running trial again; the next phase deletes it where this one did not.
    live_gangs = trial_gangs.gangs_under_way(context)
    return Waiting(explanation, planner.progress or Progress(0, 1, "search"), live_gangs, actions=actions)


def _known_starts(stored_cluster: StoredConfigMap | None, request_text: str) -> tuple[datetime | None, int]:
    """Return when the search for a generation and request began last, and how many times, by former operators too."""
    annotations = stored_cluster.annotations if stored_cluster is not None else {}
    started, _, further = annotations.get(SEARCH_STARTED_ANNOTATION, "").partition(" ")
    starts, _, what = further.partition(" ")
    return (stored_time(started), int(starts)) if what == request_text and starts.isdecimal() else (None, 0)
