"""Layers and flat parameters of one rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from trainwright.model import Model
from trainwright.strategy import Sharding
from trainwright_worker.executor.flat_parameter import FlatParameter, ShardGroup, Weight
from trainwright_worker.executor.gradient_reduction import Reduction, TiedPart, make_reduction, make_tied_reduction
from trainwright_worker.executor.optimizer import SquaredNorm
from trainwright_worker.executor.parameter_groups import (
    ParameterGroup,
    TiedParameterGroup,
    parameter_groups,
    tied_parameter_groups,
)
from trainwright_worker.executor.plan_ranks import PlanRanks, Ranks, RunRanks, StageRanks
from trainwright_worker.executor.process_groups import ProcessGroups
from trainwright_worker.initial_weights import DeferredWeights, deferred_weights
from trainwright_worker.layers import tensor_parallel
from trainwright_worker.layers.layer import Boundary, FamilyLayers, Layer, SharedWeights
from trainwright_worker.layers.tensor_parallel import Collectives, TensorShard

TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class ParameterUse:
    """Use of a flat parameter by a layer.

    Attributes:
        contributes: whether the gradient that the layer computes counts.
        reduction: set for the layer whose backward is the parameter's last, else None.
    """

    flat_parameter: FlatParameter
    contributes: bool = True
    reduction: Reduction | None = None


@dataclass(frozen=True)
class RankLayer:
    """Layer of this rank.

    Attributes:
        scatters_boundary: whether the incoming boundary must be scattered along the sequence.
        gathers_boundary: whether the outgoing boundary must be gathered along the sequence.
        without_backward: whether it and all layers before it are frozen.
        needs_input_gradients: whether a layer before it is trained.
        counts_loss: whether its loss on this rank counts, which other ranks may have, too.
    """

    number: int
    module: Layer
    parameter_uses: tuple[ParameterUse, ...]
    run: RunRanks
    scatters_boundary: bool = False
    gathers_boundary: bool = False
    without_backward: bool = False
    needs_input_gradients: bool = True
    counts_loss: bool = True

    @property
    def is_sequence_parallel(self) -> bool:
        return self.module.shard.sequence_parallel

    def scatter_boundary(self, boundary: Boundary) -> Boundary:
        """Return this rank's part of the sequence."""
        return tuple(tensor_parallel.scatter_sequence(self._collectives, tensor) for tensor in boundary)

    def gather_boundary(self, parts: Boundary) -> Boundary:
        """Return the full sequence, gathered over the tensor group."""
        return tensor_parallel.gather_sequence(self._collectives, parts)

    @property
    def _collectives(self) -> Collectives:
        collectives = self.module.shard.collectives
        if collectives is None:
            raise RuntimeError(f"layer {self.number} has no tensor group to split the sequence over")
        return collectives

    def keeps_sequence_sharded_for(self, other: RankLayer) -> bool:
        """Return whether the next layer continues with this layer's scattered sequence."""
        both = self.is_sequence_parallel and other.is_sequence_parallel
        return both and self.run.is_equivalent(other.run)

    @property
    def is_recomputed(self) -> bool:
        return self.run.run.strategy.recompute and not self.without_backward

    @property
    def has_sharded_weights(self) -> bool:
        """Return whether its weights must be gathered before it computes."""
        return any(use.flat_parameter.is_sharded for use in self.parameter_uses)

    @property
    def overlaps_reduction(self) -> bool:
        return any(use.reduction is not None and use.reduction.overlaps_backward for use in self.parameter_uses)


@dataclass(frozen=True)
class StageModule:
    """Layers of this rank by run, and their weights.

    Attributes:
        flat_parameters: of weights that are trained.
        frozen_parameters: flat parameters of weights that are not.
        reductions: in the order that all ranks follow.
        squared_norms: for each flat parameter, the values that this rank counts in the gradient norm.
    """

    runs: tuple[tuple[RankLayer, ...], ...]
    flat_parameters: tuple[FlatParameter, ...]
    reductions: tuple[Reduction, ...]
    squared_norms: tuple[SquaredNorm, ...]
    frozen_parameters: tuple[FlatParameter, ...] = ()

    @property
    def layers(self) -> tuple[RankLayer, ...]:
        return tuple(layer for run in self.runs for layer in run)

    @property
    def frozen_tensors(self) -> list[Tensor]:
        """Weights that are not trained: tensors that persist between iterations."""
        return [tensor for flat_parameter in self.frozen_parameters for tensor in flat_parameter.resident_tensors]

    @property
    def updated_parameters(self) -> int:
        """Number of values that this rank's optimizer updates."""
        return sum(flat_parameter.shard_size for flat_parameter in self.flat_parameters)


@dataclass(frozen=True)
class RankStageBuilder(ABC):
    """Builder of a rank's stage.

    Attributes:
        collectives: returns the collectives of some ranks, given in the order of their parts.
        beat: called with a description whenever a weight is drawn.
    """

    model: Model
    family: FamilyLayers
    plan_ranks: PlanRanks
    rank: int
    groups: ProcessGroups
    device: torch.device
    collectives: Callable[[Ranks], Collectives]
    beat: Callable[[str], None]

    def build(self, seed: int) -> StageModule:
        with deferred_weights(self.device) as initial_weights:
            return self._build(seed, initial_weights)

    @property
    def _stage(self) -> StageRanks:
        return self.plan_ranks.stage_of(self.rank)

    @abstractmethod
    def _build(self, seed: int, initial_weights: DeferredWeights) -> StageModule:
        """Make the layers, their flat parameters and reductions."""


class StageBuilder(RankStageBuilder):
    """Builder of a stage whose layers are split by degrees."""

    def _supports_sequence_parallel(self, layer: int, module: Layer) -> bool:
        """Return whether a layer can run sequence parallel: its tensor degree must divide the sequence lengths around it."""
        if not module.supports_sequence_parallel or module.shard.degree == 1:
            return False
        before = self.family.boundary(layer - 1) if layer else ()
        shapes = (*before, *self.family.boundary(layer))
        return all(sequence % module.shard.degree == 0 for sequence, *_ in shapes)

    def _build(self, seed: int, initial_weights: DeferredWeights) -> StageModule:
        stage = self._stage
        modules: dict[int, Layer] = {}
        shared_weights: dict[object, SharedWeights] = {}
        parameter_uses: dict[int, list[ParameterUse]] = {layer: [] for layer in range(stage.first, stage.end)}
        flat_parameters: list[FlatParameter] = []
        reductions: list[Reduction] = []
        squared_norms: list[SquaredNorm] = []
        frozen_parameters: list[FlatParameter] = []
        for parameter_group in parameter_groups(self.plan_ranks):
            if not stage.first <= parameter_group.first < stage.end:
                continue
            run = parameter_group.runs[stage.pipeline]
            made = self._make_layers(parameter_group, run, seed, shared_weights)
            modules |= made
            frozen_parameters += self._make_frozen(made, run, initial_weights, parameter_uses)
            flat_parameter = self._make_flat_parameter(made, run, initial_weights)
            if flat_parameter is None:
                continue
            reduction = make_reduction(parameter_group, flat_parameter, run, self.rank, self.groups)
            for layer in range(parameter_group.first, parameter_group.end):
                parameter_uses[layer].append(
                    ParameterUse(flat_parameter, reduction=reduction if layer == parameter_group.first else None)
                )
            flat_parameters.append(flat_parameter)
            reductions.append(reduction)
            squared_norms.append(self._squared_norm(flat_parameter, run))
        for tied_group in tied_parameter_groups(self.plan_ranks, self.model):
            parts: dict[nn.Parameter, TiedPart] = {}
            for layer, module in modules.items():
                if self.model.kind_of(layer).shared_weight != tied_group.name:
                    continue
                run = stage.run_of(layer)
                attribute = next(name for name, whole in module.shared_weights.items() if whole == tied_group.name)
                parameter = module.get_parameter(attribute)
                if parameter not in parts:
                    weight = self._weight(tied_group.name, module, attribute, initial_weights)
                    flat_parameter = self._flatten([weight], tied_group.sharding_run(run), is_shared=True)
                    parts[parameter] = TiedPart(flat_parameter, run)
                    squared_norms.append(self._tied_squared_norm(parts[parameter], tied_group))
                contributes = tied_group.contributes(run, self.rank)
                parameter_uses[layer].append(ParameterUse(parts[parameter].flat_parameter, contributes))
            if parts:
                flat_parameters += [part.flat_parameter for part in parts.values()]
                reductions.append(make_tied_reduction(tied_group, tuple(parts.values()), self.rank, self.groups))
        layers = {
            layer: RankLayer(
                layer,
                modules[layer],
                tuple(parameter_uses[layer]),
                run,
                without_backward=self.model.kind_of(layer).without_backward,
                needs_input_gradients=layer > 0 and not self.model.kind_of(layer - 1).without_backward,
                counts_loss=run.position_of(self.rank).tensor_rank == 0,
            )
            for run in stage.runs
            for layer in range(run.first, run.end)
        }
        divided_boundaries = self.plan_ranks.divided_boundaries(stage, self.model)
        layers = _with_boundary_collectives(layers, divided_boundaries, last=len(self.model.layers) - 1)
        runs = tuple(tuple(layers[layer] for layer in range(run.first, run.end)) for run in stage.runs)
        return StageModule(
            runs, tuple(flat_parameters), tuple(reductions), tuple(squared_norms), tuple(frozen_parameters)
        )

    def _make_layers(
        self, parameter_group: ParameterGroup, run: RunRanks, seed: int, shared_weights: dict[object, SharedWeights]
    ) -> dict[int, Layer]:
        """Make the layers of a parameter group, with weights that have no values yet.

        Layers share a divided weight if their runs divide it in the same way.
        """
        group = run.tensor_groups[run.position_of(self.rank).replica]
        shard = TensorShard(*run.tensor_shard(self.rank), self.collectives(group))
        modules = {}
        for layer in range(parameter_group.first, parameter_group.end):
            self.beat(f"making layer {layer}")
            is_divided = self.model.divided_kind(self.model.kind_of(layer)) is not None
            shared = shared_weights.setdefault(run.tensor_division if is_divided else None, {})
            module = self.family.make(layer, seed=seed, shard=shard, shared=shared)
            if run.run.strategy.sequence_parallel and self._supports_sequence_parallel(layer, module):
                module.shard = replace(shard, sequence_parallel=True)
            modules[layer] = module
        return modules

    def _make_flat_parameter(
        self, modules: dict[int, Layer], run: RunRanks, initial_weights: DeferredWeights, *, is_trained: bool = True
    ) -> FlatParameter | None:
        """Make the flat parameter of the untied weights that are trained, or of those that are not; None if there are none."""
        weights = [
            self._weight(module.checkpoint_name(layer, name), module, name, initial_weights)
            for layer, module in modules.items()
            for name, parameter in module.named_parameters()
            if name not in module.shared_weights and parameter.requires_grad is is_trained
        ]
        return self._flatten(weights, run, is_shared=False, is_trained=is_trained) if weights else None

    def _make_frozen(
        self,
        modules: dict[int, Layer],
        run: RunRanks,
        initial_weights: DeferredWeights,
        parameter_uses: dict[int, list[ParameterUse]],
    ) -> list[FlatParameter]:
        """Make the flat parameter of a group's weights that are not trained, if there are any, and add its uses."""
        frozen = self._make_flat_parameter(modules, run, initial_weights, is_trained=False)
        if frozen is None:
            return []
        for layer in modules:
            parameter_uses[layer].append(ParameterUse(frozen))
        return [frozen]

    @staticmethod
    def _weight(name: str, module: Layer, attribute: str, initial_weights: DeferredWeights) -> Weight:
        parameter = module.get_parameter(attribute)
        return Weight(
            name,
            parameter,
            module.split_dimensions.get(attribute),
            module.split_size(attribute),
            module.has_partial_gradient(attribute),
            initial_weights.get(parameter),
        )

    def _flatten(
        self, weights: list[Weight], run: RunRanks | None, *, is_shared: bool, is_trained: bool = True
    ) -> FlatParameter:
        shard_group = ShardGroup()
        if run is not None and (run.sharding is Sharding.ZERO3 or (is_trained and run.sharding is not Sharding.NONE)):
            ranks = run.data_group_ranks(run.position_of(self.rank).tensor_rank)
            shard_group = ShardGroup(run.sharding, self.groups.group_of(ranks), ranks.index(self.rank), run.replicas)
        dtype = TORCH_DTYPES[self.model.dtype]
        return FlatParameter(
            weights,
            shard_group,
            dtype=dtype,
            device=self.device,
            is_shared=is_shared,
            is_trained=is_trained,
            beat=self.beat,
        )

    def _squared_norm(self, flat_parameter: FlatParameter, run: RunRanks) -> SquaredNorm:
        position = run.position_of(self.rank)
        is_first = self._stage.pipeline == 0
        counts = is_first and (flat_parameter.shard_group.sharding is not Sharding.NONE or position.replica == 0)
        return SquaredNorm(flat_parameter, includes_split=counts, includes_unsplit=counts and position.tensor_rank == 0)

    def _tied_squared_norm(self, part: TiedPart, tied_group: TiedParameterGroup) -> SquaredNorm:
        """Count each part of a tied weight once: by its first owner, or by that owner's data group if it is sharded."""
        first = tied_group.runs[0]
        holders = first.data_groups if tied_group.is_divided else first.data_groups[:1]
        ranks = {rank for group in holders for rank in (group if tied_group.sharding_run(first) else group[:1])}
        counts = self.rank in ranks and tied_group.has_same_part(first, part.run)
        return SquaredNorm(part.flat_parameter, includes_split=counts, includes_unsplit=counts)


def _with_boundary_collectives(
    layers: dict[int, RankLayer], divided_boundaries: frozenset[int], *, last: int
) -> dict[int, RankLayer]:
    """Return the layers with boundary scatters and gathers at the ends of each sequence-parallel series.

    `divided_boundaries` are those of the stage that stay divided. No boundary enters layer 0 of the model or leaves the last
    one.
    """
    stays_sharded = divided_boundaries | {
        before.number for before, behind in pairwise(layers.values()) if before.keeps_sequence_sharded_for(behind)
    }
    return {
        number: replace(
            layer,
            scatters_boundary=layer.is_sequence_parallel and number > 0 and number - 1 not in stays_sharded,
            gathers_boundary=layer.is_sequence_parallel and number < last and number not in stays_sharded,
        )
        for number, layer in layers.items()
    }
