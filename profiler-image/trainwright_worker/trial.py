"""Trials: training by a plan for some iterations, timed from a barrier to the slowest rank's end."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from trainwright.cluster import Device
from trainwright.orders import RankMemory, SeriesOrder, SeriesReport, TrialOrder, TrialReport
from trainwright.timeline import RankTimeline, Timeline
from trainwright_worker import output
from trainwright_worker.capacity import check_capacity
from trainwright_worker.device import synchronize
from trainwright_worker.executor.groups import Groups, wanted_groups
from trainwright_worker.executor.iteration import Executor, Host, Training
from trainwright_worker.executor.mesh import Mesh
from trainwright_worker.memory import peak_bytes
from trainwright_worker.seat import Seat
from trainwright_worker.stands import place_of
from trainwright_worker.watchdog import Watchdog

MOST_MOMENTS = 8_000
"""Of all ranks in a report: about 30 bytes each, which leaves room for everything else."""


def run(order: TrialOrder, seat: Seat, device: torch.device, watchdog: Watchdog, timeout: timedelta) -> TrialReport:
    """Train and measure. Every rank returns the same report."""
    groups = Groups(timeout)
    report = measure(order, seat, device, watchdog, groups)
    groups.close()
    return report


def run_series(
    order: SeriesOrder, seat: Seat, device: torch.device, watchdog: Watchdog, timeout: timedelta
) -> SeriesReport:
    """The trials one after another, each told as soon as it is measured; they share their process groups."""
    groups = Groups(timeout)
    reports = []
    for number in range(len(order.plans)):
        report = measure(order.trial(number), seat, device, watchdog, groups)
        timeline = report.timeline and report.timeline.at_most(MOST_MOMENTS // len(order.plans))
        reports.append(replace(report, timeline=timeline))
        if seat.is_speaker:
            output.part(number, reports[number])
            output.progress(number + 1, len(order.plans), "trials")
    groups.close()
    return SeriesReport(tuple(reports))


def measure(order: TrialOrder, seat: Seat, device: torch.device, watchdog: Watchdog, groups: Groups) -> TrialReport:
    """One plan's measurement. A rank that the plan does not use takes part in the meetings alone."""
    watchdog.place = place_of(order.plan, seat.device)
    watchdog.beat("making the plan's process groups and layers")
    executor = _executor(order, seat, device, watchdog, groups)
    seconds, losses = _iterations(order, seat, executor, device, watchdog)
    counts = [float(executor.pacer.paced), float(executor.pacer.late)] if executor else [0.0, 0.0]
    paced, late = _sum_over_ranks(counts, device)
    timeline = _timeline(order, seat, executor, device) if order.timeline else None
    memory = _track_memory(order, seat, executor, device) if order.track_memory else ()
    return TrialReport(tuple(seconds), tuple(losses), memory, round(paced), round(late), timeline)


def _executor(
    order: TrialOrder, seat: Seat, device: torch.device, watchdog: Watchdog, groups: Groups
) -> Executor | None:
    """This rank's executor; None where the plan does not use its device."""
    mesh = Mesh.of(order.plan, seat.devices)
    if seat.rank not in mesh.ranks:
        groups.make(wanted_groups(mesh, order.model))
        return None
    emulation = order.gang.emulation_of(order.gang.accelerator_of(seat.device.node))
    return Executor(
        order.plan,
        order.model,
        Training(order.optimizer, order.learning_rate, order.seed, sequence_parallel=order.sequence_parallel),
        Host(seat.rank, device, seat.devices, emulation, watchdog.beat),
        groups,
    )


def _iterations(
    order: TrialOrder, seat: Seat, executor: Executor | None, device: torch.device, watchdog: Watchdog
) -> tuple[list[float], list[float]]:
    """Seconds of each measured iteration (the slowest rank's), and the mean loss of every iteration."""
    seconds, losses = [], []
    total = order.warmup_iterations + order.iterations
    for number in range(total):
        if executor and number == order.warmup_iterations:
            executor.pacer.reset_counts()
        batch = executor.prepare(number) if executor else None
        watchdog.beat(f"waiting for all ranks before iteration {number}")
        dist.barrier()
        begin = time.perf_counter()
        loss = executor.run(batch) if executor and batch else 0.0
        synchronize(device)
        elapsed = time.perf_counter() - begin
        watchdog.beat(f"gathering the times of iteration {number}")
        losses += _sum_over_ranks([loss], device)
        slowest = torch.tensor([elapsed], dtype=torch.float64, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        if number >= order.warmup_iterations:
            seconds.append(slowest.item())
        if seat.is_speaker:
            output.progress(number + 1, total, "iterations")
            _rehearse(order, watchdog)
    return seconds, losses


def _rehearse(order: TrialOrder, watchdog: Watchdog) -> None:
    """The fault that the order asks for, if any; `mute` is rehearsed where the report would be written."""
    if order.fault == "crash":
        raise RuntimeError("a crash after the first iteration was ordered, as a rehearsal")
    if order.fault == "hang":
        watchdog.beat("hanging after the first iteration, as ordered for a rehearsal")
        threading.Event().wait()


def _timeline(order: TrialOrder, seat: Seat, executor: Executor | None, device: torch.device) -> Timeline:
    """One further iteration, timed and paced like those before, of which every rank tells what it did when."""
    batch = executor.prepare(order.warmup_iterations + order.iterations) if executor else None
    dist.barrier()
    begin = time.perf_counter()
    if executor and batch:
        executor.recorder.begin()
        executor.run(batch)
    synchronize(device)
    elapsed = time.perf_counter() - begin
    own = None
    if executor:
        own = RankTimeline(seat.device.node, seat.device.slot, tuple(executor.recorder.end()))
    everyone: list[tuple[float, RankTimeline | None]] = [(0.0, None)] * dist.get_world_size()
    dist.all_gather_object(everyone, (elapsed, own))
    found = {Device(one.node, one.slot): one for _, one in everyone if one is not None}
    whole = Timeline(max(seconds for seconds, _ in everyone), tuple(found[one] for one in order.plan.devices))
    return whole.at_most(MOST_MOMENTS)


def _sum_over_ranks(values: list[float], device: torch.device) -> list[float]:
    summed = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(summed)
    return summed.tolist()


def _track_memory(
    order: TrialOrder, seat: Seat, executor: Executor | None, device: torch.device
) -> tuple[RankMemory, ...]:
    """Peak bytes of every rank of the plan in one further, untimed and unpaced iteration."""
    batch = executor.prepare(order.warmup_iterations + order.iterations) if executor else None
    dist.barrier()
    own = None
    if executor and batch:
        executor.pacer.active = False
        held = [*executor.optimizer.held_tensors, *batch.tensors]
        peak = peak_bytes(partial(executor.run, batch), held, device)
        own = RankMemory(seat.device.node, seat.device.slot, peak)
        check_capacity(own, order.gang)
    everyone: list[RankMemory | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return tuple(memory for memory in everyone if memory is not None)
