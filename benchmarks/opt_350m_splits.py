"""Enumeration of OPT-350M plans: pipelines of few stages, each on one accelerator type, judged by the simulator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from opt_350m_simulator import SimulatedPlan, Simulator
from opt_350m_tables import GLOBAL_BATCH_SIZE, MODEL
from trainwright.cluster import Cluster, Device
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.strategy import Strategy

ROWS = (1, 2, 4, 8)
TENSOR_DEGREES = (1, 2, 4)
"""Degrees and rows measured on both accelerators."""


@dataclass(frozen=True)
class Cut:
    """Accelerator, degrees and exclusive end layer of one stage."""

    accelerator: str
    tensor: int
    data: int
    end: int


def pipeline_plan(cluster: Cluster, cuts: tuple[Cut, ...], micro_batch_size: int) -> Plan:
    """Return a plan of one pipeline with these stages; devices are taken node by node.

    Raises ValueError if a data degree does not divide the rows.
    """
    free: dict[str, Iterator[Device]] = {
        accelerator.name: iter(
            [device for device in cluster.devices if cluster.accelerator_of(device).name == accelerator.name]
        )
        for accelerator in cluster.accelerators
    }
    stages, first = [], 0
    for cut in cuts:
        rows, rest = divmod(micro_batch_size, cut.data)
        if rest:
            raise ValueError(f"{cut.data} replicas cannot share {micro_batch_size} rows evenly")
        devices = tuple(islice(free[cut.accelerator], cut.tensor * cut.data))
        stages.append(
            Stage(devices, (LayerRun(first, cut.end - first, Strategy(cut.tensor, cut.data), (rows,) * cut.data),))
        )
        first = cut.end
    pipeline = Pipeline(GLOBAL_BATCH_SIZE // micro_batch_size, micro_batch_size, tuple(stages))
    return Plan(len(MODEL.layers), GLOBAL_BATCH_SIZE, (pipeline,))


def two_stage_splits(cluster: Cluster, order: tuple[str, str], devices: Mapping[str, int]) -> Iterator[Plan]:
    """Iterate over splits with all devices, equal degrees and rows on both accelerators, and any cut."""
    for tensor in TENSOR_DEGREES:
        data = devices[order[0]] // tensor
        for rows in ROWS:
            if data and GLOBAL_BATCH_SIZE % (rows * data) == 0:
                for end in range(1, len(MODEL.layers)):
                    cuts = (Cut(order[0], tensor, data, end), Cut(order[1], tensor, data, len(MODEL.layers)))
                    yield pipeline_plan(cluster, cuts, rows * data)


def one_accelerator(cluster: Cluster, name: str, devices: int) -> Iterator[Plan]:
    """Iterate over plans of one or two stages on the devices of one accelerator type."""
    for tensor in TENSOR_DEGREES:
        for stages in (1, 2):
            data = devices // tensor // stages
            for rows in ROWS:
                if not data or GLOBAL_BATCH_SIZE % (rows * data):
                    continue
                for end in range(1, len(MODEL.layers)) if stages == 2 else (len(MODEL.layers),):
                    ends = dict.fromkeys((end, len(MODEL.layers)))
                    cuts = tuple(Cut(name, tensor, data, last) for last in ends)
                    yield pipeline_plan(cluster, cuts, rows * data)


def best_fitting(simulator: Simulator, plans: Iterator[Plan]) -> tuple[Plan, SimulatedPlan] | None:
    """Return the fastest plan that fits by the simulator, skipping plans that it cannot judge."""
    best = None
    for plan in plans:
        try:
            verdict = simulator.judge(plan)
        except ValueError:
            continue
        if verdict.fits and (best is None or verdict.seconds < best[1].seconds):
            best = plan, verdict
    return best
