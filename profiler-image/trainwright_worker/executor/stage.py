"""One rank's layers, run by run, and the units that their weights form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import nn

from trainwright.model import Model
from trainwright.plan import Sharding
from trainwright_worker.executor.groups import Groups
from trainwright_worker.executor.mesh import Mesh, RunMesh
from trainwright_worker.executor.precision import Counted
from trainwright_worker.executor.reduction import Reduction, reduction_of, shared_reduction_of
from trainwright_worker.executor.unit import Replicas, Unit, Weight
from trainwright_worker.executor.units import SharedSpan, Span, shared_spans, spans
from trainwright_worker.layers import sequence_parallel
from trainwright_worker.layers.collectives import Collectives
from trainwright_worker.layers.layer import Boundary, FamilyLayers, Layer, SharedWeights
from trainwright_worker.layers.tensor_parallel import TensorShard

TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Held:
    """A unit as a layer uses it.

    Attributes:
        contributes: whether what the layer adds to its gradient counts.
        reduction: for the layer whose backward comes last among the unit's, else None.
    """

    unit: Unit
    contributes: bool = True
    reduction: Reduction | None = None


@dataclass(frozen=True)
class RankLayer:
    """One layer of this rank.

    Attributes:
        parts_boundary: whether the boundary before it is whole, and it computes with this rank's part of the sequence.
        collects_boundary: whether what it hands on is such a part, and what comes next needs the whole.
    """

    number: int
    module: Layer
    held: tuple[Held, ...]
    run: RunMesh
    parts_boundary: bool = False
    collects_boundary: bool = False

    @property
    def is_sequence_parallel(self) -> bool:
        return self.module.shard.sequence_parallel

    def own_part(self, boundary: Boundary) -> Boundary:
        """This rank's part of the sequence."""
        return tuple(sequence_parallel.own_part(self._collectives, tensor) for tensor in boundary)

    def collected(self, parts: Boundary) -> Boundary:
        """The whole sequence, from all ranks of the tensor group."""
        return sequence_parallel.collected(self._collectives, parts)

    @property
    def _collectives(self) -> Collectives:
        found = self.module.shard.collectives
        if found is None:
            raise RuntimeError(f"layer {self.number} has no tensor group to part a sequence in")
        return found

    def hands_on_parts_to(self, other: RankLayer) -> bool:
        """Whether the next layer goes on with the parts of the sequence that this one leaves on each rank."""
        both = self.is_sequence_parallel and other.is_sequence_parallel
        return both and self.run.is_arranged_as(other.run)

    @property
    def recomputes(self) -> bool:
        return self.run.run.recompute

    @property
    def gathers(self) -> bool:
        """Whether its weights are collected before it computes."""
        return any(held.unit.is_scattered for held in self.held)

    @property
    def reduces_beside_backward(self) -> bool:
        return any(held.reduction is not None and held.reduction.is_beside_backward for held in self.held)


@dataclass(frozen=True)
class RankStage:
    """This rank's layers by run, and their weights.

    Attributes:
        reductions: in the order in which all ranks go through them.
        counted: each unit, with what this rank counts of the gradients' norm.
    """

    runs: tuple[tuple[RankLayer, ...], ...]
    units: tuple[Unit, ...]
    reductions: tuple[Reduction, ...]
    counted: tuple[Counted, ...]

    @property
    def layers(self) -> tuple[RankLayer, ...]:
        return tuple(layer for run in self.runs for layer in run)

    @property
    def updated_values(self) -> int:
        """Values that this rank's optimizer updates."""
        return sum(unit.part for unit in self.units)


@dataclass(frozen=True)
class StageBuilder:
    """Makes a rank's stage.

    Attributes:
        tensor_group: the collectives of this rank's tensor group in a run.
        sequence_parallel: whether layers that can part the sequence do.
    """

    model: Model
    family: FamilyLayers
    mesh: Mesh
    rank: int
    groups: Groups
    device: torch.device
    tensor_group: Callable[[RunMesh], Collectives]
    sequence_parallel: bool = False

    def build(self, seed: int) -> RankStage:
        stage = self.mesh.stage_of(self.rank)
        shared: SharedWeights = {}
        modules: dict[int, Layer] = {}
        for run in stage.runs:
            shard = TensorShard(run.position(self.rank).tensor, run.tensor, self.tensor_group(run))
            for layer in range(run.first, run.end):
                made = self.family.make(layer, seed=seed, shard=shard, shared=shared)
                if self.sequence_parallel and self._can_part(layer, made):
                    made.shard = replace(shard, sequence_parallel=True)
                modules[layer] = made.to(self.device)
        return self._assemble(modules, shared)

    def _can_part(self, layer: int, module: Layer) -> bool:
        """Whether a layer can be sequence parallel at its tensor degree, which must divide all lengths around it."""
        if not module.parts_sequence or module.shard.degree == 1:
            return False
        before = self.family.boundary(layer - 1) if layer else ()
        shapes = (*before, *self.family.boundary(layer))
        return all(sequence % module.shard.degree == 0 for sequence, *_ in shapes)

    def _assemble(self, modules: dict[int, Layer], shared: SharedWeights) -> RankStage:
        stage = self.mesh.stage_of(self.rank)
        held: dict[int, list[Held]] = {layer: [] for layer in modules}
        units: list[Unit] = []
        reductions: list[Reduction] = []
        counted: list[Counted] = []
        for span in spans(self.mesh):
            if not stage.first <= span.first < stage.end:
                continue
            unit = self._own_unit(span, modules)
            if unit is None:
                continue
            run = span.holders[stage.pipeline]
            reduction = reduction_of(span, unit, run, self.rank, self.groups)
            for layer in range(span.first, span.end):
                held[layer].append(Held(unit, reduction=reduction if layer == span.first else None))
            units.append(unit)
            reductions.append(reduction)
            counted.append(self._counted(unit, run))
        for one in shared_spans(self.mesh, self.model):
            if any(self.rank in run.ranks for run in one.holders):
                unit = self._shared_unit(one, shared[one.name])
                for layer in modules:
                    if self.model.kind_of(layer).shared_weight == one.name:
                        held[layer].append(Held(unit, one.contributes(stage.run_of(layer), self.rank)))
                units.append(unit)
                reductions.append(shared_reduction_of(one, unit, self.rank, self.groups))
                counted.append(self._counted_shared(unit, one))
        layers = {
            layer: RankLayer(layer, modules[layer], tuple(held[layer]), run)
            for run in stage.runs
            for layer in range(run.first, run.end)
        }
        layers = _with_parted_boundaries(layers)
        runs = tuple(tuple(layers[layer] for layer in range(run.first, run.end)) for run in stage.runs)
        return RankStage(runs, tuple(units), tuple(reductions), tuple(counted))

    def _own_unit(self, span: Span, modules: dict[int, Layer]) -> Unit | None:
        weights = [
            Weight(f"{layer}.{name}", parameter, module.split_dimensions.get(name), module.has_partial_gradient(name))
            for layer, module in modules.items()
            if span.first <= layer < span.end
            for name, parameter in module.named_parameters()
            if name not in module.shared_weights
        ]
        if not weights:
            return None
        run = span.holders[self.mesh.stage_of(self.rank).pipeline]
        return self._unit(weights, run, is_shared=False)

    def _shared_unit(self, shared: SharedSpan, parameter: nn.Parameter) -> Unit:
        return self._unit([Weight(shared.name, parameter)], shared.home(self.rank), is_shared=True)

    def _unit(self, weights: list[Weight], run: RunMesh | None, *, is_shared: bool) -> Unit:
        replicas = Replicas()
        if run is not None and run.sharding is not Sharding.NONE:
            ranks = run.data_ranks(run.position(self.rank).tensor)
            replicas = Replicas(run.sharding, self.groups.of(ranks), ranks.index(self.rank), run.data)
        dtype = TORCH_DTYPES[self.model.dtype]
        return Unit(weights, replicas, dtype=dtype, device=self.device, is_shared=is_shared)

    def _counted(self, unit: Unit, run: RunMesh) -> Counted:
        place = run.position(self.rank)
        is_first = self.mesh.stage_of(self.rank).pipeline == 0
        counts = is_first and (unit.replicas.sharding is not Sharding.NONE or place.replica == 0)
        return Counted(unit, split=counts, whole=counts and place.tensor == 0)

    def _counted_shared(self, unit: Unit, shared: SharedSpan) -> Counted:
        """The first owner counts it; where the weight is shared out, the ranks of its data group each their part."""
        first = shared.holders[0]
        ranks = first.data_groups[0] if shared.home(first.data_groups[0][0]) else first.data_groups[0][:1]
        return Counted(unit, split=False, whole=self.rank in ranks)


def _with_parted_boundaries(layers: dict[int, RankLayer]) -> dict[int, RankLayer]:
    """The same consecutive layers, which now know where a boundary is parted and where it is collected."""
    goes_on = {before.number for before, behind in pairwise(layers.values()) if before.hands_on_parts_to(behind)}
    return {
        number: replace(
            layer,
            parts_boundary=layer.is_sequence_parallel and number - 1 not in goes_on,
            collects_boundary=layer.is_sequence_parallel and number not in goes_on,
        )
        for number, layer in layers.items()
    }
