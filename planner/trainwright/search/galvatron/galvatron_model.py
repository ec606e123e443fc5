"""Cost model of Galvatron-BMW (§IV and §V, Eq. 1–8), for reproduction and to preselect candidates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trainwright.cluster import Device
from trainwright.cost.boundary_terms import boundary_terms
from trainwright.cost.collectives import NO_COMMUNICATION, Collective, single_ring
from trainwright.cost.context import CostContext
from trainwright.cost.layer_sums import Array
from trainwright.cost.memory_terms import activation_bytes, frozen_bytes, shard_values, state_bytes
from trainwright.cost.messages import gather_messages, message_count
from trainwright.cost.time_terms import TensorGroupClass, overlapped_seconds, pipeline_seconds, tensor_sync_seconds
from trainwright.layer import LayerKind
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.rank_layout import RankLayout
from trainwright.strategy import RankOrder, Sharding

Indices = NDArray[np.intp]


class StageGroupLinks:
    """Links between the nodes of some devices; `nodes[device]` numbers the device's node."""

    def __init__(self, devices: Sequence[Device], context: CostContext) -> None:
        links = context.link_matrices
        names = list(dict.fromkeys(device.node for device in devices))
        used = np.array([context.node_numbers[name] for name in names])
        place = {name: index for index, name in enumerate(names)}
        self.nodes: Indices = np.array([place[device.node] for device in devices])
        self.bandwidth: Array = links.bandwidth[np.ix_(used, used)] * context.runtime.link_ratio
        self.flow: Array = links.flow[np.ix_(used, used)] * context.runtime.link_ratio
        self.latency: Array = links.latency[np.ix_(used, used)]
        self._has_parallel_rings = context.network.supports_hierarchical_rings

    @cached_property
    def _inter_node_bandwidth(self) -> Array:
        """`[source, target]` bandwidth, 0 within a node."""
        between = self.bandwidth.copy()
        np.fill_diagonal(between, 0.0)
        return between

    def slowest_ring(self, groups: Indices) -> Collective:
        """Return the slowest ring over `groups[group, member]` (indices of devices).

        Concurrent rings share a node's NIC, whose capacity per direction is the node's fastest link. A group sends as many
        streams between nodes as it has members on each, as `Collectives` has it.
        """
        count = groups.shape[1]
        if count == 1:
            return NO_COMMUNICATION
        target = self.nodes[groups]
        source = np.roll(target, -1, axis=1)
        crosses = source != target
        size = len(self.bandwidth)
        rate = self.flow[source, target]
        if crosses.any():
            together = np.minimum(rate * self._streams(target)[:, None], self.bandwidth[source, target])
            rate = np.where(crosses, together, rate)
            sent, received = (np.bincount(ends[crosses], minlength=size) for ends in (source, target))
            out_share = self._inter_node_bandwidth.max(axis=1) / np.maximum(sent, 1)
            in_share = self._inter_node_bandwidth.max(axis=0) / np.maximum(received, 1)
            shared = np.minimum(out_share[source], in_share[target])
            rate = np.where(crosses, np.minimum(rate, shared), rate)
        return single_ring(count, float(rate.min()), float(self.latency[source, target].max()))

    def _streams(self, nodes: Indices) -> Indices:
        """Return `[group]` the fewest members on a node, given `nodes[group, member]`; 1 where a group has a single ring."""
        if not self._has_parallel_rings:
            return np.ones(len(nodes), dtype=np.intp)
        size, group = len(self.bandwidth), np.arange(len(nodes))[:, None]
        on_node = np.bincount((group * size + nodes).ravel(), minlength=len(nodes) * size).reshape(-1, size)
        fewest: Indices = on_node[group, nodes].min(axis=1)
        return fewest

    def redistribution_alpha_beta(self, old_rows: Indices, new_rows: Indices) -> tuple[float, float]:
        """Return latency, and seconds per byte of a row, until every device has its new rows.

        A missing row comes from the device's own node if it is there, else through the NIC, which the node's devices share.
        Rows are `[device, 2]`: first and end.
        """
        bounds = np.unique(np.concatenate((old_rows.ravel(), new_rows.ravel())))
        size, middle = np.diff(bounds), (bounds[:-1] + bounds[1:]) / 2
        has = (old_rows[:, :1] < middle) & (middle < old_rows[:, 1:])
        lacks = (new_rows[:, :1] < middle) & (middle < new_rows[:, 1:]) & ~has
        latency = slowest = 0.0
        for node in range(len(self.bandwidth)):
            here = self.nodes == node
            near = has[here].any(axis=0)
            inside, outside = (lacks[here] & near) @ size, (lacks[here] & ~near) @ size
            if inside.any():
                latency = max(latency, float(self.latency[node, node]))
                slowest = max(slowest, float(inside.max() / self.bandwidth[node, node]))
            if outside.any():
                others = np.arange(len(self.bandwidth)) != node
                latency = max(latency, float(self.latency[others, node].max()))
                slowest = max(slowest, float(outside.sum() / self.bandwidth[others, node].min()))
        return latency, slowest


def boundary_alpha_beta(upper: Sequence[Device], lower: Sequence[Device], context: CostContext) -> tuple[float, float]:
    """Return latency, and seconds per byte of a boundary between two stages, in both directions together.

    The slowest link between their nodes carries all bytes.
    """
    above, below = (np.unique([context.node_numbers[device.node] for device in part]) for part in (upper, lower))
    terms = boundary_terms(above[:, None], below[None, :], context)
    seconds_per_byte, latency = (part.max(axis=(1, 2)).sum() for part in terms)
    return float(latency), float(seconds_per_byte)


InputLayout = tuple[int, int, RankOrder, tuple[int, ...]]
"""Rank layout of a layer's input: tensor and data degree, rank order, rows by replica."""


@dataclass(frozen=True, slots=True)
class StrategySeconds:
    """c(l, s) of one micro-batch, forward and backward.

    Attributes:
        micro_batch_seconds: every micro-batch but the last: without gradient synchronisation.
        last_micro_batch_seconds: the last one, whose backward overlaps it.
    """

    micro_batch_seconds: float
    last_micro_batch_seconds: float


def layout_of(run: LayerRun) -> InputLayout:
    """Return the part of a strategy that decides which device computes which rows."""
    return run.strategy.tensor, run.strategy.data, run.strategy.order, run.rows


@dataclass
class StageGroupCosts:
    """Costs on the devices of one stage, determined by the slowest device and the actual links of every group.

    Concurrent groups (all tensor groups, or all data groups) share the NICs that they cross.

    Attributes:
        exposed_all_reduce_ratio: share of DP's all-reduce that follows the last backward, for runtimes that reduce gradients
            only then; None: it overlaps the backward, as in the paper.
    """

    devices: tuple[Device, ...]
    context: CostContext
    exposed_all_reduce_ratio: float | None = None
    _rings: dict[tuple[int, int, RankOrder, bool], Collective] = field(default_factory=dict)
    _moves: dict[tuple[InputLayout, bool, InputLayout, bool], tuple[float, float]] = field(default_factory=dict)
    _compute: dict[tuple[str, InputLayout, bool], tuple[float, float]] = field(default_factory=dict)

    @cached_property
    def accelerators(self) -> tuple[str, ...]:
        """`[device]` accelerator names."""
        return tuple(self.context.cluster.accelerator_of(device).name for device in self.devices)

    def seconds(self, kind: LayerKind, run: LayerRun) -> StrategySeconds:
        """Return c(l, s): computation and communication; gradients and sharded weights overlap the backward.

        SDP (zero3) all-gathers weights before the forward and during the backward of every micro-batch, and reduce-scatters
        gradients in the last backward. DP (and zero1, zero2, which move as many bytes) all-reduces during or after the last
        backward. CKPT adds a forward with its tensor all-reduces.
        """
        forward, backward = self._compute_seconds(kind, run)
        group = TensorGroupClass(self.accelerators, run.strategy.tensor, self._ring(run, data=False))
        split = self.context.divided_activations.split(kind, run.strategy)
        tensor_forward, tensor_backward = tensor_sync_seconds(kind, group, max(run.rows), self.context, split)
        divided = self.context.divided_by(run.strategy)
        ring = self._ring(run, data=True)
        gather = sync = behind = 0.0
        gradient_bytes = divided.trained_parameters(kind) * self.context.gradient_dtype.num_bytes
        messages = message_count(gradient_bytes, kind.weight_tensors, self.context.runtime)
        if run.strategy.sharding is Sharding.ZERO3:
            weight_bytes = divided.parameters(kind) * self.context.model.dtype.num_bytes
            gather = ring.all_gather_seconds(weight_bytes, gather_messages(kind, self.context.runtime))
            sync = ring.all_gather_seconds(gradient_bytes, messages)
        elif self.exposed_all_reduce_ratio is None:
            sync = ring.seconds(gradient_bytes, messages)
        else:
            behind = self.exposed_all_reduce_ratio * ring.seconds(gradient_bytes, messages)
        slowdown = self.context.runtime.overlap_slowdown_ratio
        computed = backward + run.strategy.recompute * forward
        exposed = forward + tensor_forward + gather + tensor_backward + run.strategy.recompute * tensor_forward
        return StrategySeconds(
            exposed + both_seconds(computed, gather, slowdown),
            exposed + both_seconds(computed, gather + sync, slowdown) + behind,
        )

    def transformation_seconds(self, row_bytes: float, before: LayerRun, after: LayerRun) -> float:
        """Return R(l, s, s'): Slice-Gather of a layer's input, rows of `row_bytes` each, and of its gradient.

        A device receives missing rows from its own node if possible, else through the NIC, which the node's devices share.
        Where sequences are divided, the tensor groups gather the input before and the gradient after.
        """
        latency, seconds_per_byte = self.transformation_alpha_beta(before, after)
        return latency + row_bytes * seconds_per_byte

    def transformation_alpha_beta(self, before: LayerRun, after: LayerRun) -> tuple[float, float]:
        """Return R(l, s, s') as latency, and seconds per byte of a row."""
        key = layout_of(before), before.strategy.sequence_parallel, layout_of(after), after.strategy.sequence_parallel
        if key[0] == key[2]:
            return 0.0, 0.0
        if key not in self._moves:
            had, needed = self._rows(before), self._rows(after)
            there, back = (
                self._links.redistribution_alpha_beta(had, needed),
                self._links.redistribution_alpha_beta(needed, had),
            )
            parts = (there, back, self._sequence_gather_alpha_beta(before), self._sequence_gather_alpha_beta(after))
            latency, seconds_per_byte = map(sum, zip(*parts, strict=True))
            self._moves[key] = latency, seconds_per_byte
        return self._moves[key]

    def _sequence_gather_alpha_beta(self, run: LayerRun) -> tuple[float, float]:
        """Return latency, and seconds per byte of a row, of gathering a boundary that tensor groups divide, if they do."""
        ring = self._ring(run, data=False)
        if not run.strategy.sequence_parallel:
            return 0.0, 0.0
        (all_reduce,) = ring.algorithms
        return all_reduce.latency_seconds / 2, max(run.rows) * all_reduce.seconds_per_byte / 2

    def _compute_seconds(self, kind: LayerKind, run: LayerRun) -> tuple[float, float]:
        """Return forward and backward seconds of the slowest device."""
        key = kind.name, layout_of(run), run.strategy.sequence_parallel
        if key not in self._compute:
            rows = self._rows(run)
            names_by_rows: dict[int, set[str]] = {}
            for name, (low, high) in zip(self.accelerators, rows, strict=True):
                names_by_rows.setdefault(int(high - low), set()).add(name)
            costs = [
                self.context.slowest_layer_cost(
                    tuple(sorted(names)), kind, self.context.divided_activations.split(kind, run.strategy), count
                )
                for count, names in names_by_rows.items()
            ]
            self._compute[key] = max(c.forward_seconds for c in costs), max(c.backward_seconds for c in costs)
        return self._compute[key]

    def _ring(self, run: LayerRun, *, data: bool) -> Collective:
        key = run.strategy.tensor, run.strategy.data, run.strategy.order, data
        if key not in self._rings:
            layout = self._layout(run)
            self._rings[key] = self._links.slowest_ring(np.array(layout.data_groups if data else layout.tensor_groups))
        return self._rings[key]

    @cached_property
    def _links(self) -> StageGroupLinks:
        return StageGroupLinks(self.devices, self.context)

    def _rows(self, run: LayerRun) -> NDArray[np.intp]:
        """Return `[device, 2]` first row and end of each device's share of the micro-batch."""
        intervals = self._layout(run).row_intervals
        return np.array(run.strategy.order.members([interval] * run.strategy.tensor for interval in intervals))

    def _layout(self, run: LayerRun) -> RankLayout[int]:
        return RankLayout.of(tuple(range(len(self.devices))), run)


def both_seconds(computation: float, communication: float, slowdown_ratio: float) -> float:
    """Return seconds of two tasks that start together: the remainder of the longer one runs at full speed."""
    shorter, longer = sorted((computation, communication))
    return overlapped_seconds(shorter, shorter, slowdown_ratio, longer)


def estimate_seconds(plan: Plan, context: CostContext) -> float:
    """Return C(M, B, m) of Eq. 8, plus the messages of one micro-batch per boundary, which the paper leaves out.

    The slowest of several pipelines counts; the optimizer step is not included.
    """
    return max(_pipeline_seconds(pipeline, context) for pipeline in plan.pipelines)


def stages_seconds(stages: Sequence[StrategySeconds], micro_batches: int) -> float:
    """Return Eq. 8: (m - 1) · max_i (C(M_i, B_m) - C(M_i, 0)) + Σ_i C(M_i, B_m).

    C(M_i, B_m) - C(M_i, 0), a micro-batch without gradient synchronisation, is `micro_batch_seconds`.
    """
    longest = max(stage.micro_batch_seconds for stage in stages)
    return pipeline_seconds(sum(stage.last_micro_batch_seconds for stage in stages), longest, micro_batches)


def stage_seconds(stage: Stage, context: CostContext) -> StrategySeconds:
    """Return C(M_i, B_m): c(l, s) of every layer, plus R wherever the strategy changes."""
    group = StageGroupCosts(stage.devices, context)
    steady = last = 0.0
    for run in stage.layers:
        for name, count in Counter(context.model.layers[run.first : run.end]).items():
            seconds = group.seconds(context.model.kind(name), run)
            steady += count * seconds.micro_batch_seconds
            last += count * seconds.last_micro_batch_seconds
    for before, after in zip(stage.layers, stage.layers[1:], strict=False):
        row_bytes = context.model.output_bytes_per_row(after.first - 1)
        moved = group.transformation_seconds(row_bytes, before, after)
        steady += moved
        last += moved
    return StrategySeconds(steady, last)


def _pipeline_seconds(pipeline: Pipeline, context: CostContext) -> float:
    seconds = stages_seconds([stage_seconds(stage, context) for stage in pipeline.stages], pipeline.micro_batches)
    for upper, lower in zip(pipeline.stages, pipeline.stages[1:], strict=False):
        latency, seconds_per_byte = boundary_alpha_beta(upper.devices, lower.devices, context)
        size = pipeline.micro_batch_size * context.model.output_bytes_per_row(upper.end - 1)
        seconds += latency + size * seconds_per_byte
    return seconds


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Memory of one layer on one device.

    Attributes:
        kept_bytes: O_f of one micro-batch: activations saved for the backward, or under CKPT the layer's input.
        state_bytes: O_ms: weights, gradients, optimizer state, and master weights of half-precision training.
        recomputed_bytes: part of O_b: under CKPT the activations that the second forward saves.
        gathered_bytes: part of O_b: under zero3 the unsharded weights; under zero2 and zero3, with a single micro-batch,
            also the gradients before they are reduce-scattered.
    """

    kept_bytes: float
    state_bytes: float
    recomputed_bytes: float
    gathered_bytes: float


def layer_bytes(  # noqa: PLR0913 - a layer, its strategy, its device and where it stands
    kind: LayerKind,
    run: LayerRun,
    accelerator: str,
    context: CostContext,
    *,
    input_bytes_per_row: float,
    parameters: int,
    micro_batches: int,
) -> LayerBytes:
    """Return the bytes on the device with the most rows; `parameters` are those resident at the run's tensor degree.

    Gradients stay unsharded until the last micro-batch; with a single micro-batch, or if the runtime reduces in every one,
    zero2 and zero3 shard them at once.
    """
    rows = max(run.rows)
    split = context.divided_activations.split(kind, run.strategy)
    activations = context.layer_cost(accelerator, kind, split, rows).activation_bytes
    input_bytes = rows * input_bytes_per_row / (split.degree if split.divides_sequence else 1)
    gathers = run.strategy.sharding is Sharding.ZERO3 and run.strategy.data > 1
    accumulates = context.keeps_whole_gradients(micro_batches)
    scatters = not accumulates and run.strategy.sharding in {Sharding.ZERO2, Sharding.ZERO3} and run.strategy.data > 1
    trained, per_value = parameters - kind.frozen_parameters, context.value_bytes
    shard = shard_values(trained, run.strategy.data)
    frozen = frozen_bytes(kind.frozen_parameters, run.strategy.sharding, run.strategy.data, per_value)
    saved = activation_bytes(
        activations,
        input_bytes + kind.snapshot_bytes,
        activations + kind.snapshot_bytes,
        recompute=run.strategy.recompute,
    )
    return LayerBytes(
        saved.per_micro_batch,
        state_bytes(trained, shard, run.strategy.sharding, per_value, accumulates=accumulates).total + frozen,
        saved.once,
        parameters * per_value.weight * gathers + trained * per_value.gradient * scatters,
    )
