"""Gangs of trials: one trial alone, or a series (several trials in the same pods)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final, Literal

from trainwright import documents
from trainwright.cluster import Device
from trainwright.plan import Plan
from trainwright.timeline import FEWEST_MOMENTS
from trainwright.worker_api import MAX_REPORT_BYTES, TrialSeriesTask, TrialTask
from trainwright_operator.api.spec import TrialsSpec
from trainwright_operator.flow.actions import StoredRole
from trainwright_operator.flow.documents.discovered_devices import DiscoveredDevices
from trainwright_operator.flow.documents.number_formats import model_from_spec
from trainwright_operator.flow.documents.planned_trials import GANG_PREFIXES, PlannedTrial, PlannedTrials
from trainwright_operator.flow.documents.stored_documents import parse_strict
from trainwright_operator.flow.gangs.exported_plan import export_files
from trainwright_operator.flow.gangs.gang_spec import GangSpec, framework_of
from trainwright_operator.flow.gangs.lifecycle import is_under_way
from trainwright_operator.flow.gangs.pod_template import TASK_FILE
from trainwright_operator.flow.measurements.refutation import layer_checks
from trainwright_operator.flow.names import REHEARSE_FAULT_ANNOTATION
from trainwright_operator.flow.phase import ReconcileContext
from trainwright_operator.flow.trials.trial_schedule import RETRY_SUFFIX, SERIES_SUFFIX, SINGLE_SUFFIX, TrialAttempts

Fault = Literal["crash", "hang", "mute"]
_FAULTS: dict[str, Fault] = {"crash": "crash", "hang": "hang", "mute": "mute"}

TRIAL_REPORT_BUDGET_BYTES: Final = MAX_REPORT_BYTES * 6 // 10
"""Report budget without timeline moments, of which the worker stores a bounded number."""
_NUMBER_BYTES: Final = 24
_DEVICE_BYTES: Final = 80
_MOMENT_BYTES: Final = 40


def single_trial_gang(
    context: ReconcileContext, discovery: DiscoveredDevices, trial: PlannedTrial, gang: str, run_seconds: float
) -> GangSpec:
    """Return the gang of a single trial."""
    plan, spec, framework = trial.plan, context.spec, context.spec.trials.framework
    pods = discovery.make_gang(places([plan]), run_seconds=run_seconds)
    model = model_from_spec(spec, trial.dtype)
    task = TrialTask(
        gang=pods,
        model=model,
        plan=plan,
        optimizer=spec.training.optimizer,
        warmup_iterations=spec.trials.warmup_iterations,
        iterations=spec.trials.iterations,
        fault=rehearsed_fault(context, trial),
        timeline=spec.trials.timeline and estimate_report_bytes([plan], spec.trials) <= TRIAL_REPORT_BUDGET_BYTES,
        checks=layer_checks(context, model.dtype, pods) if framework is None else (),
    )
    files = export_files(spec, task.model, plan, task.gang.nodes) if framework is not None else ()
    return GangSpec(gang, task, spec.trials.pending_deadline_seconds, run_seconds, framework=framework, files=files)


def series_gang(
    context: ReconcileContext, discovery: DiscoveredDevices, trials: Sequence[PlannedTrial], run_seconds: float
) -> GangSpec:
    """Return the gang of several trials, on all devices that any of them uses. It is named after the first."""
    spec = context.spec
    gang = discovery.make_gang(places([trial.plan for trial in trials]), run_seconds=run_seconds)
    model = model_from_spec(spec, trials[0].dtype)
    task = TrialSeriesTask(
        gang=gang,
        model=model,
        plans=tuple(trial.plan for trial in trials),
        optimizer=spec.training.optimizer,
        warmup_iterations=spec.trials.warmup_iterations,
        iterations=spec.trials.iterations,
        timeline=spec.trials.timeline,
        checks=layer_checks(context, model.dtype, gang),
    )
    parts = tuple(trial.name + SERIES_SUFFIX for trial in trials)
    return GangSpec(parts[0], task, spec.trials.pending_deadline_seconds, run_seconds, part_names=parts)


def active_series(context: ReconcileContext, planned: PlannedTrials) -> tuple[PlannedTrial, ...]:
    """Return the trials of the running series in their stored order, or none.

    Unreadable tasks and tasks with plans that are no longer planned do not count. A framework runs no series.
    """
    if context.spec.trials.framework is not None:
        return ()
    for first in planned.trials:
        gang = first.name + SERIES_SUFFIX
        task_map = context.snapshot.find(context.names.task(gang))
        if task_map is None or not is_under_way(context, gang):
            continue
        try:
            task: TrialSeriesTask = parse_strict(task_map.data.get(TASK_FILE, ""), TrialSeriesTask, task_map.name)
        except documents.DocumentError:
            continue
        trials = tuple(
            trial for plan in task.plans for trial in planned.trials if trial.is_run_by(plan, task.model.dtype)
        )
        if len(trials) == len(task.plans) and trials[:1] == (first,):
            return trials
    return ()


def gangs_under_way(context: ReconcileContext) -> frozenset[str]:
    """Return the gangs of trials that have not ended, planned or not."""
    stored = (
        config_map
        for config_map in context.snapshot.stored
        if config_map.role == StoredRole.TASK and context.names.owns(config_map.name)
    )
    return frozenset(
        config_map.gang
        for config_map in stored
        if config_map.gang.startswith(GANG_PREFIXES) and is_under_way(context, config_map.gang)
    )


def runs_other_plan(context: ReconcileContext, trial: PlannedTrial) -> bool:
    """Return whether a gang of this trial alone runs a former search's plan or number format, or another framework.

    An unreadable task does not count.
    """
    for gang in (trial.name + SINGLE_SUFFIX, trial.name + RETRY_SUFFIX):
        task_map = context.snapshot.find(context.names.task(gang))
        if task_map is None or not is_under_way(context, gang):
            continue
        with suppress(documents.DocumentError):
            task: TrialTask = parse_strict(task_map.data.get(TASK_FILE, ""), TrialTask, task_map.name)
            is_of_trial = trial.is_run_by(task.plan, task.model.dtype)
            return not is_of_trial or framework_of(task_map) != context.spec.trials.framework
    return False


def group_next_trials(
    context: ReconcileContext,
    discovery: DiscoveredDevices,
    coming: Sequence[PlannedTrial],
    attempts: Mapping[str, TrialAttempts],
) -> tuple[PlannedTrial, ...]:
    """Return the first of the `coming` trials with those that may share its gang.

    Injected faults run alone, and so do jobs of the user's. Retries do too, so that each reports its own cause.
    """
    first, limits = coming[0], context.spec.trials

    def may_join(trial: PlannedTrial) -> bool:
        former = attempts[trial.name]
        is_free = not former.ended and not former.is_running_alone and rehearsed_fault(context, trial) is None
        is_alike = trial.dtype is first.dtype
        return is_free and is_alike and _network(discovery, trial.plan) == _network(discovery, first.plan)

    if limits.framework is not None or not may_join(first):
        return (first,)
    group = [trial for trial in coming if may_join(trial)][: limits.per_gang]
    while len(group) > 1 and estimate_report_bytes([trial.plan for trial in group], limits) > TRIAL_REPORT_BUDGET_BYTES:
        group.pop()
    return tuple(group)


def devices_of(trials: Iterable[PlannedTrial]) -> frozenset[Device]:
    """Return all devices that any of the trials uses."""
    return frozenset(device for trial in trials for device in trial.plan.devices)


def estimate_report_bytes(plans: Sequence[Plan], limits: TrialsSpec) -> int:
    """Estimate the report bytes of these plans, without the moments whose number the worker bounds.

    Each device adds its peak memory and, in a timeline, at least a few moments.
    """
    numbers = _NUMBER_BYTES * (2 * limits.iterations + limits.warmup_iterations)
    moments = _DEVICE_BYTES + FEWEST_MOMENTS * _MOMENT_BYTES
    total = 0
    for plan in plans:
        names = sum(len(device.node) for device in plan.devices)
        total += numbers + names + _DEVICE_BYTES * len(plan.devices)
        total += names + moments * len(plan.devices) if limits.timeline else 0
    return total


def rehearsed_fault(context: ReconcileContext, trial: PlannedTrial) -> Fault | None:
    """Return the fault that the user injects into that trial; ignore unreadable entries."""
    for part in context.plan.annotations.get(REHEARSE_FAULT_ANNOTATION, "").split(","):
        name, _, fault = part.strip().partition("=")
        if name == trial.name:
            return _FAULTS.get(fault)
    return None


def places(plans: Iterable[Plan]) -> list[tuple[str, tuple[int, ...]]]:
    """Return the used slots of each node, in the plans' node order."""
    slots: dict[str, set[int]] = {}
    for plan in plans:
        for device in plan.devices:
            slots.setdefault(device.node, set()).add(device.slot)
    return [(node, tuple(sorted(used))) for node, used in slots.items()]


def _network(discovery: DiscoveredDevices, plan: Plan) -> tuple[str, tuple[str, ...]]:
    """Return the communication backend and network devices of the plan's pods; a series uses one for all its plans."""
    gang = discovery.make_gang(places([plan]), run_seconds=1.0)
    return gang.backend, discovery.network_names(node.name for node in gang.nodes)
