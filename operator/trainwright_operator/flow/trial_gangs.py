"""The gangs that trials run in: one alone, or several one after another in the same pods."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal

from trainwright import documents
from trainwright.cluster import Device
from trainwright.orders import MAX_REPORT_BYTES, SeriesOrder, TrialOrder
from trainwright.plan import Plan
from trainwright.timeline import FEWEST_MOMENTS
from trainwright_operator.api.spec import TrialsSpec
from trainwright_operator.flow.accept import model_of
from trainwright_operator.flow.attempts import IN_SERIES, Attempts
from trainwright_operator.flow.book import Book
from trainwright_operator.flow.candidates import PlannedTrial, PlannedTrials
from trainwright_operator.flow.discovery import Discovery
from trainwright_operator.flow.gang import WantedGang
from trainwright_operator.flow.names import REHEARSE_FAULT_ANNOTATION
from trainwright_operator.flow.pod_template import ORDER_FILE
from trainwright_operator.flow.worker_log import strict

Fault = Literal["crash", "hang", "mute"]
_FAULTS: dict[str, Fault] = {"crash": "crash", "hang": "hang", "mute": "mute"}

ROOM_BYTES: Final = MAX_REPORT_BYTES * 6 // 10
"""Of a report; the rest is for the moments of its timelines, of which the worker keeps a bounded number."""
_NUMBER_BYTES: Final = 24
_DEVICE_BYTES: Final = 80
_MOMENT_BYTES: Final = 40


def alone(book: Book, discovery: Discovery, trial: PlannedTrial, gang: str, run_seconds: float) -> WantedGang:
    """The gang of a single trial."""
    plan, spec = trial.plan, book.spec
    order = TrialOrder(
        gang=discovery.gang(_places([plan]), run_seconds=run_seconds),
        model=model_of(spec),
        plan=plan,
        optimizer=spec.training.optimizer,
        warmup_iterations=spec.trials.warmup_iterations,
        iterations=spec.trials.iterations,
        fault=fault_of(book, trial),
        timeline=spec.trials.timeline and report_bytes([plan], spec.trials) <= ROOM_BYTES,
    )
    return WantedGang(gang, order, spec.trials.pending_deadline_seconds, run_seconds)


def series(book: Book, discovery: Discovery, trials: Sequence[PlannedTrial], run_seconds: float) -> WantedGang:
    """The gang of several trials, on all devices that any of them uses. It is named after the first."""
    spec = book.spec
    order = SeriesOrder(
        gang=discovery.gang(_places([trial.plan for trial in trials]), run_seconds=run_seconds),
        model=model_of(spec),
        plans=tuple(trial.plan for trial in trials),
        optimizer=spec.training.optimizer,
        warmup_iterations=spec.trials.warmup_iterations,
        iterations=spec.trials.iterations,
        timeline=spec.trials.timeline,
    )
    parts = tuple(trial.name + IN_SERIES for trial in trials)
    return WantedGang(parts[0], order, spec.trials.pending_deadline_seconds, run_seconds, parts=parts)


def series_under_way(book: Book, planned: PlannedTrials) -> tuple[PlannedTrial, ...]:
    """The trials of the series whose order is given, as it was given; none where there is none to go on with.

    An order that cannot be read, or tells of plans that are not asked for any more, is none.
    """
    by_plan = {trial.plan: trial for trial in planned.trials}
    for first in planned.trials:
        gang = first.name + IN_SERIES
        order = book.snapshot.find(book.names.order(gang))
        if order is None or book.snapshot.find(book.names.result(gang)) is not None:
            continue
        try:
            given: SeriesOrder = strict(order.data.get(ORDER_FILE, ""), SeriesOrder, order.name)
        except documents.DocumentError:
            continue
        trials = tuple(by_plan[plan] for plan in given.plans if plan in by_plan)
        if len(trials) == len(given.plans) and trials[:1] == (first,):
            return trials
    return ()


def together(
    book: Book, discovery: Discovery, coming: Sequence[PlannedTrial], attempts: Mapping[str, Attempts]
) -> tuple[PlannedTrial, ...]:
    """Those that go into the next gang, of the `coming` trials in their order; always the first.

    A fault is rehearsed alone. So is a trial that was tried before, since that is to show its own cause.
    """
    first, limits = coming[0], book.spec.trials

    def may_join(trial: PlannedTrial) -> bool:
        former = attempts[trial.name]
        is_free = not former.ended and not former.is_begun and fault_of(book, trial) is None
        return is_free and _backend(discovery, trial.plan) == _backend(discovery, first.plan)

    if not may_join(first):
        return (first,)
    found = [trial for trial in coming if may_join(trial)][: limits.per_gang]
    while len(found) > 1 and report_bytes([trial.plan for trial in found], limits) > ROOM_BYTES:
        found.pop()
    return tuple(found)


def devices_of(trials: Iterable[PlannedTrial]) -> frozenset[Device]:
    """All that any of them uses."""
    return frozenset(device for trial in trials for device in trial.plan.devices)


def report_bytes(plans: Sequence[Plan], limits: TrialsSpec) -> int:
    """About as long as the report of these plans gets, but for the moments whose number the worker bounds.

    Of each device it tells its peak of memory, and in a timeline at least a few moments.
    """
    numbers = _NUMBER_BYTES * (2 * limits.iterations + limits.warmup_iterations)
    moments = _DEVICE_BYTES + FEWEST_MOMENTS * _MOMENT_BYTES
    found = 0
    for plan in plans:
        names = sum(len(device.node) for device in plan.devices)
        found += numbers + names + _DEVICE_BYTES * len(plan.devices)
        found += names + moments * len(plan.devices) if limits.timeline else 0
    return found


def fault_of(book: Book, trial: PlannedTrial) -> Fault | None:
    """The fault that a person wants to see in that trial; what cannot be understood rehearses nothing."""
    for part in book.plan.annotations.get(REHEARSE_FAULT_ANNOTATION, "").split(","):
        name, _, fault = part.strip().partition("=")
        if name == trial.name:
            return _FAULTS.get(fault)
    return None


def _places(plans: Iterable[Plan]) -> list[tuple[str, tuple[int, ...]]]:
    """By node, in the order in which the plans name them: the slots that are used."""
    slots: dict[str, set[int]] = {}
    for plan in plans:
        for device in plan.devices:
            slots.setdefault(device.node, set()).add(device.slot)
    return [(node, tuple(sorted(used))) for node, used in slots.items()]


def _backend(discovery: Discovery, plan: Plan) -> str:
    """What the plan's devices talk over: a series talks over one for all its plans."""
    return discovery.gang(_places([plan]), run_seconds=1.0).backend
