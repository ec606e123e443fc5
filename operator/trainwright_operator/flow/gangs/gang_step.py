"""Step of a gang: what it does now or waits for, and the actions to apply."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import NamedTuple

from trainwright.worker_api import Progress, WorkerReport, WorkerTask
from trainwright_operator.flow.actions import Action
from trainwright_operator.flow.documents.outcome import GangResult
from trainwright_operator.flow.gangs.retries import Retry
from trainwright_operator.flow.phase import ReconcileContext
from trainwright_operator.flow.reasons import NEEDS_ACTION, WAITS_IN_QUEUES, Explanation, Reason, explain, explain_wait


class Measurement(NamedTuple):
    """Report of a gang whose measurement counts, with the task that asked for it."""

    gang: str
    task: WorkerTask
    report: WorkerReport


@dataclass(frozen=True, slots=True)
class GangStep:
    """Step of a gang: `result` once it has ended, else its activity and the actions to apply.

    Attributes:
        measured: measurements that the actions store.
        is_moving: whether its pods are deleted to be created for another node.
        again_at: when the next attempt is due, after one that the cluster ended; until then nothing of the gang is kept.
    """

    result: GangResult | None = None
    reason: Reason = Reason.STARTING
    activity: str = ""
    progress: Progress | None = None
    started_at: datetime | None = None
    actions: tuple[Action, ...] = ()
    measured: tuple[Measurement, ...] = ()
    again_at: datetime | None = None
    is_moving: bool = False

    @classmethod
    def of_retry(cls, retry: Retry) -> GangStep:
        """Return the step of a gang that waits for its next attempt."""
        return cls(reason=retry.lost.reason, activity=retry.sentence, again_at=retry.due_at)

    @property
    def is_live(self) -> bool:
        """Return whether the gang's task and pods are kept."""
        return self.again_at is None and not self.is_moving

    @property
    def is_lacking(self) -> bool:
        """Return whether the gang waits only for what the cluster lacks."""
        return self.again_at is not None or self.reason in WAITS_IN_QUEUES or self.reason in NEEDS_ACTION

    @property
    def explanation(self) -> Explanation:
        """Return the gang's activity with its reason."""
        explainer = explain_wait if self.is_lacking else explain
        return explainer(self.reason, what=self.activity)


def repeated(context: ReconcileContext, step: GangStep, retry: Retry | None) -> GangStep:
    """Return the step, with the words of the attempt before while this one only starts: it lacks the same until it runs."""
    if retry is None or step.reason is not Reason.STARTING or retry.lost.reason not in NEEDS_ACTION:
        return step
    if retry.lost.generation != context.plan.generation:
        return step
    return replace(step, reason=retry.lost.reason, activity=retry.sentence_under_way)
