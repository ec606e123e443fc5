"""Lower bound on an iteration by its critical path; it never exceeds the exact replay."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trainwright.cost.boundary_terms import BoundaryTerms, PlacedBoundaries, SharedNics
from trainwright.cost.layer_sums import Array, layer_values, prefix_sums, span_sums
from trainwright.cost.time_terms import TensorGroupClass, kind_table, overlapped_seconds
from trainwright.search.problem import Problem
from trainwright.search.uniform.placed_stages import PlacedStages, PlacementTables

_MARGIN = 1e-9
"""Relative margin for rounding."""


@dataclass
class CriticalPathBound:
    """Lower bounds for the choices of one problem.

    Before a stage can start, the first micro-batch passes the earlier stages; then the stage computes every micro-batch; then
    the last one returns: m · t_i + Σ_{j<i} (t_j + e_fwd,j + e_bwd,j), for every stage and replica. Boundaries give a similar
    bound: from the arrival of the first message on, the messages of all micro-batches leave one after the other. Also, no
    stage ends before the busiest NIC has carried all messages. Unless the runtime hides transfers, t_i includes the
    messages of stage i, but for the first one that it receives and the last one that it sends. With chunks (`virtual_stages`)
    all but m · t_i is divided by them.

    After that, the first stage reduces its gradients and updates its weights, as does every stage after its own last
    backward. Rings count without contention, except those of one stage's gradients, which start together and share each link
    between two nodes.
    """

    problem: Problem
    tables: PlacementTables
    _layer_sums: dict[tuple[TensorGroupClass, int], Array] = field(default_factory=dict)
    _syncs: dict[bytes, Array] = field(default_factory=dict)
    _parameters: dict[int, Array] = field(default_factory=dict)
    _replicas_by_placement: dict[PlacedStages, tuple[PlacedBoundaries, PlacedBoundaries, NDArray[np.intp]]] = field(
        default_factory=dict
    )

    def with_tables(self, tables: PlacementTables) -> CriticalPathBound:
        """Return the bounds for another device order; caches that do not depend on the order are shared."""
        return replace(self, tables=tables, _syncs={}, _replicas_by_placement={})

    def seconds(self, stages: PlacedStages, rows: int, ends: tuple[int, ...]) -> float:
        """Return seconds that no iteration with this placement, rows and partition undercuts."""
        return float(self.seconds_of_all(stages, rows, np.array([ends]))[0])

    def seconds_of_all(self, stages: PlacedStages, rows: int, ends: NDArray[np.intp]) -> Array:
        """Return `[assignment]` bounds, given `ends[assignment, stage]`."""
        micro_batches = self.problem.global_batch_size // (rows * stages.data)
        whole, slices, replicas = self._distinct_replicas(stages)
        forward, backward, update = self._stage_seconds(stages, replicas, rows, ends)
        row_bytes = rows * self.tables.stages.row_bytes[ends[:, :-1]]
        is_divided = self.problem.cost_context.divided_activations.chosen_divided_cuts(stages.tensor)[ends[:, :-1]]
        per_byte, latency = (
            np.where(is_divided[:, :, None], of_slices[:, None], of_whole[:, None])
            for of_slices, of_whole in zip(slices.terms, whole.terms, strict=True)
        )
        send = row_bytes[:, :, None] * per_byte
        first_forward_start, last_backward_return = np.zeros_like(forward), np.zeros_like(backward)
        np.cumsum(forward[:, :-1] + send[0] + latency[0], axis=1, out=first_forward_start[:, 1:])
        np.cumsum(backward[:, :-1] + send[1] + latency[1], axis=1, out=last_backward_return[:, 1:])
        forward_backward = forward + backward
        compute_end = first_forward_start + micro_batches * forward_backward
        if not self.problem.runtime.hides_transfers:
            transfers = (send + latency).sum(axis=0)
            compute_end[:, 1:] += (micro_batches - 1) * transfers
            compute_end[:, :-1] += micro_batches * transfers
        # `first_forward_start` and `last_backward_return` already include the first message.
        later_sends = (micro_batches - 1) * send
        round_trip = first_forward_start[:, -1:] + forward_backward[:, -1:] + last_backward_return[:, -1:]
        compute_end[:, 1:] = np.maximum(
            compute_end[:, 1:], first_forward_start[:, 1:] + later_sends[0] + forward_backward[:, 1:]
        )
        compute_end[:, :-1] = np.maximum(
            compute_end[:, :-1], round_trip - last_backward_return[:, :-1] + later_sends[1]
        )
        first_stage = (compute_end + last_backward_return).max(axis=1)
        # Interleaved stages wait the less the more chunks they have. Messages count as waits, since passes may hide them.
        chunks = self.problem.cost_context.chunks_of_equal_stages(micro_batches, stages.pipeline)
        work, saved = micro_batches * forward_backward, 1 - 1 / chunks
        compute_end -= saved * (compute_end - work)
        first_stage -= saved * (first_stage - work[:, 0])
        tail = self._sync_seconds(stages, ends, backward) + update
        nic_seconds = (row_bytes * ~is_divided) @ whole.nic_seconds_per_byte
        nic_seconds += (row_bytes * is_divided) @ slices.nic_seconds_per_byte
        busiest_nic = micro_batches * nic_seconds.max(axis=1, initial=0.0)
        stage_end = (np.maximum(compute_end.max(axis=2), busiest_nic[:, None]) + tail).max(axis=1)
        first_stage_end = first_stage.max(axis=1) + tail[:, 0]
        bound: Array = np.maximum(stage_end, first_stage_end) + self.problem.runtime.constant_seconds
        return bound * (1 - _MARGIN)

    def _distinct_replicas(self, stages: PlacedStages) -> tuple[PlacedBoundaries, PlacedBoundaries, NDArray[np.intp]]:
        """Return the boundaries, whole and divided, and `[stage, replica]` tensor group classes, without duplicate replicas.

        Duplicates have the same classes and boundary times at every stage.
        """
        if stages not in self._replicas_by_placement:
            nodes, count = self.tables.order.node_numbers[stages.placement], stages.data
            whole = slices = self._shared_nics.boundaries(nodes)
            if self.problem.cost_context.divided_activations.chosen_divided_cuts(stages.tensor).any():
                slices = self._shared_nics.boundaries(nodes, is_divided=True)
            signatures = [
                stages.class_numbers,
                *(part.reshape(-1, count) for terms in (whole, slices) for part in terms.terms),
            ]
            replicas = np.zeros(1, dtype=np.intp)
            if count > 1:
                replicas = np.sort(np.unique(np.concatenate(signatures), axis=1, return_index=True)[1])
            is_used = (whole.nic_seconds_per_byte + slices.nic_seconds_per_byte).any(axis=0)
            whole, slices = (
                PlacedBoundaries(
                    BoundaryTerms(*(part[:, :, replicas] for part in terms.terms)),
                    terms.nic_seconds_per_byte[:, is_used],
                )
                for terms in (whole, slices)
            )
            self._replicas_by_placement[stages] = whole, slices, stages.class_numbers[:, replicas]
        return self._replicas_by_placement[stages]

    @cached_property
    def _shared_nics(self) -> SharedNics:
        return SharedNics(self.problem.cost_context)

    def _stage_seconds(
        self, stages: PlacedStages, replicas: NDArray[np.intp], rows: int, ends: NDArray[np.intp]
    ) -> tuple[Array, Array, Array]:
        """Return seconds of a micro-batch's forward and backward, and of the longest update.

        Shapes are `[assignment, stage, replica]`, the update's is `[assignment, stage]`.
        """
        sums = np.stack([self._layer_prefix_sums(group, rows) for group in stages.group_classes])
        firsts = np.concatenate([np.zeros_like(ends[:, :1]), ends[:, :-1]], axis=1)
        span_seconds = span_sums(sums, (firsts, ends))
        by_replica = span_seconds[replicas.T, :, :, np.arange(stages.pipeline)].transpose(2, 3, 1, 0)
        return by_replica[0], by_replica[1], by_replica[2].max(axis=2)

    def _layer_prefix_sums(self, group: TensorGroupClass, rows: int) -> Array:
        """Return `[forward | backward | update, end]` seconds of all layers before `end` on one tensor group."""
        key = (group, rows)
        if key not in self._layer_sums:
            context = self.problem.cost_context
            table = kind_table(group, rows, context)
            # An owner of a tied weight may update only a part of it, so count none.
            untied = np.array([kind.shared_weight is None for kind in context.model.kinds])
            by_kind = np.stack([table.forward_pass_seconds, table.backward_pass_seconds, table.update_seconds * untied])
            self._layer_sums[key] = prefix_sums(by_kind[:, context.kind_numbers])
        return self._layer_sums[key]

    def _sync_seconds(self, stages: PlacedStages, ends: NDArray[np.intp], backward: Array) -> Array:
        """Return `[assignment, stage]` seconds that reducing untied gradients adds to a stage's last backward and its end.

        If they overlap, `backward[assignment, stage, replica]` hides as much as it can, at the cost of its slow-down.
        """
        if stages.data == 1:
            return np.zeros(ends.shape)
        key = stages.placement.tobytes() + bytes(str(stages.placement.shape), "ascii")
        if key not in self._syncs:
            self._syncs[key] = self._sync_seconds_per_byte(self.tables.order.node_numbers[stages.placement])
        sums = self._untied_parameters(stages.tensor)[ends]
        resident = np.diff(sums, axis=1, prepend=0.0)
        seconds: Array = resident * self.problem.cost_context.gradient_dtype.num_bytes * self._syncs[key]
        runtime = self.problem.runtime
        if runtime.overlaps_gradients:
            hidden = np.minimum(seconds, backward.max(axis=2))
            seconds = overlapped_seconds(seconds, hidden, min(runtime.overlap_slowdown_ratio, 2.0))
        return seconds

    def _untied_parameters(self, tensor: int) -> Array:
        """Return `[end]` parameters of all layers before `end`, without tied weights."""
        if tensor not in self._parameters:
            parameters = self.problem.cost_context.divided_at(tensor).trained_parameters
            untied = layer_values(self.problem.model, lambda kind: 0 if kind.shared_weight else parameters(kind))
            self._parameters[tensor] = prefix_sums(untied)
        return self._parameters[tensor]

    def _sync_seconds_per_byte(self, nodes: NDArray[np.intp]) -> Array:
        """Return `[stage]` seconds per byte of the all-reduces of `nodes[stage, member, group]`, one ring per group."""
        links, ratio = self.tables.links, self.problem.runtime.link_ratio
        by_group = nodes.transpose(0, 2, 1)
        bandwidth, node_counts = links.slowest_crossing(by_group)
        members = np.where(node_counts > 1, node_counts, by_group.shape[2])
        share = 2 * (members - 1) / members
        seconds: Array = (share / (bandwidth * ratio)).max(axis=1)
        stage, group, member = np.nonzero(by_group != np.roll(by_group, -1, axis=2))
        if len(stage):
            next_nodes = np.roll(by_group, -1, axis=2)[stage, group, member]
            steps = np.unique(np.stack([stage, group, by_group[stage, group, member], next_nodes], axis=1), axis=0)
            pairs, number = np.unique(steps[:, [0, 2, 3]], axis=0, return_inverse=True)
            sent = np.bincount(number.reshape(-1), weights=share[steps[:, 0], steps[:, 1]])
            best_direction = np.maximum(
                links.bandwidth[pairs[:, 1], pairs[:, 2]], links.bandwidth[pairs[:, 2], pairs[:, 1]]
            )
            np.maximum.at(seconds, pairs[:, 0], sent / (best_direction * ratio))
        return seconds
