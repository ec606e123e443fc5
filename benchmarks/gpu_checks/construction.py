"""Construction of a rank on the device: how long its weights take to be drawn, and in how much memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Self

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from gpu_checks.findings import Finding, judged, skipped
from gpu_checks.hardware import NO_GPU_SECONDS, Hardware
from gpu_checks.running import Subject
from trainwright.cluster import Device
from trainwright.families import Llama
from trainwright.model import Model
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.strategy import Sharding, Strategy
from trainwright_worker.device import synchronize
from trainwright_worker.executor.executor import PlanExecutor, RankContext, TrainingConfig
from trainwright_worker.executor.process_groups import ProcessGroups
from trainwright_worker.live_bytes import measure_peak_bytes

RANKS = 8
SECONDS, WEIGHTS = 5.0, 0.9e9
"""Seconds within which one data-centre GPU is to draw this number of weights."""


def subjects(hardware: Hardware) -> Iterator[Subject]:
    """Yield a whole model on one device, and the first of eight ranks under each sharding."""
    yield Subject("one device", partial(find_seconds, hardware))
    for sharding in (Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3):
        yield Subject(f"{sharding} over {RANKS}", partial(find_memory, hardware, sharding))


def model_of(hardware: Hardware) -> Model:
    """Return a model of 0.9 billion weights."""
    if hardware.small:
        return Model.of(Llama(3, 64, 4, 32, 256, intermediate_size=128), hardware.half)
    return Model.of(Llama(16, 2048, 16, 128, 32000), hardware.half)


def find_seconds(hardware: Hardware) -> Iterator[Finding]:
    """Time the construction of the whole model on one device."""
    model = model_of(hardware)
    weights = sum(model.kind_of(layer).parameters for layer in range(len(model.layers)))
    torch.zeros(1, device=hardware.device)  # CUDA starts
    synchronize(hardware.device)
    begin = time.perf_counter()
    with _Rank(hardware, model, Sharding.NONE, 1) as rank:
        rank.construct()
        synchronize(hardware.device)
    seconds = time.perf_counter() - begin
    limit = SECONDS * weights / WEIGHTS
    subject, measured, expected = f"{weights / 1e9:.3g} billion weights", f"{seconds:.2f} s", f"below {limit:.2g} s"
    if hardware.is_gpu:
        yield judged(subject, measured, expected, holds=seconds < limit)
    else:
        yield skipped(subject, NO_GPU_SECONDS, measured, expected)


def find_memory(hardware: Hardware, sharding: Sharding) -> Iterator[Finding]:
    """Compare the peak of a rank's construction with that of its iteration."""
    hardware.empty_cache()
    made: list[PlanExecutor] = []
    with _Rank(hardware, model_of(hardware), sharding, RANKS) as rank:
        construction = measure_peak_bytes(lambda: made.append(rank.construct()), [], hardware.device)
        executor = made[0]
        batch = executor.make_batch(0)
        resident = [*executor.optimizer.resident_tensors, *batch.tensors]
        iteration = measure_peak_bytes(lambda: executor.run_iteration(batch), resident, hardware.device)
    measured, expected = (f"{peak / 2**20:.5g} MiB" for peak in (construction, iteration))
    yield judged(
        f"{sharding} over {RANKS}", measured, f"at most the iteration's {expected}", holds=construction <= iteration
    )


class _Rank:
    """First rank of a plan of one stage, under the fake process group."""

    def __init__(self, hardware: Hardware, model: Model, sharding: Sharding, data: int) -> None:
        self._hardware, self._model, self._data = hardware, model, data
        layers = len(model.layers)
        devices = tuple(Device("node", slot) for slot in range(data))
        run = LayerRun(0, layers, Strategy(1, data, sharding=sharding), (1,) * data)
        self._plan = Plan(layers, data, (Pipeline(1, data, (Stage(devices, (run,)),)),))

    def __enter__(self) -> Self:
        dist.init_process_group("fake", rank=0, world_size=self._data, store=FakeStore())
        return self

    def construct(self) -> PlanExecutor:
        """Make the rank's executor, which draws its weights."""
        context = RankContext(0, self._hardware.device)
        return PlanExecutor(self._plan, self._model, TrainingConfig(), context, ProcessGroups(timedelta(minutes=1)))

    def __exit__(self, *exception: object) -> None:
        dist.destroy_process_group()
