"""Phase `Accepted`: the spec is valid, a worker image is set, and the API server admits the pods."""

from __future__ import annotations

import hashlib

from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.worker_api import Gang, GangNode, LinkTask
from trainwright_operator.api.conditions import ConditionType
from trainwright_operator.api.spec import TrainingPlanSpec
from trainwright_operator.flow.actions import DryRunJob
from trainwright_operator.flow.gangs import manifests as gang_manifests
from trainwright_operator.flow.gangs.manifests import GangSpec
from trainwright_operator.flow.reasons import Reason, message
from trainwright_operator.flow.status_update import Book, PhaseFailed

_PROBE = GangSpec(
    name="dry-run",
    task=LinkTask(gang=Gang(nodes=(GangNode("a", (0,), "a"), GangNode("b", (0,), "b")))),
    pending_seconds=60,
    run_seconds=60,
)
"""Gang with a Master and a Worker, rendered for the dry run and never created."""


def model_from_spec(spec: TrainingPlanSpec) -> Model:
    """Return the model of the spec. Raise ValueError if it is invalid."""
    return Model.of(spec.model.family(), Dtype(spec.training.dtype))


def accept(book: Book) -> bool:
    """Return whether the plan is accepted. Raise PhaseFailed if it is invalid."""
    known = book.condition(ConditionType.ACCEPTED)
    if known is not None and known.status == "True" and known.observed_generation == book.plan.generation:
        return True
    try:
        model_from_spec(book.spec)
    except ValueError as error:
        raise PhaseFailed(Reason.SPEC_INVALID, message(Reason.SPEC_INVALID, what=error)) from None
    if not book.plan.image:
        raise PhaseFailed(Reason.WORKER_IMAGE_MISSING, message(Reason.WORKER_IMAGE_MISSING))
    manifest = gang_manifests.manifests(book.plan, book.spec, book.names, _PROBE)[0]
    key = hashlib.sha256(f"{book.plan.generation} {manifest}".encode()).hexdigest()
    tried = book.snapshot.dry_run
    if tried is None or tried.key != key:
        book.do(DryRunJob(key, manifest))
        return False
    if tried.reason:
        reason = Reason(tried.reason)
        raise PhaseFailed(reason, message(reason, what=tried.message))
    book.say(ConditionType.ACCEPTED, "True", Reason.ACCEPTED)
    return True
