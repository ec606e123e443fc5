"""Peak memory of the ranks of pipelines over NCCL, whose processes run ahead of the device, beside the prediction."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from gpu_checks.findings import Finding, predicted
from gpu_checks.hardware import Hardware
from gpu_checks.whole_trials import uniform_plan
from gpu_checks.worker_commands import WorkerCommands
from trainwright import documents
from trainwright.accelerators.roofline import estimate_profiles
from trainwright.families import Gpt
from trainwright.model import Model
from trainwright.plan import Schedule
from trainwright.profiles import Profiles
from trainwright.runtime import Runtime
from trainwright.worker_api import TrialSeriesTask

GANG = Path(__file__).with_name("memory_gang.py")
GANG_SECONDS = 200.0
ROWS, MICRO_BATCHES = 4, 16
REFERENCE = "NVIDIA-A100-SXM4-40GB"
"""Data sheet of the estimated profiles, of which only the kept bytes matter."""


def findings_of_pipelines(hardware: Hardware, processes: int) -> Iterator[Finding]:
    """Yield the rank whose peak is the furthest from the prediction, for pipelines of many micro-batches."""
    gpt = Gpt(processes, 64, 4, 32, 64) if hardware.small else Gpt(8, 1024, 16, 1024, 8192)
    model = Model.of(gpt, hardware.half)
    plain = uniform_plan(len(model.layers), devices=processes, data=1, rows=ROWS, micro_batches=MICRO_BATCHES)
    recomputing = plain.map_stages(
        lambda stage: replace(stage, layers=tuple(replace(run, recompute=True) for run in stage.layers))
    )
    plans = {
        "1F1B": plain,
        "1F1B, recompute": recomputing,
        "GPipe, recompute": replace(recomputing, schedule=Schedule.GPIPE),
    }
    commands = WorkerCommands(hardware)
    task = TrialSeriesTask(commands.gang(processes), model, tuple(plans.values()))
    name = hardware.name if hardware.sheet else REFERENCE
    kept = estimate_profiles(model, (name,), tensor_degrees=(1,), rows=(ROWS,))
    profiles = Profiles(tuple(replace(layer, accelerator=hardware.name) for layer in kept.layers))
    for (way, plan), peaks in zip(plans.items(), _peaks(hardware, task, processes), strict=True):
        estimate = commands.predict(plan, model, profiles, Runtime())
        expected = dict(estimate.memory_by_device)
        errors = [expected[device] / peak - 1 for device, peak in zip(plan.devices, peaks, strict=True)]
        rank = max(range(processes), key=lambda one: abs(errors[one]))
        figures = tuple(f"{count / 2**20:.5g} MiB" for count in (peaks[rank], expected[plan.devices[rank]]))
        yield predicted(
            f"{way}, {processes} stages, {MICRO_BATCHES} micro-batches: memory of rank {rank}",
            (figures[0], figures[1]), errors[rank], aim=0.10, limit=0.15,
        )  # fmt: skip


def _peaks(hardware: Hardware, task: TrialSeriesTask, processes: int) -> list[list[int]]:
    """Return the peak bytes of every rank of every plan, in processes that share the device."""
    orders, result = hardware.folder / "memory-order.json", hardware.folder / "memory-result.json"
    orders.write_text(documents.dumps(task), encoding="utf-8")
    result.unlink(missing_ok=True)
    gang = {"GANG_WORLD": str(processes), "GANG_BACKEND": hardware.backend, "GANG_DEVICE": str(hardware.device)}
    run = subprocess.run(
        [sys.executable, str(GANG), str(orders), str(result)], check=False, capture_output=True, text=True,
        timeout=GANG_SECONDS, env={**os.environ, **gang},
    )  # fmt: skip
    if run.returncode != 0:
        raise RuntimeError(f"the gang failed: {run.stderr.strip()[-300:]}")
    found: list[list[int]] = json.loads(result.read_text(encoding="utf-8"))
    return found
