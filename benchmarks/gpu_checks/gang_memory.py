"""Peak memory of the ranks of pipelines over NCCL, whose processes run ahead of the device, beside the prediction."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from gpu_checks.findings import Finding, predicted
from gpu_checks.hardware import Hardware
from gpu_checks.plan_gangs import run_gang
from gpu_checks.whole_trials import here, uniform_plan
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
ROWS, MICRO_BATCHES = 4, 16
REFERENCE = "NVIDIA-A100-SXM4-40GB"
"""Data sheet of the estimated profiles, of which only the kept bytes matter."""


def findings_of_pipelines(hardware: Hardware, processes: int) -> Iterator[Finding]:
    """Yield the rank whose peak is the furthest from the prediction, for pipelines of many micro-batches."""
    gpt = Gpt(processes, 64, 4, 32, 64) if hardware.small else Gpt(8, 1024, 16, 1024, 8192)
    model = Model.of(gpt, hardware.half)
    plain, recomputing = (
        uniform_plan(len(model.layers), here(processes), rows=ROWS, micro_batches=MICRO_BATCHES, recompute=recompute)
        for recompute in (False, True)
    )
    plans = {
        "1F1B": plain,
        "1F1B, recompute": recomputing,
        "GPipe, recompute": replace(recomputing, schedule=Schedule.GPIPE),
    }
    commands = WorkerCommands(hardware)
    task = TrialSeriesTask(commands.gang(processes), model, tuple(plans.values()))
    gang = {"GANG_WORLD": str(processes), "GANG_BACKEND": hardware.backend, "GANG_DEVICE": str(hardware.device)}
    measured, failure = run_gang(GANG, hardware, documents.dumps(task), gang)
    if failure:
        raise RuntimeError(f"the gang failed: {failure}")
    name = hardware.name if hardware.sheet else REFERENCE
    kept = estimate_profiles(model, (name,), tensor_degrees=(1,), rows=(ROWS,))
    profiles = Profiles(tuple(replace(layer, accelerator=hardware.name) for layer in kept.layers))
    for (way, plan), peaks in zip(plans.items(), measured, strict=True):
        estimate = commands.predict(plan, model, profiles, Runtime())
        expected = dict(estimate.memory_by_device)
        errors = [expected[device] / peak - 1 for device, peak in zip(plan.devices, peaks, strict=True)]
        rank = max(range(processes), key=lambda one: abs(errors[one]))
        figures = tuple(f"{count / 2**20:.5g} MiB" for count in (peaks[rank], expected[plan.devices[rank]]))
        yield predicted(
            f"{way}, {processes} stages, {MICRO_BATCHES} micro-batches: memory of rank {rank}",
            (figures[0], figures[1]), errors[rank], aim=0.10, limit=0.15,
        )  # fmt: skip
