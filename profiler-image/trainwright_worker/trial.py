"""A trial: training by a plan for some iterations, timed from a barrier to the slowest rank's end."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from trainwright.orders import RankMemory, TrialOrder, TrialReport
from trainwright_worker import output
from trainwright_worker.device import synchronize
from trainwright_worker.executor.iteration import Executor, Host, Training
from trainwright_worker.memory import LiveBytes
from trainwright_worker.seat import Seat
from trainwright_worker.watchdog import Watchdog


def run(order: TrialOrder, seat: Seat, device: torch.device, watchdog: Watchdog, timeout: timedelta) -> TrialReport:
    """Train and measure. Every rank returns the same report."""
    watchdog.beat("making the plan's process groups and layers")
    accelerator = next(node.accelerator for node in order.gang.nodes if node.name == seat.device.node)
    executor = Executor(
        order.plan,
        order.model,
        Training(order.optimizer, order.learning_rate, order.seed),
        Host(seat.rank, device, order.gang.emulation_of(accelerator), timeout, watchdog.beat),
    )
    seconds, losses = _iterations(order, seat, executor, watchdog)
    paced, late = _sum_over_ranks([executor.pacer.paced, executor.pacer.late], device)
    memory = _track_memory(order, seat, executor) if order.track_memory else ()
    executor.close()
    return TrialReport(tuple(seconds), tuple(losses), memory, round(paced), round(late))


def _iterations(
    order: TrialOrder, seat: Seat, executor: Executor, watchdog: Watchdog
) -> tuple[list[float], list[float]]:
    """Seconds of each measured iteration (the slowest rank's), and the mean loss of every iteration."""
    seconds, losses = [], []
    total = order.warmup_iterations + order.iterations
    for number in range(total):
        if number == order.warmup_iterations:
            executor.pacer.reset_counts()
        batch = executor.prepare(number)
        watchdog.beat(f"waiting for all ranks before iteration {number}")
        dist.barrier()
        begin = time.perf_counter()
        loss = executor.run(batch)
        synchronize(executor.device)
        elapsed = time.perf_counter() - begin
        watchdog.beat(f"gathering the times of iteration {number}")
        losses += _sum_over_ranks([loss], executor.device)
        slowest = torch.tensor([elapsed], dtype=torch.float64, device=executor.device)
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


def _sum_over_ranks(values: list[float], device: torch.device) -> list[float]:
    summed = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(summed)
    return summed.tolist()


def _track_memory(order: TrialOrder, seat: Seat, executor: Executor) -> tuple[RankMemory, ...]:
    """Peak bytes of every rank in one further, untimed and unpaced iteration."""
    executor.pacer.active = False
    batch = executor.prepare(order.warmup_iterations + order.iterations)
    dist.barrier()
    if executor.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(executor.device)
        executor.run(batch)
        peak = torch.cuda.max_memory_allocated(executor.device)
    else:
        with LiveBytes([*executor.held_tensors(), *batch.tensors]) as live:
            executor.run(batch)
        peak = live.peak_bytes
    own = RankMemory(seat.device.node, seat.device.slot, peak)
    everyone: list[RankMemory | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return tuple(memory for memory in everyone if memory is not None)
