"""Page of a plan's answer, drawn and stored once there is one. Nothing waits for it, and nothing fails with it.

It is drawn in a process of its own, and stored under a name that differs for each answer; `status.report` tells which one
is there, or why there is none.
"""

from __future__ import annotations

import hashlib
import json
from datetime import timedelta
from typing import Final

from trainwright.documents import DocumentError, dumps
from trainwright_operator.api.conditions import ConditionType
from trainwright_operator.api.status import ReportStatus, TrainingPlanStatus
from trainwright_operator.flow.actions import (
    Action,
    CreateConfigMap,
    DeleteConfigMap,
    DrawPage,
    PageRequest,
    SetStatus,
    StoredRole,
)
from trainwright_operator.flow.documents.config_map_data import ConfigMapData
from trainwright_operator.flow.documents.outcome import REPORT_KEY
from trainwright_operator.flow.documents.stored_documents import NeedsNewerVersion
from trainwright_operator.flow.phase import Done, Findings, ReconcileContext
from trainwright_operator.flow.phases import discovery, links, planning, profiling
from trainwright_operator.flow.snapshot import PlannerFacts, PlannerState

PAGE_KEY: Final = "report.html"
MAX_PAGE_BYTES: Final = 700_000
"""Maximum size of a page as it is stored."""
_DRAWING: Final = timedelta(hours=1)
"""Age of an answer until which its page is drawn: an operator that is upgraded does not draw those of all former plans."""
_READ: Final = (discovery.discover, links.measure_links, profiling.profile, planning.plan)
"""Functions that read what a plan with an answer has stored."""


def keep_page(context: ReconcileContext) -> tuple[Action, ...]:
    """Return the next step towards the page of a plan that has its answer."""
    status = context.plan.status
    if not context.snapshot.draws_pages or context.plan.spec is None or not _has_winner(status):
        return ()
    name = page_name(context)
    if context.snapshot.find(name) is not None:
        former = tuple(
            DeleteConfigMap(stored.name)
            for stored in context.snapshot.stored
            if stored.role == StoredRole.PAGE and stored.name != name and not stored.terminating
        )
        return (*_set_report(status, ReportStatus(config_map=name)), *former)
    if context.snapshot.planner.key != name:
        return _start(context, name)
    return _drawn(status, context.snapshot.planner)


def _drawn(status: TrainingPlanStatus, planner: PlannerFacts) -> tuple[Action, ...]:
    """Return the step of a page that is drawn, or was."""
    if planner.state is PlannerState.RUNNING:
        return ()
    if planner.state is not PlannerState.DONE:
        return _set_report(status, ReportStatus(problem=planner.message or "it was not drawn in time"))
    creation = CreateConfigMap(planner.key, StoredRole.PAGE, {PAGE_KEY: planner.answer})
    size = ConfigMapData.of(creation).bytes
    if size > MAX_PAGE_BYTES:
        return _set_report(
            status, ReportStatus(problem=f"it has {size} bytes, and at most {MAX_PAGE_BYTES} are stored")
        )
    return (creation,)


def page_name(context: ReconcileContext) -> str:
    """Return the name of the ConfigMap with the page of the present answer."""
    status = context.plan.status
    winner = status.winner
    assert winner is not None
    trials = [[trial.name, trial.state, trial.measured_seconds] for trial in status.trials]
    answer = json.dumps([winner.trial, winner.summary, winner.measured_seconds, winner.revision, trials])
    return context.names.child(f"report-{hashlib.sha256(answer.encode()).hexdigest()[:8]}")


def page_request(context: ReconcileContext, key: str) -> PageRequest | None:
    """Return the request for the page of the present answer; None where what it rests on cannot be read any more."""
    status, findings = context.plan.status, Findings()
    try:
        for read in _READ:
            result = read(context, findings)
            if not isinstance(result, Done):
                return None
            findings = result.findings
    except (DocumentError, NeedsNewerVersion):
        return None
    return PageRequest(
        key=key,
        plan=context.plan.name,
        namespace=context.plan.namespace,
        question=planning.planning_request(context, findings),
        planned=dumps(findings.planned),
        status=json.dumps(status.dump()),
        report=_winners_report(context),
    )


def _start(context: ReconcileContext, name: str) -> tuple[Action, ...]:
    succeeded = context.condition(ConditionType.SUCCEEDED)
    if succeeded is None or context.now - succeeded.last_transition_time > _DRAWING:
        return ()
    request = page_request(context, name)
    return (DrawPage(request),) if request is not None else ()


def _winners_report(context: ReconcileContext) -> str:
    """Return what the winner's trial measured, with its timeline; empty where nothing was tried."""
    status = context.plan.status
    reference = next(
        (trial.result_ref for trial in status.trials if status.winner and trial.name == status.winner.trial), None
    )
    stored = context.snapshot.find(reference.config_map) if reference is not None else None
    return stored.data.get(REPORT_KEY, "") if stored is not None else ""


def _has_winner(status: TrainingPlanStatus) -> bool:
    succeeded = status.condition(ConditionType.SUCCEEDED)
    return succeeded is not None and succeeded.status == "True" and status.winner is not None


def _set_report(status: TrainingPlanStatus, report: ReportStatus) -> tuple[SetStatus, ...]:
    return () if status.report == report else (SetStatus(status.model_copy(update={"report": report})),)
