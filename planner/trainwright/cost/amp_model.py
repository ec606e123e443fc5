"""Cost model of AMP (Eq. 3–5), to reproduce the paper and assign layers; not a bound in either direction.

AMP profiles a layer at a tensor degree with its tensor all-reduces. Profiles here contain computation only, so the
all-reduces (Eq. 3, plus the latency of their steps) are added for the group's own links.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from trainwright.cluster import Device
from trainwright.cost.context import CostContext
from trainwright.cost.network import Array, LinkMatrices, link_matrices
from trainwright.layer import LayerKind
from trainwright.plan import LayerRun, Pipeline, Plan, Sharding, Stage
from trainwright.rank_layout import node_layouts

Indices = NDArray[np.intp]


def all_reduce_seconds(members: int, message_bytes: float, bandwidth: float) -> float:
    """Return Eq. 3: 2(n - 1) M / (n B), with B the minimum bandwidth between any two members (B')."""
    return 2 * (members - 1) * message_bytes / (members * bandwidth)


def tensor_sync_seconds(  # noqa: PLR0913 - what Eq. 3 is made of
    kind: LayerKind, tensor: int, rows: int, *, bandwidth: float, latency: float, context: CostContext
) -> float:
    """Return the tensor all-reduce seconds of one layer's forward and backward (Eq. 3, plus the latency of the steps)."""
    if tensor == 1 or not kind.is_tensor_parallel:
        return 0.0
    elements = [
        number
        for segment in kind.segments
        for number in (segment.forward_all_reduce_elements_per_row, segment.backward_all_reduce_elements_per_row)
        if number
    ]
    message = rows * sum(elements) * context.model.dtype.num_bytes
    steps = 2 * (tensor - 1) * len(elements)
    return steps * latency + all_reduce_seconds(tensor, message, bandwidth * context.runtime.link_ratio)


def layer_seconds(accelerators: Sequence[str], kind: LayerKind, tensor: int, rows: int, context: CostContext) -> float:
    """Return the computation in t_layer, forward and backward, if devices of several accelerators wait for each other."""
    costs = [context.layer_cost(name, kind, tensor, rows) for name in accelerators]
    return max(cost.forward_seconds for cost in costs) + max(cost.backward_seconds for cost in costs)


def estimate_seconds(plan: Plan, context: CostContext) -> float:
    """Return T of Eq. 4: the slowest data-parallel pipeline (Eq. 5) plus the slowest gradient synchronisation (Eq. 3).

    A data-parallel pipeline is one replica of every stage: those that some rows of a micro-batch pass through. Raises
    ValueError for plans that the paper's model does not cover.
    """
    pipeline = _only_pipeline(plan, context)
    scene = _AmpModel(context)
    stages = pipeline.stages
    chains = _chains(stages)
    times = np.stack([scene.replica_seconds(stage)[chains[i]] for i, stage in enumerate(stages)])
    exchanges = np.array(
        [scene.exchange_seconds(*pair, chains[i], chains[i + 1]) for i, pair in enumerate(pairwise(stages))]
    )
    sums = exchanges.sum(axis=0) + times.sum(axis=0)
    pipeline_seconds = (pipeline.micro_batches - 1) * times.max(axis=0) + sums
    return float(pipeline_seconds.max()) + max(scene.sync_seconds(stage) for stage in stages)


def _chains(stages: Sequence[Stage]) -> Indices:
    """Return `[stage, pipeline]` the replica that computes each pipeline's rows."""
    ends = [np.cumsum(stage.layers[0].rows) for stage in stages]
    cuts = np.unique(np.concatenate(ends))
    return np.stack([np.searchsorted(stage_ends, cuts) for stage_ends in ends])


def _only_pipeline(plan: Plan, context: CostContext) -> Pipeline:
    layers = len(context.model.layers)
    if plan.model_layers != layers:
        raise ValueError(f"the plan is for a model of {plan.model_layers} layers, but this one has {layers}")
    if len(plan.pipelines) > 1:
        raise ValueError(f"AMP's cost model covers plans of one pipeline, this one has {len(plan.pipelines)}")
    for number, stage in enumerate(plan.pipelines[0].stages):
        for run in stage.layers:
            if run.sharding is not Sharding.NONE or run.recompute or len(stage.layers) > 1:
                raise ValueError(
                    f"AMP's cost model covers stages of one layer run without sharding and recompute; stage {number} "
                    "has more, so take the exact cost model"
                )
    return plan.pipelines[0]


class _AmpModel:
    """Links and devices that the terms of Eq. 4 and 5 look up."""

    def __init__(self, context: CostContext) -> None:
        self.context = context
        self.links: LinkMatrices = link_matrices(context.cluster)
        self.number = {node.name: index for index, node in enumerate(context.cluster.nodes)}

    def replica_seconds(self, stage: Stage) -> Array:
        """Return `[replica]` t_i: seconds of one micro-batch, forward and backward."""
        run = stage.layers[0]
        found: dict[tuple[object, ...], float] = {}
        seconds = []
        for group, rows in zip(run.tensor_groups(stage.devices), run.rows, strict=True):
            key = (rows, *(device.node for device in group))
            if key not in found:
                found[key] = self._group_seconds(run, group, rows)
            seconds.append(found[key])
        return np.array(seconds)

    def _group_seconds(self, run: LayerRun, group: tuple[Device, ...], rows: int) -> float:
        model, context = self.context.model, self.context
        accelerators = sorted({context.cluster.accelerator_of(device).name for device in group})
        bandwidth, latency = self.links.slowest(self._nodes(group))
        seconds = 0.0
        for name, count in Counter(model.layers[run.first : run.end]).items():
            kind = model.kind(name)
            seconds += count * layer_seconds(accelerators, kind, run.tensor, rows, context)
            seconds += count * tensor_sync_seconds(
                kind, run.tensor, rows, bandwidth=float(bandwidth), latency=float(latency), context=context
            )
        return seconds

    def exchange_seconds(self, upper: Stage, lower: Stage, senders: Indices, receivers: Indices) -> Array:
        """Return `[pipeline]` e_i: activation forward and gradient backward of the slowest pair of devices, v / b each.

        The paper has v / b once; here both directions count, as both directions of t_i do. `senders` and `receivers` are
        replicas; v covers the rows that both of a pair compute.
        """
        row_bytes = self.context.model.output_bytes_per_row(upper.end - 1)
        above, below = (self._nodes_by_replica(stage) for stage in (upper, lower))
        there, back = above[senders][:, np.arange(below.shape[1]) % above.shape[1]], below[receivers]
        forward, backward = self.links.bandwidth[there, back].min(axis=1), self.links.bandwidth[back, there].min(axis=1)
        first, end = np.array(node_layouts(upper)[0].row_intervals)[senders].T
        other_first, other_end = np.array(node_layouts(lower)[0].row_intervals)[receivers].T
        rows = np.minimum(end, other_end) - np.maximum(first, other_first)
        seconds: Array = rows * row_bytes * (1 / forward + 1 / backward) / self.context.runtime.link_ratio
        return seconds

    def _nodes_by_replica(self, stage: Stage) -> Indices:
        """Return `[replica, tensor rank]` node numbers."""
        return np.stack([self._nodes(group) for group in stage.layers[0].tensor_groups(stage.devices)])

    def sync_seconds(self, stage: Stage) -> float:
        """Return T_dpsync of the slowest data group of a stage: Eq. 3 with M = all parameters resident on a device."""
        run = stage.layers[0]
        if run.data == 1:
            return 0.0
        message = (
            self.context.resident_parameters(stage.first, stage.end, run.tensor) * self.context.gradient_dtype.num_bytes
        )
        bandwidth = min(self.links.slowest_bandwidth(self._nodes(group)) for group in run.data_groups(stage.devices))
        return all_reduce_seconds(run.data, message, bandwidth * self.context.runtime.link_ratio)

    def _nodes(self, devices: Sequence[Device]) -> Indices:
        return np.array([self.number[device.node] for device in devices], dtype=np.intp)
