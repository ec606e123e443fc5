"""Figures of a plan, derived from its spec and status alone: how good its answer is, and what the way to it took."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from sys import intern
from typing import Final

from trainwright_operator.api.conditions import Condition, ConditionType
from trainwright_operator.api.spec import LauncherKind, Objective, Planner, TrainingPlanSpec
from trainwright_operator.api.status import (
    ClusterStatus,
    MeasuringPurpose,
    Phase,
    RevisionCause,
    TrainingPlanStatus,
    TrialRole,
    TrialState,
    TrialStatus,
)
from trainwright_operator.flow.phases.sequence import PHASES
from trainwright_operator.flow.reasons import Reason
from trainwright_operator.flow.snapshot import PlanFacts

MIXED: Final = "mixed"
"""In place of the type of device where there are several."""
_OUT_OF_MEMORY_RATIO: Final = 0.0
"""Ratio of a trial that ran out of memory, of which nobody knows how much it needed: below any that was measured."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Phase of a plan as `kubectl get` prints it, and the reason of its condition.

    Attributes:
        since: when the phase began; None where the plan is finished or suspended.
    """

    phase: Phase
    reason: str
    since: datetime | None = None


@dataclass(frozen=True, slots=True)
class WaitFigures:
    """Waits for what the cluster lacks since the last edit of the spec, as `spec.waitDeadlineSeconds` counts them.

    Attributes:
        reason: of the present wait; empty where the plan does not wait.
        since: when the present wait began.
        earlier_seconds: of the waits before.
        earlier_phases_seconds: of all waits before the present phase began.
    """

    reason: str = ""
    since: datetime | None = None
    earlier_seconds: int = 0
    earlier_phases_seconds: int = 0

    @property
    def phase_seconds(self) -> int:
        """Return seconds of the waits of the present phase before the present one."""
        return max(self.earlier_seconds - self.earlier_phases_seconds, 0)


@dataclass(frozen=True, slots=True)
class PlanTraits:
    """Kind of a plan: labels that divide the figures of several plans. Empty where not known.

    Attributes:
        accelerators: types of all devices that were discovered, in the order of their names.
        queue: Kueue's, if any.
    """

    family: str
    planner: str
    objective: str
    accelerators: tuple[str, ...]
    emulated: bool
    launcher: str
    queue: str
    dtype: str

    @property
    def accelerator(self) -> str:
        """Return the one type of device, or `mixed`."""
        return self.accelerators[0] if len(self.accelerators) == 1 else MIXED if self.accelerators else ""

    def labels(self, accelerator: str) -> tuple[str, ...]:
        """Return the labels family, accelerator, planner, objective and emulated."""
        return self.family, accelerator, self.planner, self.objective, str(self.emulated).lower()


@dataclass(frozen=True, slots=True)
class TrialFigures:
    """End of a trial, and how far its predictions hold.

    Attributes:
        accelerator: the one type of its devices, or `mixed`.
        time_ratio: predicted over measured seconds; None where it does not count.
        memory_ratio: predicted over measured bytes of the fullest device; 0 where that ran out of memory, None where it
            does not count.
    """

    name: str
    role: TrialRole
    accelerator: str
    state: TrialState
    reason: str
    end_time: datetime | None
    time_ratio: float | None
    memory_ratio: float | None


@dataclass(frozen=True, slots=True)
class AnswerFigures:
    """Figures of a plan's answer, None where unknown. The metric of each is `trainwright_plan_` and its name.

    Attributes:
        predicted_rank: the winner's place among the predictions, from 1; None where it is the one candidate
            that was measured.
        regret_ratio: share by which the measured time of the best prediction is longer than the winner's; None where time is not
            the objective.
        speedup_over_baseline_ratio: None where the planner is the baseline's.
        devices: of the winner.
        saved_device_seconds_per_iteration: what an iteration of the baseline takes of devices beyond one of the winner.
        payback_iterations: iterations after which the winner has saved what measuring took; None where it saves nothing.
        collective_error_ratio: sum of |predicted - measured| over that of measured seconds of the collectives.
    """

    predicted_iteration_seconds: float | None = None
    measured_iteration_seconds: float | None = None
    baseline_iteration_seconds: float | None = None
    predicted_rank: float | None = None
    regret_ratio: float | None = None
    speedup_over_baseline_ratio: float | None = None
    devices: float | None = None
    saved_device_seconds_per_iteration: float | None = None
    payback_iterations: float | None = None
    model_flop_utilisation_ratio: float | None = None
    tokens_per_second_per_device: float | None = None
    price_per_sample: float | None = None
    collective_error_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class PlanFigures:
    """Figures of one plan, without the rest of its status, which may list a thousand nodes.

    Attributes:
        trying_since: since when trials are under way; None before, and once their results are final.
        device_seconds: devices × seconds by purpose and result.
        node_speeds: seconds of nodes that were checked over those that were kept of them, by name and type of device.
        checked_at: when these nodes were last checked.
        refuted: how often reused measurements did not hold, by cause.
        profiles_measured_at: when the oldest of its profiles was measured, perhaps for a plan before.
        excluded_nodes: names of nodes that are left out, by code; empty where a former version discovered them.
        outdated_by: why the plan is made anew, or will be once the nodes' change has settled.
        is_quarantined: whether it ended with `InternalError`.
    """

    stage: Stage
    waits: WaitFigures
    traits: PlanTraits
    trials: tuple[TrialFigures, ...]
    trying_since: datetime | None
    answer: AnswerFigures
    device_seconds: Mapping[tuple[MeasuringPurpose, str], float]
    search_seconds: float | None
    node_speeds: Mapping[tuple[str, str], float]
    checked_at: datetime | None
    refuted: Mapping[str, int]
    profiles_measured_at: datetime | None
    excluded_nodes: Mapping[str, Sequence[str]]
    outdated_by: frozenset[str]
    is_quarantined: bool


def plan_figures(plan: PlanFacts, status: TrainingPlanStatus) -> PlanFigures:
    """Return the figures of a plan with this status."""
    conditions = {condition.type: condition for condition in status.conditions}
    stage, traits = _stage(plan, conditions), _traits(plan.spec, status)
    cluster = status.cluster
    return PlanFigures(
        stage=stage,
        waits=_waits(plan, status),
        traits=traits,
        trials=tuple(_trial(trial, traits) for trial in status.trials),
        trying_since=_trying_since(conditions),
        answer=AnswerFigures() if stage.phase is Phase.FAILED else _answer(status, traits),
        device_seconds={
            (spent.purpose, result): getattr(spent, result)
            for spent in status.device_seconds
            for result in DEVICE_RESULTS
        },
        search_seconds=status.search_seconds,
        node_speeds={
            (node.name, node.accelerator): node.relative_seconds
            for node in (cluster.nodes if cluster is not None else ())
            if node.relative_seconds is not None
        },
        checked_at=max((trial.end_time for trial in status.trials if trial.end_time is not None), default=None),
        refuted=_refuted(status),
        profiles_measured_at=status.profiles_measured_at,
        excluded_nodes=_excluded_nodes(cluster) if cluster is not None else {},
        outdated_by=_outdated_by(status),
        is_quarantined=status.failed_version is not None,
    )


DEVICE_RESULTS: Final = ("succeeded", "failed", "lost")
"""Fields of `status.deviceSeconds`: how the gangs ended that the devices were taken for."""


REFUTATION_CAUSES: Final = ("image", "speed")
"""Why reused measurements do not hold: pods run another image, or nodes are of another speed."""


def _refuted(status: TrainingPlanStatus) -> dict[str, int]:
    refuted = status.cluster.refuted if status.cluster is not None else None
    return dict(zip(REFUTATION_CAUSES, (refuted.images, refuted.speeds), strict=True)) if refuted is not None else {}


def _excluded_nodes(cluster: ClusterStatus) -> dict[str, list[str]]:
    names = defaultdict[str, list[str]](list)
    for node in cluster.excluded_nodes:
        names[node.code or ""].append(intern(node.name))  # a thousand plans leave out the same nodes
    return dict(names)


def _outdated_by(status: TrainingPlanStatus) -> frozenset[str]:
    cluster, winner = status.cluster, status.winner
    if cluster is None:
        return frozenset()
    causes = {RevisionCause.NODES} if cluster.change is not None else set()
    if winner is not None and winner.revision < cluster.revision:
        causes.add(cluster.revision_cause or RevisionCause.NODES)  # of a former version: not known
    return frozenset(cause.lower() for cause in causes)


def active_since(plan: PlanFacts, suspended: Condition | None) -> datetime:
    """Return when the plan was created, or when its last suspension ended."""
    return plan.created_at if suspended is None else max(plan.created_at, suspended.last_transition_time)


def _stage(plan: PlanFacts, conditions: Mapping[ConditionType, Condition]) -> Stage:
    suspended, succeeded = conditions.get(ConditionType.SUSPENDED), conditions.get(ConditionType.SUCCEEDED)
    if suspended is not None and suspended.status == "True":
        return Stage(Phase.SUSPENDED, suspended.reason)
    if succeeded is not None and succeeded.status != "Unknown":
        return Stage(Phase.SUCCEEDED if succeeded.status == "True" else Phase.FAILED, succeeded.reason)
    since = active_since(plan, suspended)
    for kind, printed in ((phase.condition, phase.printed) for phase in PHASES):
        condition = conditions.get(kind)
        if condition is None:
            return Stage(printed, "", since)
        since = max(since, condition.last_transition_time)
        if condition.status != "True":
            return Stage(printed, condition.reason, since)
    raise AssertionError("Succeeded is the last of the phases")


def _waits(plan: PlanFacts, status: TrainingPlanStatus) -> WaitFigures:
    waiting = status.waiting
    if waiting is None or status.observed_generation != plan.generation:
        return WaitFigures()  # an edit of the spec begins another account
    before = WaitFigures(earlier_seconds=waiting.earlier_seconds, earlier_phases_seconds=waiting.earlier_phases_seconds)
    if waiting.reason is None or waiting.since is None:
        return before
    return replace(before, reason=waiting.reason, since=waiting.since)


def _traits(spec: TrainingPlanSpec | None, status: TrainingPlanStatus) -> PlanTraits:
    cluster, winner = status.cluster, status.winner
    accelerators = (
        tuple(sorted(accelerator.name for accelerator in cluster.accelerators)) if cluster is not None else ()
    )
    emulated = cluster is not None and cluster.emulated
    if spec is None:
        return PlanTraits("", "", "", accelerators, emulated, "", "", "")
    return PlanTraits(
        family=next((name for name in type(spec.model).model_fields if getattr(spec.model, name) is not None), ""),
        planner=spec.search.planner.value,
        objective=spec.search.objective.value,
        accelerators=accelerators,
        emulated=emulated,
        launcher=(spec.launcher or status.launcher or LauncherKind.PYTORCH_JOB).value,
        queue=spec.queue_name or "",
        dtype=(winner.dtype if winner is not None else None) or spec.training.dtype,
    )


def _trial(trial: TrialStatus, traits: PlanTraits) -> TrialFigures:
    time_ratio = memory_ratio = None
    predicted, measured = trial.predicted_peak_memory_bytes, trial.peak_memory_bytes
    if trial.state is TrialState.SUCCEEDED:
        time_ratio = trial.predicted_seconds / trial.measured_seconds if trial.measured_seconds else None
        memory_ratio = predicted / measured if predicted is not None and measured else None
    elif trial.state is TrialState.FAILED and trial.reason == Reason.OUT_OF_MEMORY:
        memory_ratio = _OUT_OF_MEMORY_RATIO
    return TrialFigures(
        name=trial.name,
        role=trial.role,
        accelerator=trial.accelerator or traits.accelerator,
        state=trial.state,
        reason=trial.reason or "",
        end_time=trial.end_time,
        time_ratio=time_ratio,
        memory_ratio=memory_ratio,
    )


def _trying_since(conditions: Mapping[ConditionType, Condition]) -> datetime | None:
    tried, succeeded = conditions.get(ConditionType.TRIALS_COMPLETED), conditions.get(ConditionType.SUCCEEDED)
    if tried is None or tried.status != "Unknown" or (succeeded is not None and succeeded.status != "Unknown"):
        return None
    return tried.last_transition_time


def _answer(status: TrainingPlanStatus, traits: PlanTraits) -> AnswerFigures:
    winner, links = status.winner, status.links
    error = links.collective_error if links is not None else None
    if winner is None:
        return AnswerFigures(collective_error_ratio=error)
    measured, speedup = winner.measured_seconds, winner.speedup_over_baseline
    baseline_seconds = measured * speedup if measured is not None and speedup is not None else None
    devices = next((trial.devices for trial in status.trials if trial.name == winner.trial), None)
    saved = _saved_device_seconds(status, measured, baseline_seconds, devices)
    spent = sum(used.total for used in status.device_seconds)
    candidates = [trial for trial in status.trials if trial.role is TrialRole.CANDIDATE and trial.measured_seconds]
    has_competed = measured is not None and (
        len(candidates) > 1 or winner.trial not in {candidate.name for candidate in candidates}
    )
    return AnswerFigures(
        predicted_iteration_seconds=winner.predicted_seconds,
        measured_iteration_seconds=measured,
        baseline_iteration_seconds=baseline_seconds,
        predicted_rank=winner.predicted_rank if has_competed else None,
        regret_ratio=_regret(candidates, measured) if has_competed and traits.objective == Objective.TIME else None,
        speedup_over_baseline_ratio=speedup if traits.planner != Planner.MEGATRON else None,
        devices=devices,
        saved_device_seconds_per_iteration=saved,
        payback_iterations=spent / saved if spent and saved is not None and saved > 0 else None,
        model_flop_utilisation_ratio=winner.model_flop_utilisation,
        tokens_per_second_per_device=winner.tokens_per_second_per_device,
        price_per_sample=winner.price_per_sample,
        collective_error_ratio=error,
    )


def _regret(candidates: list[TrialStatus], measured: float | None) -> float | None:
    """Return by which share the best prediction was slower than the winner; None where it was not measured."""
    first = next((trial.measured_seconds for trial in candidates if trial.predicted_rank == 1), None)
    return first / measured - 1.0 if first and measured else None


def _saved_device_seconds(
    status: TrainingPlanStatus, measured: float | None, baseline_seconds: float | None, devices: int | None
) -> float | None:
    """Return device seconds that an iteration of the winner saves against the baseline, or None where unknown."""
    if measured is None or baseline_seconds is None or devices is None:
        return None
    # A candidate may count as the baseline. Figures of the status are rounded, so the nearest is the one.
    tried = [(trial.measured_seconds, trial.devices) for trial in status.trials if trial.measured_seconds]
    _, of_baseline = min(tried, key=lambda pair: abs(pair[0] - baseline_seconds), default=(0.0, None))
    return baseline_seconds * of_baseline - measured * devices if of_baseline is not None else None
