"""One process of a gang: finds its seat, joins the others, does what the order says, and says how it ended."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from trainwright.orders import (
    NODE_NAME_VARIABLE,
    FailureReason,
    LinksOrder,
    ProfileOrder,
    SeriesOrder,
    TrialOrder,
    WorkerOrder,
    WorkerReport,
)
from trainwright_worker import acceptance, device, links, output, profiling, trial
from trainwright_worker.failures import classify
from trainwright_worker.seat import Seat
from trainwright_worker.start import forget_signal_handlers
from trainwright_worker.watchdog import Watchdog

_BACKEND_SLACK = 1.5
"""The watchdog notices silence first and says where; the back end's own timeout is the second line."""


class LastWords:
    """Says once why this process ends, whoever notices first: its work or its watchdog."""

    def __init__(self) -> None:
        self.rank: int | None = None
        self.node = os.environ.get(NODE_NAME_VARIABLE)
        self._lock = threading.Lock()

    def say(self, reason: FailureReason, message: str) -> None:
        if self._lock.acquire(blocking=False):  # never released: what is said first stands
            output.failure(reason, message, rank=self.rank, node=self.node)
        else:
            threading.Event().wait(5)  # the other thread ends the process


def main(order_path: str) -> None:
    """Do the order's work in this process. Ends the process with exit code 1 where that fails."""
    forget_signal_handlers()
    last_words = LastWords()
    try:
        _work(Path(order_path), last_words)
    except BaseException as error:  # noqa: BLE001 (whatever ends the process is told)
        traceback.print_exc()
        problem = classify(error)
        last_words.say(problem.reason, problem.message)
        sys.stderr.flush()
        os._exit(1)  # not through the back end's destructors, which may wait for peers


def _work(order_path: Path, last_words: LastWords) -> None:
    order = acceptance.read_order(order_path)
    gang = order.gang
    watchdog = Watchdog(gang.deadline_seconds, gang.collective_timeout_seconds, last_words.say)
    seat = Seat.find(order)
    last_words.rank = seat.rank
    sys.stderr.write(f"rank {seat.rank} on {seat.device} is process {os.getpid()}\n")
    own_device = device.choose(gang, seat)
    timeout = timedelta(seconds=_BACKEND_SLACK * gang.collective_timeout_seconds)
    _join(order, seat, timeout)
    watchdog.beat("waiting for all ranks")
    dist.barrier()
    answer = _do(order, seat, own_device, watchdog, timeout)
    if seat.is_speaker and getattr(order, "fault", None) != "mute":
        output.report(answer)
    watchdog.beat("waiting for all ranks at the end")
    dist.barrier()
    watchdog.stop()
    dist.destroy_process_group()


def _join(order: WorkerOrder, seat: Seat, timeout: timedelta) -> None:
    """Meet the other processes under the logical rank that the plan gives to this device.

    Ranks are mapped before the group is made, so that every group is ascending in it: a scrambled mesh would give
    wrong gradients without an error.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    start_up = timedelta(seconds=order.gang.deadline_seconds)
    store = dist.TCPStore(address, port, is_master=False, timeout=start_up)  # type: ignore[attr-defined]
    dist.init_process_group(
        order.gang.backend,
        store=dist.PrefixStore("trainwright", store),  # type: ignore[attr-defined]
        rank=seat.rank,
        world_size=seat.world_size,
        timeout=timeout,
    )


def _do(
    order: WorkerOrder, seat: Seat, own_device: torch.device, watchdog: Watchdog, timeout: timedelta
) -> WorkerReport:
    match order:
        case TrialOrder():
            return trial.run(order, seat, own_device, watchdog, timeout)
        case SeriesOrder():
            return trial.run_series(order, seat, own_device, watchdog, timeout)
        case ProfileOrder():
            return profiling.run(order, seat, own_device, watchdog)
        case LinksOrder():
            return links.run(order, seat, own_device, watchdog)
