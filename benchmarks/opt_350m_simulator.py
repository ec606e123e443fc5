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
divided; layers that are recomputed take another forward and keep their inputs; runs of layers of one stage with degrees
of their own go one after the other (moving rows between them is not counted). `Verdict.beyond` says when that was needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from opt_350m_tables import DEVICES_PER_NODE, MEMORY_BYTES, Tables, ring_seconds

from trainwright.cluster import Cluster
from trainwright.plan import LayerRun, Pipeline, Plan, Sharding, Stage

VALUE_BYTES = 4
STATE_BYTES = 24
"""For each value: weight, gradient, two moments, a buffer to communicate, a copy that DeepSpeed keeps; 4 bytes each."""
OPTIMIZER_BYTES = 8
RUNTIME_BYTES, TENSOR_PARALLEL_RUNTIME_BYTES = 2e9, 3e9
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
            for stage, runs in zip(deepest.pipeline.stages, deepest.replicas, strict=True)
            for replica in runs[0]
        )

    def weight_bytes(self, first: int, end: int) -> float:
        """Of whole layers `first … end - 1`."""
        return sum(VALUE_BYTES * self.tables.layers["1"][str(layer)]["params_floats"] for layer in range(first, end))

    def output_bytes(self, layer: int) -> float:
        """Of one row."""
        return VALUE_BYTES * self.tables.layers["1"][str(layer)]["act_output_floats"]

    def replicas(self, stage: Stage, run: LayerRun) -> tuple[_Replica, ...]:
        """The data replicas of some layers of a stage."""
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


@dataclass(frozen=True)
class _Judged:
    """One pipeline of a plan."""

    simulator: Simulator
    pipeline: Pipeline

    @cached_property
    def replicas(self) -> tuple[tuple[tuple[_Replica, ...], ...], ...]:
        """By stage, by run of layers."""
        replicas = self.simulator.replicas
        return tuple(tuple(replicas(stage, run) for run in stage.layers) for stage in self.pipeline.stages)

    @property
    def _runs(self) -> Iterator[tuple[int, LayerRun, tuple[_Replica, ...]]]:
        """Number of the stage, layers, replicas."""
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
        """Forward and backward of one micro-batch on the slowest replica."""
        return max(
            sum(
                (1 + run.recompute) * self.simulator.layer_seconds(replica, layer, column=0)
                + self.simulator.layer_seconds(replica, layer, column=1)
                for layer in _layers(run)
            )
            for replica in dict.fromkeys(replicas)
        )

    def _sending_seconds(self, number: int) -> float:
        """To the stage behind and, of gradients, to the stage before.

        The first stage counts its outputs (twice in deep pipelines), the last one twice its gradients, the others both.
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
        """The slowest message; the j-th replica sends to the j-th of the other stage, modulo how many it has."""
        return max(
            self.simulator.tables.between(*sender.at_link, *receivers[index % len(receivers)].at_link).seconds(
                self.simulator.output_bytes(layer) * sender.rows
            )
            for index, sender in enumerate(senders)
        )

    @property
    def gradient_seconds(self) -> float:
        """The slowest stage's rings, one for the layers of each degree; in each the slowest pair of neighbours decides."""
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
        """Of stages with several runs of layers, as if one device had the most rows of each."""
        return max(self._held_bytes(number, name) - MEMORY_BYTES[name] for number, name in self._kinds())

    def _kinds(self) -> Iterator[tuple[int, str]]:
        """Stages and accelerators in them."""
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
                known = self.simulator.tables.layers[str(run.tensor)][str(layer)]
                state += _state_bytes(run) * known["params_floats"]
                activations: float = VALUE_BYTES * rows * known["act_mem_floats"]
                if run.recompute:
                    largest = max(largest, activations)
                    activations = rows * self.simulator.output_bytes(max(layer - 1, 0))
                kept += in_flight * activations
        is_tensor_parallel = any(run.tensor > 1 for run in stage.layers)
        return state + kept + largest + (TENSOR_PARALLEL_RUNTIME_BYTES if is_tensor_parallel else RUNTIME_BYTES)

    @property
    def beyond(self) -> Iterator[str]:
        """What the simulator's own equations do not know."""
        runs = [run for stage in self.pipeline.stages for run in stage.layers]
        every = [replica for _, _, replicas in self._runs for replica in replicas]
        if any(len({(run.tensor, run.rows, run.order) for run in stage.layers}) > 1 for stage in self.pipeline.stages):
            yield "degrees that change inside a stage"
        if any(len({replica.rows for replica in replicas}) > 1 for _, _, replicas in self._runs):
            yield "replicas with different rows"
        if len({self.replicas[number][0][0].rows for number in range(len(self.replicas))}) > 1:
            yield "stages with different rows"
        if not all(self.simulator.was_measured(replica) for replica in every):
            yield "rows that were not measured"
        if any(len(replica.accelerators) > 1 for replica in every):
            yield "tensor groups of two accelerators"
        if any(run.sharding is not Sharding.NONE for run in runs):
            yield "sharded optimizer state"
        if any(run.recompute for run in runs):
            yield "recomputed layers"


def _layers(run: LayerRun) -> range:
    return range(run.first, run.end)


def _state_bytes(run: LayerRun) -> float:
    """For each value. Raises ValueError for weights that are collected anew for each micro-batch."""
    if run.sharding is Sharding.ZERO3 and run.data > 1:
        raise ValueError("the simulator does not know weights that are sharded")
    return STATE_BYTES if run.sharding is Sharding.NONE else STATE_BYTES - OPTIMIZER_BYTES * (1 - 1 / run.data)
