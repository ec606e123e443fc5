"""Accepted: the spec can be read, a worker image is known, and the API server takes the pods made from the template."""

from __future__ import annotations

import hashlib

from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.orders import Gang, GangNode, LinksOrder
from trainwright_operator.api.conditions import ConditionType
from trainwright_operator.api.spec import TrainingPlanSpec
from trainwright_operator.flow import gang as gangs
from trainwright_operator.flow.actions import DryRunJob
from trainwright_operator.flow.book import Book, Failed
from trainwright_operator.flow.gang import WantedGang
from trainwright_operator.flow.reasons import Reason, message

_PROBE = WantedGang(
    name="dry-run",
    order=LinksOrder(gang=Gang(nodes=(GangNode("a", (0,), "a"), GangNode("b", (0,), "b")))),
    pending_seconds=60,
    run_seconds=60,
)
"""A gang with a Master and a Worker, to be rendered and never created."""


def model_of(spec: TrainingPlanSpec) -> Model:
    """The model that the spec describes. Raises ValueError with a sentence."""
    return Model.of(spec.model.family(), Dtype(spec.training.dtype))


def accept(book: Book) -> bool:
    """Whether the plan can be worked on; raises Failed where it cannot."""
    known = book.condition(ConditionType.ACCEPTED)
    if known is not None and known.status == "True" and known.observed_generation == book.plan.generation:
        return True
    try:
        model_of(book.spec)
    except ValueError as error:
        raise Failed(Reason.SPEC_INVALID, message(Reason.SPEC_INVALID, what=error)) from None
    if not book.plan.image:
        raise Failed(Reason.WORKER_IMAGE_MISSING, message(Reason.WORKER_IMAGE_MISSING))
    manifest = gangs.manifests(book.plan, book.spec, book.names, _PROBE)[0]
    key = hashlib.sha256(f"{book.plan.generation} {manifest}".encode()).hexdigest()
    tried = book.snapshot.dry_run
    if tried is None or tried.key != key:
        book.do(DryRunJob(key, manifest))
        return False
    if tried.reason:
        reason = Reason(tried.reason)
        raise Failed(reason, message(reason, what=tried.message))
    book.say(ConditionType.ACCEPTED, "True", Reason.ACCEPTED)
    return True
