"""Simulator of plans for OPT-350M: the equations of eth-easl/sailor, which published planners were compared by.

For a pipeline with stages i, their forward plus backward c_i of one micro-batch, their sending s_i and update u_i:

    T_pipeline = (m − 1) max_i (c_i + s_i) + Σ c_i + Σ s_i + max_i u_i
    T = max over pipelines of T_pipeline + max over stages of the gradients' rings (+ the rings across pipelines)

Sending never overlaps computation, replicas of a stage run in lock step, a ring's step is one message between devices
of two nodes, rings of one node do not slow each other, and tied weights are not reduced. A device holds 24 bytes for
each float32 parameter, the activations of one micro-batch for each stage from its own on, and 2 GB (3 GB if tensor
parallel) for the runtime.

Extensions, so that it can evaluate every plan of the planner: times of unmeasured rows are interpolated linearly; each
replica computes and sends its own rows; sharded optimizer state is divided; recomputed layers take another forward and
save their inputs; layer runs of one stage follow each other (redistribution of rows is not counted).
`SimulatedPlan.unmodelled` reports which a plan needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from opt_350m_tables import DEVICES_PER_NODE, MEMORY_BYTES, Tables, ring_seconds
from trainwright.cluster import Cluster
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.strategy import Sharding

VALUE_BYTES = 4
STATE_BYTES = 24
"""Bytes for each value: weight, gradient, two moments, a communication buffer and DeepSpeed's copy; 4 bytes each."""
OPTIMIZER_BYTES = 8
RUNTIME_BYTES, TENSOR_PARALLEL_RUNTIME_BYTES = 2e9, 3e9
DEEP_PIPELINE = 3
"""Number of stages above which the first stage's sending counts twice."""


@dataclass(frozen=True)
class SimulatedPlan:
    """Result of simulating a plan.

    Attributes:
        memory_shortfall_bytes: bytes that the fullest device lacks; at most 0 if the plan fits.
        peak_bytes: most bytes that a device holds.
        unmodelled: extensions of the simulator's equations that the plan needed, as text.
    """

    seconds: float
    pipeline_seconds: float
    gradient_seconds: float
    memory_shortfall_bytes: float
    peak_bytes: float
    unmodelled: tuple[str, ...] = ()

    @property
    def per_second(self) -> float:
        return 1 / self.seconds

    @property
    def fits(self) -> bool:
        return self.memory_shortfall_bytes <= 0


@dataclass(frozen=True)
class _Replica:
    """Data replica of a stage: its rows, and the accelerators of its tensor group (one, except in mixed groups)."""

    rows: int
    tensor: int
    accelerators: tuple[str, ...]

    @property
    def at_link(self) -> tuple[str, int]:
        """Return the replica's key in the tables of links between nodes."""
        return self.accelerators[0], min(self.tensor, DEVICES_PER_NODE)


@dataclass(frozen=True)
class Simulator:
    """Simulator of plans on a cluster with the tables' accelerators."""

    tables: Tables
    cluster: Cluster

    def judge(self, plan: Plan) -> SimulatedPlan:
        """Simulate a plan. Raises ValueError if no equation covers it."""
        judged = [_PipelineSimulation(self, pipeline) for pipeline in plan.pipelines]
        pipeline_seconds = max(one.seconds for one in judged)
        gradients = max(one.gradient_seconds for one in judged) + self._across_seconds(judged)
        beyond = dict.fromkeys(word for one in judged for word in one.beyond)
        if len({(pipeline.micro_batches, pipeline.micro_batch_size) for pipeline in plan.pipelines}) > 1:
            beyond["pipelines with different shares of the batch"] = None
        return SimulatedPlan(
            seconds=pipeline_seconds + gradients,
            pipeline_seconds=pipeline_seconds,
            gradient_seconds=gradients,
            memory_shortfall_bytes=max(one.lacking_bytes for one in judged),
            peak_bytes=max(one.peak_bytes for one in judged),
            unmodelled=tuple(beyond),
        )

    def _across_seconds(self, judged: list[_PipelineSimulation]) -> float:
        """Return seconds of the slowest all-reduce of a stage of the deepest pipeline over all pipelines, gradients unsharded."""
        deepest = max(judged, key=lambda one: len(one.pipeline.stages))
        return max(
            ring_seconds(
                self.weight_bytes(stage.first, stage.end),
                len(judged),
                self.tables.between(replica.accelerators[0], 1, replica.accelerators[0], 1),
            )
            for stage, runs in zip(deepest.pipeline.stages, deepest.replicas, strict=True)
            for replica in runs[0]
        )

    def weight_bytes(self, first: int, end: int) -> float:
        """Return unsharded weight bytes of layers `first … end - 1`."""
        return sum(VALUE_BYTES * self.tables.layers["1"][str(layer)]["params_floats"] for layer in range(first, end))

    def output_bytes(self, layer: int) -> float:
        """Return output bytes of one row."""
        return VALUE_BYTES * self.tables.layers["1"][str(layer)]["act_output_floats"]

    def replicas(self, stage: Stage, run: LayerRun) -> tuple[_Replica, ...]:
        """Return the data replicas of a layer run."""
        found = []
        for rows, group in zip(run.rows, run.strategy.tensor_groups(stage.devices), strict=True):
            names = dict.fromkeys(self.cluster.accelerator_of(device).name for device in group)
            found.append(_Replica(rows, run.strategy.tensor, tuple(names)))
        return tuple(found)

    def layer_seconds(self, replica: _Replica, layer: int, *, column: int) -> float:
        """Return seconds of forward (column 0), backward (1) or update (2) on the group's slowest accelerator."""
        return max(self._one(name, replica, layer, column) for name in replica.accelerators)

    def _one(self, name: str, replica: _Replica, layer: int, column: int) -> float:
        measured = self.tables.seconds[name].get(replica.tensor)
        if measured is None:
            raise ValueError(f"{name} was not measured at tensor degree {replica.tensor}")
        if replica.rows in measured:
            return measured[replica.rows][layer][column]
        low, high = _neighbours(sorted(measured), replica.rows)
        start, end = measured[low][layer][column], measured[high][layer][column]
        return start + (end - start) * (replica.rows - low) / (high - low)

    def was_measured(self, replica: _Replica) -> bool:
        return all(replica.rows in self.tables.seconds[name].get(replica.tensor, {}) for name in replica.accelerators)


def _neighbours(measured: list[int], rows: int) -> tuple[int, int]:
    """Return the measured rows on both sides of `rows`, or the nearest two."""
    return next(((low, high) for low, high in pairwise(measured) if rows < high), (measured[-2], measured[-1]))


@dataclass(frozen=True)
class _PipelineSimulation:
    """Simulation of one pipeline of a plan."""

    simulator: Simulator
    pipeline: Pipeline

    @cached_property
    def replicas(self) -> tuple[tuple[tuple[_Replica, ...], ...], ...]:
        """Return `[stage][run]` replicas."""
        replicas = self.simulator.replicas
        return tuple(tuple(replicas(stage, run) for run in stage.layers) for stage in self.pipeline.stages)

    @property
    def _runs(self) -> Iterator[tuple[int, LayerRun, tuple[_Replica, ...]]]:
        """Yield stage index, layer run and replicas."""
        for number, stage in enumerate(self.pipeline.stages):
            for run, replicas in zip(stage.layers, self.replicas[number], strict=True):
                yield number, run, replicas

    @property
    def seconds(self) -> float:
        compute = [0.0] * len(self.replicas)
        for number, run, replicas in self._runs:
            compute[number] += self._compute_seconds(run, replicas)
        sending = [self._sending_seconds(number) for number in range(len(self.replicas))]
        slowest = max(c + s for c, s in zip(compute, sending, strict=True))
        update = max(
            self.simulator.layer_seconds(replica, stage.first, column=2)
            for stage, runs in zip(self.pipeline.stages, self.replicas, strict=True)
            for replica in runs[0]
        )
        return (self.pipeline.micro_batches - 1) * slowest + sum(compute) + sum(sending) + update

    def _compute_seconds(self, run: LayerRun, replicas: tuple[_Replica, ...]) -> float:
        """Return seconds of forward and backward of one micro-batch on the slowest replica."""
        return max(
            sum(
                (1 + run.strategy.recompute) * self.simulator.layer_seconds(replica, layer, column=0)
                + self.simulator.layer_seconds(replica, layer, column=1)
                for layer in _layers(run)
            )
            for replica in dict.fromkeys(replicas)
        )

    def _sending_seconds(self, number: int) -> float:
        """Return seconds to send activations to the next stage and gradients to the previous one.

        The first stage counts its outputs (twice in deep pipelines), the last one twice its gradients, the others
        both.
        """
        last, stage, here = len(self.replicas) - 1, self.pipeline.stages[number], self.replicas[number]
        outputs = self._to(here[-1], self.replicas[number + 1][0], stage.end - 1) if number < last else 0.0
        gradients = self._to(here[0], self.replicas[number - 1][-1], stage.first) if number > 0 else 0.0
        if 0 < number < last:
            return outputs + gradients
        if number == last:
            return 2 * gradients
        return outputs if last + 1 <= DEEP_PIPELINE else 2 * outputs

    def _to(self, senders: tuple[_Replica, ...], receivers: tuple[_Replica, ...], layer: int) -> float:
        """Return seconds of the slowest message; replica j sends to replica j modulo the other stage's replicas."""
        return max(
            self.simulator.tables.between(*sender.at_link, *receivers[index % len(receivers)].at_link).seconds(
                self.simulator.output_bytes(layer) * sender.rows
            )
            for index, sender in enumerate(senders)
        )

    @property
    def gradient_seconds(self) -> float:
        """Return ring seconds of the slowest stage: one ring for runs with equal replicas, paced by its slowest neighbours."""
        held: Counter[tuple[int, tuple[_Replica, ...]]] = Counter()
        for number, run, replicas in self._runs:
            held[number, replicas] += round(self.simulator.weight_bytes(run.first, run.end))
        rings = [0.0] * len(self.replicas)
        for (number, replicas), weights in held.items():
            part = weights / min(DEVICES_PER_NODE, replicas[0].tensor)
            pairs = [*pairwise(replicas), (replicas[0], replicas[0])]
            rings[number] += max(
                ring_seconds(
                    part, len(replicas), self.simulator.tables.between(a.accelerators[0], 1, b.accelerators[0], 1)
                )
                for a, b in pairs
            )
        return max(rings)

    @property
    def lacking_bytes(self) -> float:
        """Bound the memory shortfall as if one device had the most rows of each layer run of its stage."""
        return max(self._held_bytes(number, name) - MEMORY_BYTES[name] for number, name in self._kinds())

    @property
    def peak_bytes(self) -> float:
        return max(self._held_bytes(number, name) for number, name in self._kinds())

    def _kinds(self) -> Iterator[tuple[int, str]]:
        """Yield each stage and its accelerators."""
        for number, runs in enumerate(self.replicas):
            for name in dict.fromkeys(name for replica in runs[0] for name in replica.accelerators):
                yield number, name

    def _held_bytes(self, number: int, accelerator: str) -> float:
        in_flight = len(self.replicas) - number
        state = kept = largest = 0.0
        stage = self.pipeline.stages[number]
        for run, replicas in zip(stage.layers, self.replicas[number], strict=True):
            rows = max(replica.rows for replica in replicas if accelerator in replica.accelerators)
            for layer in _layers(run):
                known = self.simulator.tables.layers[str(run.strategy.tensor)][str(layer)]
                state += _state_bytes(run) * known["params_floats"]
                activations: float = VALUE_BYTES * rows * known["act_mem_floats"]
                if run.strategy.recompute:
                    largest = max(largest, activations)
                    activations = rows * self.simulator.output_bytes(max(layer - 1, 0))
                kept += in_flight * activations
        is_tensor_parallel = any(run.strategy.tensor > 1 for run in stage.layers)
        return state + kept + largest + (TENSOR_PARALLEL_RUNTIME_BYTES if is_tensor_parallel else RUNTIME_BYTES)

    @property
    def beyond(self) -> Iterator[str]:
        """List the extensions of the simulator's equations that the plan needs."""
        runs = [run for stage in self.pipeline.stages for run in stage.layers]
        every = [replica for _, _, replicas in self._runs for replica in replicas]
        if any(
            len({(run.strategy.tensor, run.rows, run.strategy.order) for run in stage.layers}) > 1
            for stage in self.pipeline.stages
        ):
            yield "degrees that change inside a stage"
        if any(len({replica.rows for replica in replicas}) > 1 for _, _, replicas in self._runs):
            yield "replicas with different rows"
        if len({self.replicas[number][0][0].rows for number in range(len(self.replicas))}) > 1:
            yield "stages with different rows"
        if not all(self.simulator.was_measured(replica) for replica in every):
            yield "rows that were not measured"
        if any(len(replica.accelerators) > 1 for replica in every):
            yield "tensor groups of two accelerators"
        if any(run.strategy.sharding is not Sharding.NONE for run in runs):
            yield "sharded optimizer state"
        if any(run.strategy.recompute for run in runs):
            yield "recomputed layers"


def _layers(run: LayerRun) -> range:
    return range(run.first, run.end)


def _state_bytes(run: LayerRun) -> float:
    """Return state bytes per parameter. Raises ValueError for ZeRO-3 weights, which the simulator does not model."""
    if run.strategy.sharding is Sharding.ZERO3 and run.strategy.data > 1:
        raise ValueError("the simulator does not know weights that are sharded")
    return (
        STATE_BYTES
        if run.strategy.sharding is Sharding.NONE
        else STATE_BYTES - OPTIMIZER_BYTES * (1 - 1 / run.strategy.data)
    )
