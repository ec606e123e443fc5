"""What an iteration takes at least: cheap enough to ask for every choice, and never above the exact replay."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trainwright.cost import amp as amp_cost
from trainwright.layer import LayerKind
from trainwright.search.crossings import Cards, Crossings
from trainwright.search.protocol import Problem
from trainwright.search.spans import Array
from trainwright.search.stages import GroupClass, Stages, StageTables

_MARGIN = 1e-9
"""For rounding."""


@dataclass
class LowerBounds:
    """Bounds for the choices of one problem.

    Before a stage can begin, the first micro-batch passes the stages before it; then it computes every micro-batch;
    then the last one passes back: m · t_i + Σ_{j<i} (t_j + e_fwd,j + e_bwd,j), for every stage and replica. Likewise
    for boundaries: from when the first message is there, the messages of all micro-batches leave one after the other.
    And no stage ends before the busiest card has carried all messages. Behind that the first stage sums its gradients
    and updates its weights, and so does every stage behind its own last backward. Rings are taken alone on their links,
    but for those of one stage's gradients, which begin together and share each link between two nodes.
    """

    problem: Problem
    tables: StageTables
    _layers: dict[tuple[GroupClass, int, int], Array] = field(default_factory=dict)
    _syncs: dict[bytes, Array] = field(default_factory=dict)
    _parameters: dict[int, Array] = field(default_factory=dict)
    _known_lanes: dict[Stages, tuple[Crossings, NDArray[np.intp]]] = field(default_factory=dict)

    def reordered(self, tables: StageTables) -> LowerBounds:
        """For the tables of another order of the devices; what does not depend on it is shared."""
        return replace(self, tables=tables, _syncs={}, _known_lanes={})

    def seconds(self, stages: Stages, rows: int, ends: tuple[int, ...]) -> float:
        """No iteration with this placement, rows and stages takes less."""
        return float(self.seconds_of_all(stages, rows, np.array([ends]))[0])

    def seconds_of_all(self, stages: Stages, rows: int, ends: NDArray[np.intp]) -> Array:
        """[assignment] the same for many: `ends` are [assignment, stage]."""
        micro_batches = self.problem.global_batch_size // (rows * stages.data)
        crossings, lanes = self._lanes(stages)
        forward, backward, update = self._stage_seconds(stages, lanes, rows, ends)
        row_bytes = rows * self.tables.memory.row_bytes[ends[:, :-1]]
        drain = row_bytes[:, :, None] * crossings.drain[:, None]
        late = crossings.latency[:, None]
        before, behind = np.zeros_like(forward), np.zeros_like(backward)
        np.cumsum(forward[:, :-1] + drain[0] + late[0], axis=1, out=before[:, 1:])
        np.cumsum(backward[:, :-1] + drain[1] + late[1], axis=1, out=behind[:, 1:])
        both = forward + backward
        ended = before + micro_batches * both
        # The messages behind the first, which `before` and the way back of the first already have.
        more = (micro_batches - 1) * drain
        way_back = before[:, -1:] + both[:, -1:] + behind[:, -1:]
        ended[:, 1:] = np.maximum(ended[:, 1:], before[:, 1:] + more[0] + both[:, 1:])
        ended[:, :-1] = np.maximum(ended[:, :-1], way_back - behind[:, :-1] + more[1])
        after = self._sync_seconds(stages, ends) + update
        carried = micro_batches * (row_bytes @ crossings.busy).max(axis=1, initial=0.0)
        own = (np.maximum(ended.max(axis=2), carried[:, None]) + after).max(axis=1)
        through_the_first = (ended + behind).max(axis=(1, 2)) + after[:, 0]
        bound: Array = np.maximum(own, through_the_first) + self.problem.runtime.constant_seconds
        return bound * (1 - _MARGIN)

    def _lanes(self, stages: Stages) -> tuple[Crossings, NDArray[np.intp]]:
        """The crossings and [stage, lane] the classes of tensor groups, of replicas that are alike everywhere one."""
        if stages not in self._known_lanes:
            found = self._cards.crossings(self.tables.order.nodes[stages.placement])
            count = stages.data
            kinds = [stages.numbers, found.drain.reshape(-1, count), found.latency.reshape(-1, count)]
            lanes = np.zeros(1, dtype=np.intp)
            if count > 1:
                lanes = np.sort(np.unique(np.concatenate(kinds), axis=1, return_index=True)[1])
            kept = Crossings(found.drain[:, :, lanes], found.latency[:, :, lanes], found.busy)
            self._known_lanes[stages] = kept, stages.numbers[:, lanes]
        return self._known_lanes[stages]

    @cached_property
    def _cards(self) -> Cards:
        return Cards(self.problem)

    def _stage_seconds(
        self, stages: Stages, lanes: NDArray[np.intp], rows: int, ends: NDArray[np.intp]
    ) -> tuple[Array, Array, Array]:
        """[assignment, stage, lane] of a micro-batch's forward and backward; [assignment, stage] of the longest update."""
        sums = np.stack([self._summed_layers(group, stages.tensor, rows) for group in stages.groups])
        firsts = np.concatenate([np.zeros_like(ends[:, :1]), ends[:, :-1]], axis=1)
        taken = sums[:, :, ends] - sums[:, :, firsts]
        by_lane = taken[lanes.T, :, :, np.arange(stages.pipeline)].transpose(2, 3, 1, 0)
        return by_lane[0], by_lane[1], by_lane[2].max(axis=2)

    def _summed_layers(self, group: GroupClass, tensor: int, rows: int) -> Array:
        """[forward | backward | update, end] seconds of all layers before `end` on one group."""
        key = (group, tensor, rows)
        if key not in self._layers:
            model = self.problem.model
            by_kind = {kind.name: self._kind_seconds(group, kind, tensor, rows) for kind in model.kinds}
            table = np.array([by_kind[name] for name in model.layers]).T
            self._layers[key] = np.concatenate([np.zeros((3, 1)), np.cumsum(table, axis=1)], axis=1)
        return self._layers[key]

    def _kind_seconds(self, group: GroupClass, kind: LayerKind, tensor: int, rows: int) -> tuple[float, float, float]:
        setting = self.problem.setting
        costs = [setting.layer_cost(name, kind, tensor, rows) for name in group.accelerators]
        sync = [0.0, 0.0]
        if tensor > 1 and kind.is_tensor_parallel:
            members = group.nodes if group.nodes > 1 else tensor
            message = rows * setting.model.dtype.num_bytes
            rate = group.ring_bandwidth * setting.runtime.link_ratio
            for segment in kind.segments:
                summed = (segment.forward_all_reduce_elements_per_row, segment.backward_all_reduce_elements_per_row)
                for direction, elements in enumerate(summed):
                    sync[direction] += amp_cost.all_reduce_seconds(members, message * elements, rate)
        # Of a weight that is shared the owners may update but a part.
        update = 0.0 if kind.shared_weight else max(cost.update_seconds for cost in costs)
        return (
            max(cost.forward_seconds for cost in costs) + sync[0],
            max(cost.backward_seconds for cost in costs) + sync[1],
            update,
        )

    def _sync_seconds(self, stages: Stages, ends: NDArray[np.intp]) -> Array:
        """[assignment, stage] of summing the gradients that no other stage holds; 0 where that may happen during the backward."""
        if stages.data == 1 or self.problem.runtime.overlaps_gradients:
            return np.zeros(ends.shape)
        key = stages.placement.tobytes() + bytes(str(stages.placement.shape), "ascii")
        if key not in self._syncs:
            self._syncs[key] = self._sync_seconds_per_byte(self.tables.order.nodes[stages.placement])
        sums = self._own_parameters(stages.tensor)[ends]
        held = np.diff(sums, axis=1, prepend=0.0)
        result: Array = held * self.problem.setting.gradient_dtype.num_bytes * self._syncs[key]
        return result

    def _own_parameters(self, tensor: int) -> Array:
        """[end] values of all layers before `end` that no other layer holds."""
        if tensor not in self._parameters:
            model, setting = self.problem.model, self.problem.setting
            kinds = [model.kind_of(layer) for layer in range(len(model.layers))]
            own = [0 if kind.shared_weight else setting.values_at(kind, tensor) for kind in kinds]
            self._parameters[tensor] = np.concatenate([[0.0], np.cumsum(own)])
        return self._parameters[tensor]

    def _sync_seconds_per_byte(self, nodes: NDArray[np.intp]) -> Array:
        """[stage] seconds for every byte that the data groups [stage, member, group] sum, each over its own members."""
        links, ratio = self.tables.links, self.problem.runtime.link_ratio
        by_group = nodes.transpose(0, 2, 1)
        bandwidth, spanned = links.ring(by_group)
        members = np.where(spanned > 1, spanned, by_group.shape[2])
        share = 2 * (members - 1) / members
        seconds: Array = (share / (bandwidth * ratio)).max(axis=1)
        stage, group, member = np.nonzero(by_group != np.roll(by_group, -1, axis=2))
        if len(stage):
            there = np.roll(by_group, -1, axis=2)[stage, group, member]
            steps = np.unique(np.stack([stage, group, by_group[stage, group, member], there], axis=1), axis=0)
            pairs, number = np.unique(steps[:, [0, 2, 3]], axis=0, return_inverse=True)
            sent = np.bincount(number.reshape(-1), weights=share[steps[:, 0], steps[:, 1]])
            mutual = np.maximum(links.bandwidth[pairs[:, 1], pairs[:, 2]], links.bandwidth[pairs[:, 2], pairs[:, 1]])
            np.maximum.at(seconds, pairs[:, 0], sent / (mutual * ratio))
        return seconds
