"""The judge of plans for OPT-350M: the equations of eth-easl/sailor's simulator, which published planners were compared by.

For a pipeline with stages i, their forward plus backward c_i of one micro-batch, their sending s_i and update u_i:

    T_pipeline = (m − 1) max_i (c_i + s_i) + Σ c_i + Σ s_i + max_i u_i
    T = max over pipelines of T_pipeline + max over stages of the gradients' rings (+ the rings across pipelines)

Sending is never hidden, replicas of a stage go in step, a ring's step is one message of one device to a device of
another node, rings of one node do not slow each other, and tied weights are not summed. A device holds 24 bytes for
each value (of float32), the activations of one micro-batch for each stage from its own on, and 2 GB (3 GB where it is
tensor parallel) of the runtime.

Beyond those equations, so that every plan can be judged that the planner may find: rows that were not measured lie on
the line between those that were; each replica computes and sends its own rows; optimizer state that is sharded is
divided; layers that are recomputed take another forward and keep their inputs. `Verdict.beyond` says when that was needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from opt_350m_tables import DEVICES_PER_NODE, MEMORY_BYTES, Curve, Tables

from trainwright.cluster import Cluster
from trainwright.plan import LayerRun, Pipeline, Plan, Sharding, Stage

VALUE_BYTES = 4
STATE_BYTES = 24
"""For each value: weight, gradient, two moments, a buffer to communicate, a copy that DeepSpeed keeps; 4 bytes each."""
OPTIMIZER_BYTES = 8
RUNTIME_BYTES, TENSOR_PARALLEL_RUNTIME_BYTES = 2e9, 3e9
BUCKET_BYTES = 5e8
"""Gradients are summed in buckets of that size."""
DEEP_PIPELINE = 3
"""Beyond so many stages the first one's sending counts twice."""


@dataclass(frozen=True)
class Verdict:
    """What the simulator says of a plan.

    Attributes:
        lacking_bytes: what the fullest device lacks; at most 0 where the plan fits.
        beyond: what the simulator's own equations do not know of it, in words.
    """

    seconds: float
    pipeline_seconds: float
    gradient_seconds: float
    lacking_bytes: float
    beyond: tuple[str, ...] = ()

    @property
    def per_second(self) -> float:
        """Iterations."""
        return 1 / self.seconds

    @property
    def fits(self) -> bool:
        return self.lacking_bytes <= 0


@dataclass(frozen=True)
class _Replica:
    """One data replica of a stage: its rows, and the accelerators of its tensor group (one, but for mixed groups)."""

    rows: int
    tensor: int
    accelerators: tuple[str, ...]

    @property
    def at_link(self) -> tuple[str, int]:
        """How it is looked up in the tables of links between nodes."""
        return self.accelerators[0], min(self.tensor, DEVICES_PER_NODE)


@dataclass(frozen=True)
class Simulator:
    """Judges plans on a cluster whose accelerators are those of the tables."""

    tables: Tables
    cluster: Cluster

    def judge(self, plan: Plan) -> Verdict:
        """Raises ValueError for a plan that no equation of the simulator covers."""
        judged = [_Judged(self, pipeline) for pipeline in plan.pipelines]
        pipeline_seconds = max(one.seconds for one in judged)
        gradients = max(one.gradient_seconds for one in judged) + self._across_seconds(judged)
        beyond = dict.fromkeys(word for one in judged for word in one.beyond)
        if len({(pipeline.micro_batches, pipeline.micro_batch_size) for pipeline in plan.pipelines}) > 1:
            beyond["pipelines with different shares of the batch"] = None
        return Verdict(
            seconds=pipeline_seconds + gradients,
            pipeline_seconds=pipeline_seconds,
            gradient_seconds=gradients,
            lacking_bytes=max(one.lacking_bytes for one in judged),
            beyond=tuple(beyond),
        )

    def _across_seconds(self, judged: list[_Judged]) -> float:
        """Whole gradients of the deepest pipeline's stages over all pipelines."""
        deepest = max(judged, key=lambda one: len(one.pipeline.stages))
        return max(
            ring_seconds(
                self.weight_bytes(stage.first, stage.end),
                len(judged),
                self.tables.between(replica.accelerators[0], 1, replica.accelerators[0], 1),
            )
            for stage, replicas in zip(deepest.pipeline.stages, deepest.replicas, strict=True)
            for replica in replicas
        )

    def weight_bytes(self, first: int, end: int) -> float:
        """Of whole layers `first … end - 1`."""
        return sum(VALUE_BYTES * self.tables.layers["1"][str(layer)]["params_floats"] for layer in range(first, end))

    def output_bytes(self, layer: int) -> float:
        """Of one row."""
        return VALUE_BYTES * self.tables.layers["1"][str(layer)]["act_output_floats"]

    def replicas(self, stage: Stage) -> tuple[_Replica, ...]:
        """Raises ValueError where the layers of a stage do not share degrees."""
        run = stage.layers[0]
        if any((other.tensor, other.rows, other.order) != (run.tensor, run.rows, run.order) for other in stage.layers):
            raise ValueError("the simulator knows one tensor degree and one split of the rows for each stage")
        found = []
        for rows, group in zip(run.rows, run.tensor_groups(stage.devices), strict=True):
            names = dict.fromkeys(self.cluster.accelerator_of(device).name for device in group)
            found.append(_Replica(rows, run.tensor, tuple(names)))
        return tuple(found)

    def layer_seconds(self, replica: _Replica, layer: int, *, column: int) -> float:
        """Forward (column 0), backward (1) or update (2); the slowest accelerator of a mixed group decides."""
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
    """The measured rows on both sides; outside of them the nearest two."""
    return next(((low, high) for low, high in pairwise(measured) if rows < high), (measured[-2], measured[-1]))


def ring_seconds(message_bytes: float, members: int, curve: Curve) -> float:
    """An all-reduce in buckets: for each 2 (n − 1) messages of its n-th part, one after the other."""
    if members < 2:
        return 0.0
    full, rest = divmod(message_bytes, BUCKET_BYTES)
    seconds = full * curve.seconds(BUCKET_BYTES / members) if full else 0.0
    if rest:
        seconds += curve.seconds(rest / members)
    return 2 * (members - 1) * seconds


@dataclass(frozen=True)
class _Judged:
    """One pipeline of a plan."""

    simulator: Simulator
    pipeline: Pipeline

    @cached_property
    def replicas(self) -> tuple[tuple[_Replica, ...], ...]:
        """By stage."""
        return tuple(self.simulator.replicas(stage) for stage in self.pipeline.stages)

    @property
    def seconds(self) -> float:
        compute = [self._compute_seconds(number) for number in range(len(self.replicas))]
        sending = [self._sending_seconds(number) for number in range(len(self.replicas))]
        slowest = max(c + s for c, s in zip(compute, sending, strict=True))
        update = max(
            self.simulator.layer_seconds(replica, stage.first, column=2)
            for stage, replicas in zip(self.pipeline.stages, self.replicas, strict=True)
            for replica in replicas
        )
        return (self.pipeline.micro_batches - 1) * slowest + sum(compute) + sum(sending) + update

    def _compute_seconds(self, number: int) -> float:
        """Forward and backward of one micro-batch on the slowest replica."""
        return max(
            sum(
                (1 + run.recompute) * self.simulator.layer_seconds(replica, layer, column=0)
                + self.simulator.layer_seconds(replica, layer, column=1)
                for run, layer in _layers(self.pipeline.stages[number])
            )
            for replica in dict.fromkeys(self.replicas[number])
        )

    def _sending_seconds(self, number: int) -> float:
        """To the stage behind and, of gradients, to the stage before.

        The first stage counts its outputs (twice in deep pipelines), the last one twice its gradients, the others both.
        """
        last = len(self.replicas) - 1
        stage = self.pipeline.stages[number]
        outputs = self._to(number, number + 1, stage.end - 1) if number < last else 0.0
        gradients = self._to(number, number - 1, stage.first) if number > 0 else 0.0
        if 0 < number < last:
            return outputs + gradients
        if number == last:
            return 2 * gradients
        return outputs if last + 1 <= DEEP_PIPELINE else 2 * outputs

    def _to(self, number: int, other: int, layer: int) -> float:
        """The slowest message; the j-th replica sends to the j-th of the other stage, modulo how many it has."""
        receivers = self.replicas[other]
        return max(
            self.simulator.tables.between(*sender.at_link, *receivers[index % len(receivers)].at_link).seconds(
                self.simulator.output_bytes(layer) * sender.rows
            )
            for index, sender in enumerate(self.replicas[number])
        )

    @property
    def gradient_seconds(self) -> float:
        """The slowest stage's ring; in it the slowest pair of neighbours decides."""
        return max(
            ring_seconds(
                self.simulator.weight_bytes(stage.first, stage.end) / min(DEVICES_PER_NODE, replicas[0].tensor),
                len(replicas),
                self.simulator.tables.between(one.accelerators[0], 1, other.accelerators[0], 1),
            )
            for stage, replicas in zip(self.pipeline.stages, self.replicas, strict=True)
            for one, other in [*pairwise(replicas), (replicas[0], replicas[0])]
        )

    @property
    def lacking_bytes(self) -> float:
        return max(
            self._held_bytes(number, replica) - min(MEMORY_BYTES[name] for name in replica.accelerators)
            for number, replicas in enumerate(self.replicas)
            for replica in dict.fromkeys(replicas)
        )

    def _held_bytes(self, number: int, replica: _Replica) -> float:
        known = self.simulator.tables.layers[str(replica.tensor)]
        in_flight = len(self.replicas) - number
        state = kept = largest = 0.0
        for run, layer in _layers(self.pipeline.stages[number]):
            state += _state_bytes(run) * known[str(layer)]["params_floats"]
            activations: float = VALUE_BYTES * replica.rows * known[str(layer)]["act_mem_floats"]
            if run.recompute:
                largest = max(largest, activations)
                activations = replica.rows * self.simulator.output_bytes(max(layer - 1, 0))
            kept += in_flight * activations
        runtime = RUNTIME_BYTES if replica.tensor == 1 else TENSOR_PARALLEL_RUNTIME_BYTES
        return state + kept + largest + runtime

    @property
    def beyond(self) -> Iterator[str]:
        """What the simulator's own equations do not know."""
        runs = [run for stage in self.pipeline.stages for run in stage.layers]
        every = [replica for replicas in self.replicas for replica in replicas]
        if len({replica.rows for replica in every}) > 1:
            yield "replicas with different rows"
        if not all(self.simulator.was_measured(replica) for replica in every):
            yield "rows that were not measured"
        if any(len(replica.accelerators) > 1 for replica in every):
            yield "tensor groups of two accelerators"
        if any(run.sharding is not Sharding.NONE for run in runs):
            yield "sharded optimizer state"
        if any(run.recompute for run in runs):
            yield "recomputed layers"


def _layers(stage: Stage) -> Iterator[tuple[LayerRun, int]]:
    for run in stage.layers:
        for layer in range(run.first, run.first + run.count):
            yield run, layer


def _state_bytes(run: LayerRun) -> float:
    """For each value. Raises ValueError for weights that are collected anew for each micro-batch."""
    if run.sharding is Sharding.ZERO3 and run.data > 1:
        raise ValueError("the simulator does not know weights that are sharded")
    return STATE_BYTES if run.sharding is Sharding.NONE else STATE_BYTES - OPTIMIZER_BYTES * (1 - 1 / run.data)
