"""Passes of a stage whose operators have shardings of their own, with what computation hides, from the costs of its layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from trainwright.cost.collectives import Nodes
from trainwright.cost.context import CostContext
from trainwright.cost.memory_terms import InFlightBytes, StateBytes
from trainwright.cost.operators.algorithm_costs import MeshCosts
from trainwright.cost.operators.integer_program import AssignmentCost
from trainwright.cost.operators.layer_costs import OperatorLayerCosts, WeightCost
from trainwright.cost.operators.sharding_specs import layout_number
from trainwright.cost.operators.shared_weights import shared_weight_overcount
from trainwright.cost.time_terms import LayerPass, PassTime, overlapped_pass_seconds
from trainwright.loop_nests.operations import Axis
from trainwright.operator_shardings import SpanSpecs
from trainwright.plan import LayerRun
from trainwright.rank_layout import RankLayout


@dataclass(frozen=True, slots=True)
class OperatorStageCosts:
    """Costs of operators on each device of their stage.

    Attributes:
        total: as the integer program adds them up, nothing hidden and nothing recomputed; a weight that several layers share
            counts once in its bytes and in its seconds of an iteration.
        forward, backward: of one micro-batch; gathers of weights count as far as computation does not hide them.
        last_backward_seconds, unfinished_reduce_seconds: as in `StageWorker`.
        late_reduce_seconds: reductions after the last backward, but for the shared weight's.
        weights: seconds of an iteration and bytes of all weights but the shared one.
        shared: those of a weight that several layers share, once.
        activations: bytes that are saved.
    """

    total: AssignmentCost
    forward: PassTime
    backward: PassTime
    last_backward_seconds: float
    unfinished_reduce_seconds: float
    late_reduce_seconds: float
    weights: WeightCost
    shared: WeightCost
    activations: InFlightBytes[float]

    @property
    def publish_seconds(self) -> float:
        """Seconds of gathering updated weights."""
        return self.weights.publish_seconds + self.shared.publish_seconds

    @property
    def update_seconds(self) -> float:
        """Seconds of the optimizer."""
        return self.weights.update_seconds + self.shared.update_seconds

    @property
    def state(self) -> StateBytes[float]:
        """Bytes of training state."""
        return (self.weights + self.shared).state


@dataclass(frozen=True)
class StagePasses:
    """Layers of a stage in order, with their costs."""

    specs: SpanSpecs
    nodes: Nodes
    runs: tuple[LayerRun, ...]
    context: CostContext
    prices: MeshCosts
    layers: tuple[OperatorLayerCosts, ...]

    @property
    def rows(self) -> int:
        """Rows of a micro-batch on the whole mesh."""
        return sum(self.runs[0].rows)

    def costs(self) -> OperatorStageCosts:
        """Return the costs of all layers."""
        recomputed = [run.strategy.recompute for run in self.runs for _ in range(run.count)]
        moved = self._moved_at_ends()
        passes = [
            (layer.forward, layer.backward_with(again)) for layer, again in zip(self.layers, recomputed, strict=True)
        ]
        forward = self._pass_time([own for own, _ in passes], moved[0])
        backward = self._pass_time([own for _, own in reversed(passes)], moved[1])
        last, unfinished, late = self._last_backward([own for _, own in passes])
        return OperatorStageCosts(
            self._ilp_total(),
            forward,
            backward,
            last + moved[1],
            unfinished,
            late,
            sum((layer.weights for layer in self.layers), WeightCost()),
            self._shared(),
            self._activations(recomputed),
        )

    def _pass_time(self, passes: Sequence[PassTime], moved: float) -> PassTime:
        """Return the seconds of all layers; the gather of the next one's weights is hidden while a layer computes."""
        compute, sync, moves = (
            sum(getattr(each, name) for each in passes)
            for name in ("compute_seconds", "sync_seconds", "redistribution_seconds")
        )
        seconds, _ = overlapped_pass_seconds([_step(each) for each in passes], self._slowdown)
        return PassTime(compute, sync, seconds - compute - sync - moves, moves + moved)

    def _last_backward(self, backwards: Sequence[PassTime]) -> tuple[float, float, float]:
        """Return the seconds of the last backward, of reductions that are left when it ends, and of those that begin then."""
        late, steps = 0.0, []
        for layer, own in zip(reversed(self.layers), reversed(backwards), strict=True):
            reduced = layer.weights.reduce_seconds
            if not (layer.shares_updates or self.context.runtime.overlaps_gradients):
                late, reduced = late + reduced, 0.0
            steps.append(_step(own, reduced, waits=layer.shares_updates))
        return *overlapped_pass_seconds(steps, self._slowdown), late

    @property
    def _slowdown(self) -> float:
        return self.context.runtime.overlap_slowdown_ratio

    def _moved_at_ends(self) -> tuple[float, float]:
        """Return the forward and backward seconds between the layouts of the operators and those of the stage's boundaries.

        The tensors of a boundary are taken to be equally large.
        """
        entered, gradients_left = self._converted(self.runs[0], self.specs.first, self.layers[0].entering)
        gradients_entered, left = self._converted(self.runs[-1], self.specs.end, self.layers[-1].leaving)
        return entered + left, gradients_entered + gradients_left

    def _converted(self, run: LayerRun, layer: int, layouts: Sequence[int]) -> tuple[float, float]:
        """Return the seconds from a run's rows of the boundary before a layer to the operators' layouts, and back."""
        if not 0 < layer < len(self.context.model.layers) or not layouts:
            return 0.0, 0.0
        outside, resharding = self._boundary_layout(run), self.prices.resharding
        size = self.rows * self.context.row_bytes[layer] / len(layouts)
        inwards = sum(float(resharding.one_way_seconds(outside or 0, layout, size)) for layout in layouts)
        back = sum(float(resharding.one_way_seconds(layout, outside or 0, size)) for layout in layouts)
        if outside is None:  # over the degrees of the run, whose groups are not those of the mesh
            whole = np.array([size * len(layouts)])
            inwards += float(self.prices.all_gather(np.array([3]), whole, pays_latency=True)[0])
        return inwards, back

    def _boundary_layout(self, run: LayerRun) -> int | None:
        """Return the layout on the mesh in which a run has the rows of a boundary; None if the mesh has no such one."""
        layout, (first, second) = RankLayout.of(self.nodes, run), self.specs.mesh_shape
        replicas = [layout.position(index).replica for index in range(len(self.nodes))]
        rows, columns = [i // second for i in range(first * second)], [i % second for i in range(first * second)]
        by_layout = {
            layout_number(Axis.BATCH, Axis.NOTHING): (rows, first),
            layout_number(Axis.NOTHING, Axis.BATCH): (columns, second),
            layout_number(Axis.BATCH, Axis.BATCH): (list(range(first * second)), first * second),
            0: ([0] * len(replicas), 1),
        }
        return next((number for number, parts in by_layout.items() if parts == (replicas, layout.replicas)), None)

    def _ilp_total(self) -> AssignmentCost:
        totals = {
            each.name: sum(getattr(layer.total, each.name) for layer in self.layers) for each in fields(AssignmentCost)
        }
        shared = sum((layer.shared.cost for layer in self.layers if layer.shared is not None), WeightCost())
        overcount = float(shared_weight_overcount(self.context.model)[self.specs.first, self.specs.end])
        totals["iteration_seconds"] -= overcount * shared.iteration_seconds
        totals["state_bytes"] -= overcount * shared.state.total
        return AssignmentCost(**totals)

    def _shared(self) -> WeightCost:
        """Return the cost of the shared weight: once for each part of it that a device holds.

        Parts that differ have no group that reduces them: all devices sum the whole weight.
        """
        parts: dict[tuple[int | None, int | None], list[WeightCost]] = {}
        for layer in self.layers:
            if layer.shared is not None:
                parts.setdefault(layer.shared.part, []).append(layer.shared.cost)
        of_parts = sum(
            (sum(of_part, WeightCost()).scaled(1 / len(of_part)) for of_part in parts.values()), WeightCost()
        )
        if len(parts) < 2:
            return of_parts
        (values,) = {layer.shared.values for layer in self.layers if layer.shared is not None}
        ring = self.context.collectives.all_reduce((self.nodes,))
        return replace(of_parts, reduce_seconds=ring.seconds(values * self.context.value_bytes.gradient))

    def _activations(self, recomputed: Sequence[bool]) -> InFlightBytes[float]:
        """Return the saved bytes; a recomputed layer keeps its input, and all of it once, while its backward runs."""
        kept = once = 0.0
        for index, (layer, again) in enumerate(zip(self.layers, recomputed, strict=True), start=self.specs.first):
            if again:
                shares = [float(self.prices.shares[layout]) for layout in layer.entering]
                kept += self.rows * self.context.row_bytes[index] * sum(shares) / max(len(shares), 1)
                once = max(once, layer.total.activation_bytes)
            else:
                kept += layer.total.activation_bytes
        return InFlightBytes(kept, once)


def _step(own: PassTime, reduce_seconds: float = 0.0, *, waits: bool = False) -> LayerPass:
    """Return a layer's pass as a step of the stage's."""
    sync = own.sync_seconds + own.redistribution_seconds
    return LayerPass(own.compute_seconds, sync, own.sharding_seconds, reduce_seconds, waits)
