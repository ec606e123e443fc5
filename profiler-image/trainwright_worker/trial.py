"""Trials: training under a plan for some iterations, timed from a barrier to the slowest rank's end."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from trainwright.bounds import MAX_LOSS
from trainwright.cluster import Device
from trainwright.families import Custom
from trainwright.timeline import RankTimeline, Timeline
from trainwright.worker_api import (
    SERIES_ROUNDS,
    CheckedLayer,
    FailureReason,
    LossDependence,
    ProfilingTask,
    RankMemory,
    TrialReport,
    TrialSeriesReport,
    TrialSeriesTask,
    TrialTask,
)
from trainwright_worker.cpu_load import CpuTimes, disturbing_cores
from trainwright_worker.device import (
    DeviceProgress,
    barrier,
    check_capacity,
    max_over_ranks,
    read_value,
    release_cached_memory,
    sum_over_ranks,
    synchronize,
)
from trainwright_worker.executor.executor import PlanExecutor, RankContext, TrainingConfig
from trainwright_worker.executor.forward_observer import ForwardObserver
from trainwright_worker.executor.plan_ranks import PlanRanks
from trainwright_worker.executor.process_groups import ProcessGroups, required_groups
from trainwright_worker.gang import report_writer
from trainwright_worker.gang.errors import WorkerError
from trainwright_worker.gang.gathering import gather
from trainwright_worker.gang.rank_assignment import RankAssignment
from trainwright_worker.gang.rank_status import format_plan_position
from trainwright_worker.gang.watchdog import Watchdog
from trainwright_worker.live_bytes import measure_process_peak_bytes
from trainwright_worker.measure.layer_bench import profile_if_it_fits

MAX_MOMENTS = 8_000
"""Maximum moments of all ranks in a report, about 30 bytes each, to leave room for the rest."""
MAX_REPEATS = 2
"""Repeats of a measurement that other programs disturbed."""


def run_trial(
    task: TrialTask, assignment: RankAssignment, device: torch.device, watchdog: Watchdog, timeout: timedelta
) -> TrialReport:
    """Run and measure one plan, again where other programs disturbed it. Every rank returns the same report."""
    groups = ProcessGroups(timeout)
    rounds = [measure_trial(task, assignment, device, watchdog, groups)]
    while len(rounds) <= MAX_REPEATS and _best_rounds(rounds, 1).is_disturbed:
        rounds.append(measure_trial(_further_round(task, task.iterations), assignment, device, watchdog, groups))
    groups.close()
    return _best_rounds(rounds, 1)


def run_series(
    task: TrialSeriesTask, assignment: RankAssignment, device: torch.device, watchdog: Watchdog, timeout: timedelta
) -> TrialSeriesReport:
    """Measure the plans in rounds, and those that other programs disturbed once more; they share process groups.

    The first round of each is reported at once, for a series that is interrupted; the log that an operator reads has
    room for no more besides the report.
    """
    groups = ProcessGroups(timeout)
    plans = range(len(task.plans))
    shares = _shares(task.iterations, SERIES_ROUNDS if len(plans) > 1 else 1)
    rounds: list[list[TrialReport]] = [[] for _ in plans]

    def measure(number: int, iterations: int) -> None:
        whole = task.trial_task(number)
        own_task = _further_round(whole, iterations) if rounds[number] else replace(whole, iterations=iterations)
        report = measure_trial(own_task, assignment, device, watchdog, groups)
        release_cached_memory(device)
        timeline = report.timeline and report.timeline.at_most(MAX_MOMENTS // len(plans))
        rounds[number].append(replace(report, timeline=timeline))

    for iterations in shares:
        for number in plans:
            measure(number, iterations)
            if assignment.is_main_process:
                _write_round(number, rounds, len(shares) * len(plans))
    for _ in range(MAX_REPEATS):
        for number in plans:
            if _best_rounds(rounds[number], len(shares)).is_disturbed:
                measure(number, shares[0])
    reports = tuple(_best_rounds(own, len(shares)) for own in rounds)
    groups.close()
    return TrialSeriesReport(reports)


def _write_round(number: int, rounds: Sequence[Sequence[TrialReport]], total: int) -> None:
    """Write what the last measured plan's first round found, and how many rounds of all plans are done."""
    if len(rounds[number]) == 1:
        report_writer.write_series_part(number, rounds[number][0])
    report_writer.write_progress(sum(map(len, rounds)), total, "rounds of trials")


def _shares(iterations: int, rounds: int) -> tuple[int, ...]:
    """Return the iterations of each round, the longest first; there are no more rounds than iterations."""
    rounds = min(rounds, iterations)
    return tuple(iterations // rounds + (number < iterations % rounds) for number in range(rounds))


def _further_round(task: TrialTask, iterations: int) -> TrialTask:
    """Return the task without what its first round has found."""
    return replace(task, iterations=iterations, track_memory=False, timeline=False, checks=(), fault=None)


def _disturbance(report: TrialReport) -> float:
    return report.disturbing_cores or 0.0


def _best_rounds(rounds: Sequence[TrialReport], count: int) -> TrialReport:
    """Return the report of the rounds that other programs disturbed least, with what the first one found besides."""
    best = sorted(rounds, key=_disturbance)[:count]
    ratios = [report.late_ratio for report in best if report.late_ratio is not None]
    taken = [report.disturbing_cores for report in best if report.disturbing_cores is not None]
    return replace(
        rounds[0],
        iteration_seconds=tuple(seconds for report in best for seconds in report.iteration_seconds),
        paced_segments=sum(report.paced_segments for report in best),
        late_segments=sum(report.late_segments for report in best),
        late_ratio=max(ratios, default=None),
        disturbing_cores=sum(taken) / len(taken) if taken else None,
    )


def measure_trial(
    task: TrialTask, assignment: RankAssignment, device: torch.device, watchdog: Watchdog, groups: ProcessGroups
) -> TrialReport:
    """Measure one plan. A rank that the plan does not use only takes part in world collectives."""
    checked = _check_nodes(task, assignment, device, watchdog) if task.checks else ()
    watchdog.plan_position = format_plan_position(task.plan, assignment.device)
    watchdog.beat("making the plan's process groups and layers")
    executor = _make_executor(task, assignment, device, watchdog, groups)
    with _without_garbage_collection():
        iterations = _time_iterations(task, assignment, executor, device, watchdog)
    own = (
        (executor.pacer.paced, executor.pacer.late, executor.skipped_updates, executor.empty_batches)
        if executor
        else (0, 0, 0, 0)
    )
    paced, late, *skipped = map(round, sum_over_ranks([float(count) for count in own], device))
    late_ratio = max_over_ranks(executor.pacer.late_ratio if executor else 0.0, device)
    overflowed, empty = (count // len(task.plan.devices) for count in skipped)  # all of them skip the same updates
    timeline = _record_timeline(task, assignment, executor, device, watchdog) if task.timeline else None
    memory = _track_memory(task, assignment, executor, device, watchdog) if task.track_memory else ()
    return TrialReport(
        tuple(iterations.seconds),
        tuple(loss if _is_finite(loss) else None for loss in iterations.losses),
        memory,
        paced,
        late,
        timeline,
        checked,
        overflowed,
        iterations.first.mean_absolute_row_loss,
        iterations.first.depends_on,
        empty,
        _disturbing_cores(task, iterations.load, device),
        late_ratio if paced else None,
    )


def _disturbing_cores(task: TrialTask, load: CpuTimes, device: torch.device) -> float | None:
    """Return the cores that other programs took from the plan's devices; None where these are no part of this machine's CPU."""
    if not task.gang.is_on_cpu:
        return None
    seconds, own, busy = sum_over_ranks([load.clock, load.own, load.busy], device)
    world = dist.get_world_size()
    return disturbing_cores(busy / seconds, world * own / seconds, len(task.plan.devices))


def _check_nodes(
    task: TrialTask, assignment: RankAssignment, device: torch.device, watchdog: Watchdog
) -> tuple[CheckedLayer, ...]:
    """Measure the layers that the task checks on the first device of each node, and return the figures of all nodes."""
    own_layer = _own_seconds(task, assignment, device, watchdog)
    watchdog.beat("waiting for the checks of all nodes")
    return tuple(
        checked_layer for checked_layer in gather(own_layer, CheckedLayer | None, device) if checked_layer is not None
    )


def _own_seconds(
    task: TrialTask, assignment: RankAssignment, device: torch.device, watchdog: Watchdog
) -> CheckedLayer | None:
    """Return the figure of this rank's node, or None where another rank measures it or nothing is to be checked."""
    node = next(node for node in task.gang.nodes if node.name == assignment.device.node)
    check = next((each for each in task.checks if each.accelerator == node.accelerator), None)
    if check is None or assignment.device.slot != node.slots[0]:
        return None
    gang = replace(task.gang, nodes=(replace(node, slots=node.slots[:1]),))
    profiling = ProfilingTask(gang, task.model, 1, (check.rows,), task.optimizer, kinds=(check.kind,))
    (kind,) = profiling.layer_kinds
    profile = profile_if_it_fits(profiling, kind, check.rows, device, watchdog)
    release_cached_memory(device)
    if profile is None:
        return None
    seconds = profile.forward_seconds + profile.backward_seconds
    return CheckedLayer(node.name, task.model.dtype, check.kind, check.rows, seconds)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Collect garbage now, and not again until the end: a collection takes longer than a small model's forward."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _make_executor(
    task: TrialTask, assignment: RankAssignment, device: torch.device, watchdog: Watchdog, groups: ProcessGroups
) -> PlanExecutor | None:
    """Return this rank's executor; None if the plan does not use its device."""
    plan_ranks = PlanRanks.of(task.plan, assignment.devices)
    if assignment.rank not in plan_ranks.ranks:
        groups.prepare(required_groups(plan_ranks, task.model))
        return None
    emulation = task.gang.emulation_of(task.gang.accelerator_of(assignment.device.node))
    progress = DeviceProgress.of(device, watchdog.beat)
    watchdog.describe_device = progress.describe
    return PlanExecutor(
        task.plan,
        task.model,
        TrainingConfig(task.optimizer, task.learning_rate, task.seed),
        RankContext(assignment.rank, device, assignment.devices, emulation, progress.beat),
        groups,
    )


@dataclass(frozen=True, slots=True)
class _FirstLoss:
    """Findings from the forwards of the first iteration on all ranks.

    Attributes:
        mean_absolute_row_loss: None if the rows' weights are 0, so that there is no mean.
    """

    mean_absolute_row_loss: float | None
    depends_on: LossDependence | None


@dataclass(frozen=True, slots=True)
class _Iterations:
    """Slowest rank's seconds of each measured iteration, the mean loss of every one, and CPU times of the measured ones."""

    seconds: list[float]
    losses: list[float]
    first: _FirstLoss
    load: CpuTimes


def _time_iterations(
    task: TrialTask, assignment: RankAssignment, executor: PlanExecutor | None, device: torch.device, watchdog: Watchdog
) -> _Iterations:
    """Run the iterations. Raises WorkerError if the first loss is none to train by."""
    seconds, losses = [], []
    total = task.warmup_iterations + task.iterations
    observer = ForwardObserver(device)
    if executor:
        executor.passes.observer = observer
    for number in range(total):
        if number == task.warmup_iterations:
            load_before = CpuTimes.now()
        if executor and number == task.warmup_iterations:
            executor.pacer.reset_counts()
        batch = executor.make_batch(number) if executor else None
        watchdog.beat(f"waiting for all ranks before iteration {number}")
        barrier(device)
        begin = time.perf_counter()
        loss = executor.run_iteration(batch) if executor and batch else 0.0
        watchdog.beat(f"waiting for the device to finish iteration {number}")
        synchronize(device)
        elapsed = time.perf_counter() - begin
        watchdog.beat(f"gathering the times of iteration {number}")
        losses += sum_over_ranks([loss], device)
        if number == 0:
            first = _first_loss(task, executor, observer, losses[0], device)
            if executor:
                executor.passes.observer = None
        slowest = max_over_ranks(elapsed, device)
        if number >= task.warmup_iterations:
            seconds.append(slowest)
        if assignment.is_main_process:
            report_writer.write_progress(number + 1, total, "iterations")
            _inject_fault(task, watchdog)
    return _Iterations(seconds, losses, first, CpuTimes.now().since(load_before))


def _first_loss(
    task: TrialTask, executor: PlanExecutor | None, observer: ForwardObserver, loss: float, device: torch.device
) -> _FirstLoss:
    """Return what all ranks observed of the first loss. Raises WorkerError if it is not finite, or exactly 0.

    No family's row losses are all 0; those of a user's model are where rows are compared with others that a plan has put
    elsewhere, and would train nothing. Losses that were exactly 0 when the description checked some rows may be so here.
    """
    weight = executor.batch_weight.value if executor else 1.0
    absolute = read_value(observer.absolute_loss) / (weight or 1.0)
    own = [float(dependence in observer.dependences) for dependence in LossDependence]
    mean_absolute, empty, *counts = sum_over_ranks([absolute, float(weight == 0), *own], device)
    model = task.model
    dependences = (dependence for dependence, count in zip(LossDependence, counts, strict=True) if count)
    if empty:
        return _FirstLoss(None, next(dependences, None))
    if not _is_finite(loss) or not _is_finite(mean_absolute):
        layers = len(model.layers)
        own_layer = observer.first_not_finite
        first = torch.tensor(layers if own_layer is None else own_layer, device=device)
        dist.all_reduce(first, op=dist.ReduceOp.MIN)
        layer = min(int(first), layers - 1)
        raise WorkerError(
            FailureReason.LOSS_INVALID,
            f"the first loss (iteration 0, {model.dtype}) is {loss:g}, so nothing can be trained; layer {layer} "
            f"({model.layers[layer]}) is the first whose output is not finite",
        )
    family = model.family
    if mean_absolute == 0 and isinstance(family, Custom) and not (family.checks and family.checks.zero_loss):
        raise WorkerError(
            FailureReason.LOSS_INVALID,
            f"the first loss (iteration 0, {model.dtype}) is exactly 0 for every row, so nothing is trained; layer "
            f"{len(model.layers) - 1} ({model.layers[-1]}) must return a loss for each row that needs no other row",
        )
    return _FirstLoss(mean_absolute, next(dependences, None))


def _is_finite(loss: float) -> bool:
    return abs(loss) <= MAX_LOSS  # false for NaN


def _inject_fault(task: TrialTask, watchdog: Watchdog) -> None:
    """Inject the task's fault, if any; `mute` is injected where the report would be written."""
    if task.fault == "crash":
        raise RuntimeError("crashing after the first iteration, a rehearsed fault")
    if task.fault == "hang":
        watchdog.beat("hanging after the first iteration, a rehearsed fault")
        threading.Event().wait()


def _record_timeline(
    task: TrialTask, assignment: RankAssignment, executor: PlanExecutor | None, device: torch.device, watchdog: Watchdog
) -> Timeline:
    """Run one more iteration, timed and paced as before, and return the actions of every rank."""
    batch = executor.make_batch(task.warmup_iterations + task.iterations) if executor else None
    watchdog.beat("waiting for all ranks before the recorded iteration")
    barrier(device)
    begin = time.perf_counter()
    if executor and batch:
        executor.recorder.begin()
        executor.run_iteration(batch)
    watchdog.beat("waiting for the device to finish the recorded iteration")
    synchronize(device)
    elapsed = time.perf_counter() - begin
    own_timeline = None
    if executor:
        own_timeline = RankTimeline(assignment.device.node, assignment.device.slot, tuple(executor.recorder.end()))
    watchdog.beat("gathering what was recorded")
    timelines = gather((elapsed, own_timeline), tuple[float, RankTimeline | None], device)
    timeline_by_device = {
        Device(recorded.node, recorded.slot): recorded for _, recorded in timelines if recorded is not None
    }
    timeline = Timeline(
        max(seconds for seconds, _ in timelines), tuple(timeline_by_device[used] for used in task.plan.devices)
    )
    return timeline.at_most(MAX_MOMENTS)


def _track_memory(
    task: TrialTask, assignment: RankAssignment, executor: PlanExecutor | None, device: torch.device, watchdog: Watchdog
) -> tuple[RankMemory, ...]:
    """Return every rank's peak bytes in one more iteration, untimed and unpaced."""
    batch = executor.make_batch(task.warmup_iterations + task.iterations) if executor else None
    watchdog.beat("waiting for all ranks before the tracked iteration")
    barrier(device)
    own_memory = None
    if executor and batch:
        executor.pacer.active = False
        resident = [*executor.optimizer.resident_tensors, *executor.stage.frozen_tensors, *batch.tensors]
        peak = measure_process_peak_bytes(partial(executor.run_iteration, batch), resident, device)
        own_memory = RankMemory(assignment.device.node, assignment.device.slot, peak)
        check_capacity(own_memory, task.gang)
    watchdog.beat("gathering what was tracked")
    memory_by_rank = gather(own_memory, RankMemory | None, device)
    return tuple(memory for memory in memory_by_rank if memory is not None)
