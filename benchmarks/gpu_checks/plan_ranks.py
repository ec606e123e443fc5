"""Single ranks of plans for eight devices, alone on one under the fake process group: memory and compute, as predicted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path

import torch
import torch.distributed as dist
from random_plans import random_plan
from torch.testing._internal.distributed.fake_pg import FakeStore

from gpu_checks.findings import Finding, predicted, skipped
from gpu_checks.hardware import NO_GPU_SECONDS, Hardware
from gpu_checks.running import Subject
from gpu_checks.whole_trials import uniform_plan
from gpu_checks.worker_commands import WorkerCommands
from trainwright import documents
from trainwright.cluster import Device
from trainwright.families import Llama
from trainwright.layer import Attention, Dtype
from trainwright.model import Model
from trainwright.plan import Plan, Schedule, check_plan_of_model
from trainwright.profiles import Profiles
from trainwright.report.iteration_chart import Activity
from trainwright.report.measured_timeline import spans
from trainwright.runtime import Runtime
from trainwright.strategy import Sharding
from trainwright.timeline import Moment
from trainwright.training import Optimizer, RequestedDtype, Training
from trainwright_worker.executor.executor import PlanExecutor, RankContext, TrainingConfig
from trainwright_worker.executor.plan_ranks import PlanRanks
from trainwright_worker.executor.process_groups import ProcessGroups
from trainwright_worker.live_bytes import measure_peak_bytes

DEVICES = tuple(Device(f"node-{number // 4}", number % 4) for number in range(8))
ROWS, MICRO_BATCHES = 8, 4
RANDOM_PLANS = 4
MEMORY_SHARE = 0.9
"""Share of the memory above which a prediction is not tried."""
ITERATIONS = 3


def subjects(hardware: Hardware) -> Iterator[Subject]:
    """Yield all plans in the native half format, and one in float16, whose gradients are scaled."""
    yield from RankBench(hardware, _llama(hardware.half, small=hardware.small), _plans(hardware)).subjects()
    if hardware.half is not Dtype.FLOAT16:
        zero3 = {"zero3 8": _plans(hardware)["zero3 8"]}
        yield from RankBench(hardware, _llama(Dtype.FLOAT16, small=hardware.small), zero3).subjects()


@dataclass(frozen=True, slots=True)
class GivenPlan:
    """Plan and training of two documents.

    Attributes:
        ranks: those to check; empty: the first of the first and of the last stage.
    """

    name: str
    plan: Plan
    training: Training
    ranks: tuple[int, ...]

    @classmethod
    def read(cls, plan_file: Path, model_file: Path, ranks: Sequence[int]) -> GivenPlan:
        """Read the documents. Raises OSError, or ValueError with one sentence."""
        plan: Plan = documents.loads(plan_file.read_bytes(), Plan, source=str(plan_file))
        training: Training = documents.loads(model_file.read_bytes(), Training, source=str(model_file))
        if training.attention is not Attention.FUSED:
            raise ValueError(f"{model_file}: attention: the worker computes fused attention alone; leave the line out")
        try:
            check_plan_of_model(plan, training.family.stack(training.attention), str(model_file))
        except ValueError as error:
            raise ValueError(f"{plan_file}: {error}") from None
        for rank in ranks:
            if not 0 <= rank < len(plan.devices):
                raise ValueError(f"--rank: the plan has ranks 0 to {len(plan.devices) - 1}, got {rank}")
        return cls(plan_file.stem, plan, training, tuple(ranks))

    def subjects(self, hardware: Hardware) -> Iterator[Subject]:
        """Yield the ranks, in the device's half format unless the training names one."""
        training = self.training
        if training.dtype is RequestedDtype.AUTO:
            training = training.in_format(hardware.half)
        bench = RankBench(hardware, training.model, {self.name: self.plan}, training.optimizer, self.ranks)
        yield from bench.subjects()


def _llama(dtype: Dtype, *, small: bool) -> Model:
    if small:
        return Model.of(Llama(3, 64, 4, 32, 256, intermediate_size=128), dtype)
    return Model.of(Llama(4, 4096, 32, 2048, 8192), dtype)


def _plans(hardware: Hardware) -> dict[str, Plan]:
    """Return one plan of each kind, and some random ones."""
    layers = len(_llama(hardware.half, small=hardware.small).layers)

    def uniform(
        devices: Sequence[Device] = DEVICES, *, data: int, tensor: int = 1, **strategy: Sharding | bool
    ) -> Plan:
        return uniform_plan(
            layers, devices, rows=ROWS, micro_batches=MICRO_BATCHES, data=data, tensor=tensor, **strategy
        )

    found = {
        "data 8": uniform(data=8),
        "zero3 8": uniform(data=8, sharding=Sharding.ZERO3),
        "tensor 2, data 2, 2 stages, zero1": uniform(data=2, tensor=2, sharding=Sharding.ZERO1),
        "data 2, 4 stages, gpipe, recompute": replace(uniform(data=2, recompute=True), schedule=Schedule.GPIPE),
    }
    if not hardware.small:
        found["tensor 4, data 2, zero2"] = uniform(data=2, tensor=4, sharding=Sharding.ZERO2)
        halves = uniform(DEVICES[:4], data=2, tensor=2), uniform(DEVICES[4:], data=4, sharding=Sharding.ZERO3)
        pipelines = tuple(half.pipelines[0] for half in halves)
        found["tensor 2, data 2 beside zero3 4"] = Plan(layers, 2 * halves[0].global_batch_size, pipelines)
        for seed in range(RANDOM_PLANS):
            found[f"random {seed}"] = random_plan(seed, layers=layers, tensor_degrees=(1, 2, 4), devices=8)
    return found


@dataclass(frozen=True)
class RankBench:
    """Model and plans, of which one rank after another runs on the one device at hand.

    Attributes:
        plans: by name.
        ranks: those that run; empty: the first of the first and of the last stage, which may be of different pipelines.
    """

    hardware: Hardware
    model: Model
    plans: Mapping[str, Plan]
    optimizer: Optimizer = "adam"
    ranks: tuple[int, ...] = ()

    def subjects(self) -> Iterator[Subject]:
        """Yield every rank that runs."""
        for name, plan in self.plans.items():
            ends = plan.pipelines[0].stages[0], plan.pipelines[-1].stages[-1]
            for rank in self.ranks or dict.fromkeys(plan.devices.index(stage.devices[0]) for stage in ends):
                subject = f"{self.model.dtype} {name}, rank {rank}"
                yield Subject(subject, partial(self.find, subject, plan, rank))

    @cached_property
    def measured(self) -> tuple[Profiles, Runtime]:
        rows: defaultdict[int, set[int]] = defaultdict(set)
        for plan in self.plans.values():
            for run in (run for pipeline in plan.pipelines for stage in pipeline.stages for run in stage.layers):
                for degree in {1, run.strategy.tensor}:  # no tensor degree divides some kinds of layers
                    rows[degree] |= set(run.rows)
        return WorkerCommands(self.hardware).profile(self.model, rows)

    def find(self, subject: str, plan: Plan, rank: int) -> Iterator[Finding]:
        """Run a rank's iterations, whose collectives return at once, and compare them with the prediction."""
        estimate = WorkerCommands(self.hardware).predict(plan, self.model, *self.measured, optimizer=self.optimizer)
        expected_bytes = dict(estimate.memory_by_device)[plan.devices[rank]]
        expected_bytes -= estimate.memory_parts[rank].constant_bytes  # outside the allocator
        if expected_bytes > MEMORY_SHARE * self.hardware.memory_bytes:
            yield skipped(subject, f"it needs {_mebibytes(expected_bytes)} of {_mebibytes(self.hardware.memory_bytes)}")
            return
        dist.init_process_group("fake", rank=rank, world_size=len(plan.devices), store=FakeStore())
        try:
            peak, seconds = self._measure(plan, rank)
        finally:
            dist.destroy_process_group()
        figures = _mebibytes(peak), _mebibytes(expected_bytes)
        yield predicted(f"{subject}: memory", figures, expected_bytes / peak - 1, aim=0.10, limit=0.15)
        expected_seconds = compute_seconds(plan, rank, self.model, self.measured[0], self.hardware.name)
        figures = f"{1e3 * seconds:.1f} ms", f"{1e3 * expected_seconds:.1f} ms"
        if self.hardware.is_gpu:
            yield predicted(f"{subject}: compute", figures, expected_seconds / seconds - 1, aim=0.05, limit=0.10)
        else:
            yield skipped(f"{subject}: compute", NO_GPU_SECONDS, *figures)

    def _measure(self, plan: Plan, rank: int) -> tuple[int, float]:
        """Return the allocator's peak and the median seconds of all forwards and backwards of an iteration."""
        self.hardware.empty_cache()
        device = self.hardware.device
        held = torch.cuda.memory_allocated(device) if self.hardware.is_gpu else 0
        groups = ProcessGroups(timedelta(minutes=1))
        executor = PlanExecutor(plan, self.model, TrainingConfig(self.optimizer), RankContext(rank, device), groups)
        batch = executor.make_batch(0)
        executor.run_iteration(batch)
        seconds = []
        for _ in range(1 if self.hardware.small else ITERATIONS):
            executor.recorder.begin()
            executor.run_iteration(batch)
            seconds.append(computing_seconds(executor.recorder.end()))
        resident = [*executor.optimizer.resident_tensors, *batch.tensors]
        peak = measure_peak_bytes(partial(executor.run_iteration, batch), resident, device) - held
        return peak, sorted(seconds)[len(seconds) // 2]


def computing_seconds(moments: Sequence[Moment]) -> float:
    """Return the seconds of a rank's forwards and backwards, without gathers of weights, which the fake group copies."""
    passes = {Activity.FORWARD, Activity.BACKWARD}
    return sum(span.end - span.start for span in spans(moments) if span.activity in passes)


def compute_seconds(plan: Plan, rank: int, model: Model, profiles: Profiles, accelerator: str) -> float:
    """Return the profiled seconds of a rank's forwards and backwards in one iteration."""
    stage = PlanRanks.of(plan).stage_of(rank)
    total = 0.0
    for run in stage.runs:
        rows = run.rows[run.position_of(rank).replica]
        for layer in range(run.first, run.end):
            kind = model.kind_of(layer)
            degree = run.arrangement.tensor if kind.is_tensor_parallel else 1
            cost = profiles.cost(accelerator, kind.name, degree, rows)
            total += (1 + run.run.strategy.recompute) * cost.forward_seconds + cost.backward_seconds
    return plan.pipelines[stage.pipeline].micro_batches * total


def _mebibytes(count: float) -> str:
    return f"{count / 2**20:.5g} MiB"
