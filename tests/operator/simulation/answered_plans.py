"""Plans with an answer, and their statuses, made by hand."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from flow_world import START, spec_of

from trainwright_operator.api.conditions import Condition, ConditionType
from trainwright_operator.api.status import TrainingPlanStatus
from trainwright_operator.flow.snapshot import PlanFacts


def plan_of(namespace: str = "team", name: str = "demo", *, at: datetime = START, **changes: Any) -> PlanFacts:
    """Return a plan with these fields of the spec."""
    return PlanFacts(name, namespace, "uid", 1, at, spec_of(**changes), TrainingPlanStatus(), "image")


def trial(name: str, rank: int, predicted: float, measured: float | None, **fields: Any) -> dict[str, Any]:
    """Return the entry of a trial in a status."""
    ended = {"measuredSeconds": measured, "state": "Succeeded", "reason": "MeasurementTaken"}
    return {
        "name": name, "role": "Candidate", "summary": "", "predictedRank": rank, "predictedSeconds": predicted,
        "devices": 4, "endTime": START, **ended, **fields,
    }  # fmt: skip


def status_of(
    *trials: dict[str, Any], succeeded: str = "True", at: datetime = START, **fields: Any
) -> TrainingPlanStatus:
    """Return the status of a plan whose winner is the fastest trial."""
    best = min((one for one in trials if one["measuredSeconds"]), key=lambda one: one["measuredSeconds"])
    baseline = min((one["measuredSeconds"] for one in trials if one["role"] == "Baseline"), default=None)
    winner = {
        "trial": best["name"], "summary": "", "predictedRank": best["predictedRank"], "plan": {},
        "predictedSeconds": best["predictedSeconds"], "measuredSeconds": best["measuredSeconds"],
        "speedupOverBaseline": baseline / best["measuredSeconds"] if baseline else None,
    }  # fmt: skip
    cluster = {
        "devices": 8,
        "accelerators": [{"name": name, "devices": 4, "memoryBytes": 1} for name in ("Tesla-T4", "Tesla-V100")],
    }
    answer = Condition(
        type=ConditionType.SUCCEEDED, status=succeeded, last_transition_time=at, reason="BestTrialSelected"
    )  # type: ignore[arg-type]
    body = {"cluster": cluster, "trials": list(trials), "winner": winner, "conditions": [answer], **fields}
    return TrainingPlanStatus.model_validate(body)


FIRST = trial("candidate-1", 1, predicted=1.0, measured=1.5)
SECOND = trial("candidate-2", 2, predicted=1.1, measured=1.0, devices=3)
BASELINE = trial("baseline-1", 1, predicted=2.0, measured=2.0, role="Baseline", devices=8)
WAITING = {
    "observedGeneration": 1,
    "waiting": {"reason": "WaitingForCapacity", "since": START.isoformat(), "earlierSeconds": 3600},
    "conditions": [],
}
"""Status of a plan that waits, and did for an hour before."""


def resource(name: str, status: TrainingPlanStatus | dict[str, Any], namespace: str = "team") -> dict[str, Any]:
    """Return a plan as the API server shows it."""
    body = status if isinstance(status, dict) else status.dump()
    meta = {"name": name, "namespace": namespace, "uid": name, "generation": 1, "creationTimestamp": START.isoformat()}
    return {
        "metadata": meta,
        "spec": json.loads(spec_of().model_dump_json(by_alias=True, exclude_none=True)),
        "status": body,
    }
