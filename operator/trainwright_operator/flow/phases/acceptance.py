"""Phase `Accepted`: the spec is valid, a worker image is set, and the API server admits the pods.

Waits for the answer to a dry run, which the next pass has. A template that the API server calls invalid ends the plan;
where the cluster lacks the CRD, or forbids the job (a quota, missing rights, a policy), the dry run is repeated.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime

from trainwright import documents
from trainwright.layer import Dtype
from trainwright.worker_api import Gang, GangNode, LinkTask
from trainwright_operator.api.conditions import ConditionType
from trainwright_operator.flow.actions import DeleteConfigMap, DryRunJob, StoredRole
from trainwright_operator.flow.gangs.manifests import GangSpec, manifests
from trainwright_operator.flow.gangs.outcome import parse_outcome
from trainwright_operator.flow.number_formats import model_from_spec
from trainwright_operator.flow.phase import Done, Failed, Findings, PhaseResult, PlanPhase, ReconcileContext, Waiting
from trainwright_operator.flow.reasons import Reason, explain

_PROBE = GangSpec(
    name="dry-run",
    task=LinkTask(gang=Gang(nodes=(GangNode("a", (0,), "a"), GangNode("b", (0,), "b")))),
    pending_seconds=60,
    run_seconds=60,
)
"""Gang with a Master and a Worker, rendered for the dry run and never created."""
_REPEATED = (Reason.PYTORCHJOB_MISSING, Reason.JOB_REFUSED)
_REPEAT_SECONDS = 30
"""Interval of dry runs while the cluster lacks something."""


def accept(context: ReconcileContext, findings: Findings) -> PhaseResult:
    """Accept the model, the image and the pods once for each generation."""
    known = context.condition(ConditionType.ACCEPTED)
    if known is not None and known.status == "True" and known.observed_generation == context.plan.generation:
        return Done(findings)
    try:
        model_from_spec(context.spec, Dtype.FLOAT32)
    except ValueError as error:
        return Failed(explain(Reason.SPEC_INVALID, what=error))
    if not context.plan.image:
        return Failed(explain(Reason.WORKER_IMAGE_MISSING))
    return _try_template(context, findings)


def _try_template(context: ReconcileContext, findings: Findings) -> PhaseResult:
    """Ask the API server for a dry run of a job with the plan's pod template."""
    manifest = manifests(context, _PROBE)[0]
    key = hashlib.sha256(f"{context.plan.generation} {manifest}".encode()).hexdigest()
    tried = context.snapshot.dry_run
    if tried is None or not tried.key.startswith(key):
        return Waiting(actions=(DryRunJob(key, manifest),), live_gangs=_current_gangs(context))
    if not tried.reason:
        return Done(findings, explain(Reason.ACCEPTED))
    explanation = explain(Reason(tried.reason), what=tried.message)
    if explanation.reason not in _REPEATED:
        return Failed(explanation)
    period = int(context.now.timestamp() / _REPEAT_SECONDS)
    current = f"{key} {period}"
    return Waiting(
        explanation,
        actions=() if tried.key == current else (DryRunJob(current, manifest),),
        live_gangs=_current_gangs(context),
        is_lacking=True,
        again_at=datetime.fromtimestamp((period + 1) * _REPEAT_SECONDS, UTC),
    )


def discard_transient_failures(context: ReconcileContext, findings: Findings) -> PhaseResult:
    """Delete environmental failures of former generations and versions, so that their gangs run again."""
    discards = []
    for stored in context.snapshot.stored:
        if stored.role != StoredRole.RESULT or stored.terminating or not context.names.owns(stored.name):
            continue
        try:
            outcome = parse_outcome(stored)
        except documents.DocumentError:
            continue  # reported where the result is read
        if not outcome.counts_for(context.plan.generation):
            discards.append(DeleteConfigMap(stored.name))
    if discards:
        return Waiting(actions=tuple(discards), live_gangs=_current_gangs(context))
    return Done(findings)


def _current_gangs(context: ReconcileContext) -> frozenset[str]:
    """Return the gangs of the same identity, which keep running while an edited spec is being accepted."""
    stored = (one for one in context.snapshot.stored if one.role == StoredRole.TASK)
    return frozenset(one.gang for one in stored if context.names.owns(one.name))


PHASE = PlanPhase(ConditionType.ACCEPTED, (accept, discard_transient_failures))
