"""Reports and log lines of workers in the simulated cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import combinations
from typing import Any

from trainwright import documents
from trainwright.cluster import Device, Link
from trainwright.profiles import LayerProfile
from trainwright.worker_api import (
    PROGRESS_MARKER,
    REPORT_MARKER,
    SERIES_PART_MARKER,
    CollectiveTime,
    LinkReport,
    LinkTask,
    Overlap,
    ProfilingReport,
    ProfilingTask,
    Progress,
    RankMemory,
    SeriesPart,
    TrialReport,
    TrialSeriesReport,
    TrialSeriesTask,
    WorkerTask,
)


def log_of(document: Any) -> str:
    told = parts_of(document.trials) if isinstance(document, TrialSeriesReport) else ""
    progress = f"{PROGRESS_MARKER} {documents.dumps(Progress(1, 2, 'rounds'))}\n"
    return f"starting\n{progress}{told}{REPORT_MARKER} {documents.dumps(document)}\n"


def parts_of(trials: Iterable[TrialReport]) -> str:
    """Return a worker's log lines about the first trials of a series."""
    parts = (documents.dumps(SeriesPart(number, trial)) for number, trial in enumerate(trials))
    return "".join(f"{SERIES_PART_MARKER} {part}\n" for part in parts)


def links_report(
    order: LinkTask, rate: Callable[[str, str], float] = lambda x, y: 1e8 if x == y else 1e7
) -> LinkReport:
    """Return a report of the task's links, each with the bandwidth that `rate` gives; collectives take a second."""
    names = [node.name for node in order.gang.nodes]
    pairs = list(combinations(names, 2)) if order.pairs is None else order.pairs
    edges = [edge for x, y in pairs for edge in ((x, y), (y, x))]
    edges += [(node.name, node.name) for node in order.gang.nodes if len(node.slots) > 1]
    devices = tuple(Device(node.name, slot) for node in order.gang.nodes for slot in node.slots)
    return LinkReport(
        tuple(Link(*edge, 1e-4, rate(*edge)) for edge in edges),
        tuple(CollectiveTime("all_reduce", devices, size, 1.0, 3) for size in order.collective_bytes),
        tuple(Overlap(name, 1.2) for name in names) if order.overlap else (),
    )


def report_of(order: WorkerTask) -> Any:
    """Return the report of a worker without faults."""
    if isinstance(order, LinkTask):
        return links_report(order)
    if isinstance(order, ProfilingTask):
        accelerator = order.gang.nodes[0].accelerator
        speed = 2.0 if "t4" in accelerator else 1.0
        return ProfilingReport(
            tuple(
                LayerProfile(
                    accelerator, kind.name, order.tensor_degree if kind.is_tensor_parallel else 1, rows,
                    0.01 * rows * speed, 0.02 * rows * speed, 0.001, 1000 * rows, 4 * kind.parameters,
                )
                for kind in order.layer_kinds
                for rows in order.rows
            )
        )  # fmt: skip
    if isinstance(order, TrialSeriesTask):
        return TrialSeriesReport(tuple(report_of(order.trial_task(number)) for number in range(len(order.plans))))
    seconds = 1.0 + 0.1 * len(order.plan.pipelines[0].stages)
    memory = tuple(RankMemory(device.node, device.slot, 1000) for device in order.plan.devices)
    return TrialReport(
        (seconds, seconds),
        (2.0, 1.0, 0.5),
        memory,
        paced_segments=1000,
        late_segments=1,
        mean_absolute_row_loss=2.0,
    )
