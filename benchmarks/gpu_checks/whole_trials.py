"""Whole trials by the worker's commands, each predicted from profiles that the worker measured just before."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from itertools import pairwise

from gpu_checks.findings import Finding, judged, predicted, skipped
from gpu_checks.hardware import NO_GPU_SECONDS, Hardware
from gpu_checks.worker_commands import INSIDE, NODE, WorkerCommands
from trainwright.cluster import Device, Port
from trainwright.cost.estimate import Estimate
from trainwright.model import Model
from trainwright.plan import LayerRun, Pipeline, Plan, Stage, split_rows
from trainwright.strategy import Sharding, Strategy
from trainwright.worker_api import TrialReport, TrialTask

MEMORY_SHARE = 0.9
"""Share of the memory above which a prediction is not tried."""


def here(count: int) -> tuple[Device, ...]:
    """Return the first devices of this machine."""
    return tuple(Device(NODE, slot) for slot in range(count))


def uniform_plan(  # noqa: PLR0913 - what such a plan states
    layers: int,
    devices: Sequence[Device],
    *,
    rows: int,
    micro_batches: int,
    data: int = 1,
    tensor: int = 1,
    **strategy: Sharding | bool,
) -> Plan:
    """Return a plan of equal stages, each with these degrees, under 1F1B; `strategy` are other fields of its runs of layers."""
    size = data * tensor
    stages = len(devices) // size
    cuts = [round(stage * layers / stages) for stage in range(stages + 1)]
    made = tuple(
        Stage(
            tuple(devices[number * size : (number + 1) * size]),
            (LayerRun(first, end - first, Strategy(tensor, data, **strategy), split_rows(rows, data)),),  # type: ignore[arg-type]
        )
        for number, (first, end) in enumerate(pairwise(cuts))
    )
    return Plan(layers, rows * micro_batches, (Pipeline(micro_batches, rows, made),))


def trial_findings(name: str, hardware: Hardware, model: Model, plan: Plan, inside: Port = INSIDE) -> Iterator[Finding]:
    """Profile, predict, train and compare; the seconds come first."""
    commands = WorkerCommands(hardware)
    rows = {rows for stage in plan.pipelines[0].stages for run in stage.layers for rows in run.rows}
    estimate = commands.predict(plan, model, *commands.profile(model, {1: rows}), inside)
    yield from predicted_trial_findings(name, hardware, model, plan, estimate)


def predicted_trial_findings(
    name: str, hardware: Hardware, model: Model, plan: Plan, estimate: Estimate
) -> Iterator[Finding]:
    """Train and compare with an estimate; the seconds come first."""
    commands = WorkerCommands(hardware)
    if estimate.peak_memory_bytes > MEMORY_SHARE * hardware.memory_bytes:
        needed, total = (f"{value / 2**30:.1f} GiB" for value in (estimate.peak_memory_bytes, hardware.memory_bytes))
        yield skipped(name, f"it needs {needed} of the device's {total}")
        return
    gang, iterations = commands.gang(len(plan.devices)), 2 if hardware.small else 10
    report = commands.report_of(TrialTask(gang, model, plan, iterations=iterations))
    if not isinstance(report, TrialReport):
        raise TypeError(f"the worker answered a trial order with a {report.kind} report")
    subject = f"{model.dtype} {name}, {plan.global_batch_size} rows"
    seconds = statistics.median(report.iteration_seconds)
    figures = f"{seconds:.4g} s an iteration", f"{estimate.iteration_seconds:.4g} s"
    if hardware.is_gpu:
        error = estimate.iteration_seconds / seconds - 1
        yield predicted(f"{subject}: seconds", figures, error, aim=0.05, limit=0.10)
    else:
        yield skipped(f"{subject}: seconds", NO_GPU_SECONDS, *figures)
    peak = max(one.peak_bytes for one in report.memory)
    figures = f"{peak / 2**30:.4g} GiB", f"{estimate.peak_memory_bytes / 2**30:.4g} GiB"
    yield predicted(f"{subject}: memory", figures, estimate.peak_memory_bytes / peak - 1, aim=0.10, limit=0.15)
    losses = f"{report.losses[0]:.3f}, at last {report.losses[-1]:.3f}"
    yield judged(f"{subject}: loss", losses, "it falls", holds=report.losses[-1] < report.losses[0])
