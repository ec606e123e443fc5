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
from trainwright.cost.boundary_terms import boundary_terms
from trainwright.cost.collectives import Collective, single_ring
from trainwright.cost.context import CostContext
from trainwright.cost.layer_sums import Array
from trainwright.cost.time_terms import pipeline_seconds, tensor_all_gather_bytes, tensor_all_reduce_bytes
from trainwright.layer import LayerKind, TensorSplit
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.rank_layout import node_layouts
from trainwright.strategy import Sharding

Indices = NDArray[np.intp]


def layer_seconds(  # noqa: PLR0913 - what a layer costs on a ring
    kind: LayerKind,
    accelerators: tuple[str, ...],
    ring: Collective,
    rows: int,
    context: CostContext,
    *,
    split: TensorSplit,
) -> tuple[float, float]:
    """Return the computation in t_layer, forward and backward, and its tensor collectives.

    An all-gather and a reduce-scatter along the sequence count as the all-reduce that they replace.
    """
    slowest = context.slowest_layer_cost(accelerators, kind, split, rows)
    forward, backward = tensor_all_reduce_bytes(kind, split.degree, rows, context)
    gather = ring.all_gather_seconds(tensor_all_gather_bytes(kind, split.degree, rows, context))
    reduced = sum(map(ring.seconds, (*forward, *backward)))
    return slowest.forward_seconds + slowest.backward_seconds, reduced + gather


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
    slowest: Array = pipeline_seconds(sums, times.max(axis=0), pipeline.micro_batches)
    return float(slowest.max()) + max(scene.sync_seconds(stage) for stage in stages)


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
            if run.strategy.sharding is not Sharding.NONE or run.strategy.recompute or len(stage.layers) > 1:
                raise ValueError(
                    f"AMP's cost model covers stages of one layer run without sharding and recompute; stage {number} "
                    "has more, so take the exact cost model"
                )
    return plan.pipelines[0]


class _AmpModel:
    """Links and devices that the terms of Eq. 4 and 5 look up."""

    def __init__(self, context: CostContext) -> None:
        self.context = context

    def replica_seconds(self, stage: Stage) -> Array:
        """Return `[replica]` t_i: seconds of one micro-batch, forward and backward."""
        run = stage.layers[0]
        seconds_of: dict[tuple[object, ...], float] = {}
        seconds = []
        for group, rows in zip(run.strategy.tensor_groups(stage.devices), run.rows, strict=True):
            key = (rows, *(device.node for device in group))
            if key not in seconds_of:
                seconds_of[key] = self._group_seconds(run, group, rows)
            seconds.append(seconds_of[key])
        return np.array(seconds)

    def _group_seconds(self, run: LayerRun, group: tuple[Device, ...], rows: int) -> float:
        model, context = self.context.model, self.context
        accelerators = tuple(sorted({context.cluster.accelerator_of(device).name for device in group}))
        bandwidth, latency = self.context.link_matrices.slowest_flow(self._nodes(group))
        ring = single_ring(run.strategy.tensor, float(bandwidth) * context.runtime.link_ratio, float(latency))
        seconds = 0.0
        for name, count in Counter(model.layers[run.first : run.end]).items():
            kind = model.kind(name)
            split = context.divided_activations.split(kind, run.strategy)
            compute, sync = layer_seconds(kind, accelerators, ring, rows, context, split=split)
            seconds += count * compute
            seconds += count * sync
        return seconds

    def exchange_seconds(self, upper: Stage, lower: Stage, senders: Indices, receivers: Indices) -> Array:
        """Return `[pipeline]` e_i: activation forward and gradient backward of the slowest pair of devices, v / b each.

        The paper has v / b once; here both directions count, as both directions of t_i do. `senders` and `receivers` are
        replicas; v covers the rows that both of a pair compute.
        """
        row_bytes = self.context.model.output_bytes_per_row(upper.end - 1)
        above, below = (self._nodes_by_replica(stage) for stage in (upper, lower))
        there, back = above[senders][:, np.arange(below.shape[1]) % above.shape[1]], below[receivers]
        per_byte = boundary_terms(there, back, self.context).slowest().send_seconds_per_byte.sum(axis=0)
        first, end = np.array(node_layouts(upper)[0].row_intervals)[senders].T
        other_first, other_end = np.array(node_layouts(lower)[0].row_intervals)[receivers].T
        rows = np.minimum(end, other_end) - np.maximum(first, other_first)
        seconds: Array = rows * row_bytes * per_byte
        return seconds

    def _nodes_by_replica(self, stage: Stage) -> Indices:
        """Return `[replica, tensor rank]` node numbers."""
        return np.stack([self._nodes(group) for group in stage.layers[0].strategy.tensor_groups(stage.devices)])

    def sync_seconds(self, stage: Stage) -> float:
        """Return T_dpsync of the slowest data group of a stage: Eq. 3 with M = all parameters resident on a device."""
        run = stage.layers[0]
        if run.strategy.data == 1:
            return 0.0
        message = (
            self.context.divided_by(run.strategy).resident_parameters(stage.first, stage.end)
            * self.context.gradient_dtype.num_bytes
        )
        bandwidth = min(
            self.context.link_matrices.slowest_flow_of_group(self._nodes(group))
            for group in run.strategy.data_groups(stage.devices)
        )
        return single_ring(run.strategy.data, bandwidth * self.context.runtime.link_ratio).seconds(message)

    def _nodes(self, devices: Sequence[Device]) -> Indices:
        return np.array([self.context.node_numbers[device.node] for device in devices], dtype=np.intp)
