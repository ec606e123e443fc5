"""Processes that train by several plans in turn and measure the peak of each rank's own tensors.

Run as a program: `python memory_gang.py TASK_FILE RESULT_FILE`. The task is a trial series; the result is a list for each
plan: the peak bytes of every rank. GANG_WORLD, GANG_BACKEND and GANG_DEVICE are those of `eight_processes`.
"""

from __future__ import annotations

import gc
import json
import sys
from functools import partial
from pathlib import Path

import torch.distributed as dist
from eight_processes import WORLD, device_of, join, leave, start

from trainwright import documents
from trainwright.worker_api import TrialSeriesTask
from trainwright_worker.device import barrier, release_cached_memory
from trainwright_worker.executor.executor import PlanExecutor, RankContext, TrainingConfig
from trainwright_worker.live_bytes import measure_peak_bytes

WARM_UP = 2
"""Iterations before the measured one: receives are posted ahead from the second one on."""


def member(rank: int, port: int, task_file: str, result: str) -> None:
    """Measure every plan on this rank; the first one writes all ranks' figures."""
    task = documents.loads(Path(task_file).read_text(encoding="utf-8"), TrialSeriesTask)
    groups, device = join(rank, port), device_of(rank)
    found = []
    for plan in task.plans:
        executor = PlanExecutor(plan, task.model, TrainingConfig(), RankContext(rank, device), groups)
        batch = executor.make_batch(0)
        for _ in range(WARM_UP):
            executor.run_iteration(batch)
        resident = [*executor.optimizer.resident_tensors, *batch.tensors]
        peak = measure_peak_bytes(partial(executor.run_iteration, batch), resident, device)
        peaks: list[int] = [0] * WORLD
        dist.all_gather_object(peaks, peak)
        found.append(peaks)
        del executor, batch, resident
        gc.collect()
        release_cached_memory(device)
        barrier(device)
    if rank == 0:
        Path(result).write_text(json.dumps(found), encoding="utf-8")
    leave(groups)


if __name__ == "__main__":
    sys.exit(start(member, tuple(sys.argv[1:]), "trainwright_worker.executor.executor"))
