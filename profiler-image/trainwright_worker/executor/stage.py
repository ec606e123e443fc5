"""One rank's layers, run by run, and the units that their weights form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainwright.model import Model
from trainwright.plan import Sharding
from trainwright_worker.executor.groups import Groups
from trainwright_worker.executor.mesh import Mesh, RunMesh
from trainwright_worker.executor.precision import Counted
from trainwright_worker.executor.reduction import Reduction, SharedReduction, reduction_of
from trainwright_worker.executor.unit import Replicas, Unit, Weight
from trainwright_worker.executor.units import SharedSpan, Span, shared_spans, spans
from trainwright_worker.layers.layer import FamilyLayers, Layer, SharedWeights
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
    """One layer of this rank."""

    number: int
    module: Layer
    held: tuple[Held, ...]
    run: RunMesh

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
        all_reduce: sums a tensor over the tensor group of a run, in place.
    """

    model: Model
    family: FamilyLayers
    mesh: Mesh
    rank: int
    groups: Groups
    device: torch.device
    all_reduce: Callable[[RunMesh], Callable[[Tensor], None]]

    def build(self, seed: int) -> RankStage:
        stage = self.mesh.stage_of(self.rank)
        shared: SharedWeights = {}
        modules: dict[int, Layer] = {}
        for run in stage.runs:
            shard = TensorShard(run.position(self.rank).tensor, run.tensor, self.all_reduce(run))
            for layer in range(run.first, run.end):
                made = self.family.make(layer, seed=seed, shard=shard, shared=shared)
                modules[layer] = made.to(self.device)
        return self._assemble(modules, shared)

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
                reductions.append(SharedReduction(unit, one, self.rank, self.groups))
                counted.append(self._counted_shared(unit, one))
        runs = tuple(
            tuple(RankLayer(layer, modules[layer], tuple(held[layer]), run) for layer in range(run.first, run.end))
            for run in stage.runs
        )
        return RankStage(runs, tuple(units), tuple(reductions), tuple(counted))

    def _own_unit(self, span: Span, modules: dict[int, Layer]) -> Unit | None:
        weights = [
            Weight(f"{layer}.{name}", parameter, split_of(module, name), name in module.partial_gradients)
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


def split_of(module: Layer, name: str) -> int | None:
    """The dimension in which a tensor degree divides a parameter, or None."""
    return module.split_dimensions.get(name)
