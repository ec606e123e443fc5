"""One process of a gang: finds its seat, joins the others, does what the order says, and says how it ended."""

from __future__ import annotations

import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainwright.orders import (
    LinksOrder,
    ProfileOrder,
    SeriesOrder,
    TrialOrder,
    WorkerOrder,
    WorkerReport,
)
from trainwright_worker import acceptance, device, links, output, profiling, trial
from trainwright_worker.bell import Bell
from trainwright_worker.failures import classify
from trainwright_worker.last_words import LastWords
from trainwright_worker.seat import Seat, devices
from trainwright_worker.start import forget_signal_handlers, heed_signals
from trainwright_worker.watchdog import Watchdog

_BACKEND_SLACK = 1.5
"""The watchdog notices silence first and says where; the back end's own timeout is the second line."""


def main(order_path: str) -> None:
    """Do the order's work in this process. Where that fails, it ends with `TOLD_EXIT_CODE`, after its last words."""
    forget_signal_handlers()
    last_words = LastWords()
    heed_signals(last_words.told_to_end)
    try:
        _work(Path(order_path), last_words)
    except BaseException as error:  # noqa: BLE001 (whatever ends the process is told)
        last_words.log(traceback.format_exc())
        last_words.failed(classify(error))


def _work(order_path: Path, last_words: LastWords) -> None:
    order = acceptance.read_order(order_path)
    gang = order.gang
    watchdog = last_words.watchdog = Watchdog(
        gang.deadline_seconds, gang.collective_timeout_seconds, last_words.gave_up
    )
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    bell = last_words.bell = Bell(address, port, devices(order))
    seat = last_words.seat = Seat.find(order)
    sys.stderr.write(f"rank {seat.rank} on {seat.device} is process {os.getpid()}\n")
    own_device = device.choose(gang, seat)
    timeout = timedelta(seconds=_BACKEND_SLACK * gang.collective_timeout_seconds)
    start_up = timedelta(seconds=gang.deadline_seconds)
    store = dist.TCPStore(address, port, is_master=False, timeout=start_up)  # type: ignore[attr-defined]
    bell.listen(last_words.heard)
    _join(order, seat, store, timeout)
    watchdog.beat("waiting for all ranks")
    dist.barrier()
    answer = _do(order, seat, own_device, watchdog, timeout)
    if seat.is_speaker and getattr(order, "fault", None) != "mute":
        output.report(answer)
    watchdog.beat("waiting for all ranks at the end")
    bell.close()
    dist.barrier()
    watchdog.stop()
    dist.destroy_process_group()


def _join(order: WorkerOrder, seat: Seat, store: Any, timeout: timedelta) -> None:
    """Meet the other processes under the logical rank that the plan gives to this device.

    Ranks are mapped before the group is made, so that every group is ascending in it: a scrambled mesh would give
    wrong gradients without an error.
    """
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
