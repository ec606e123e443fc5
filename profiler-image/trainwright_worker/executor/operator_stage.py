"""Layers and flat parameters of a rank whose stage shards each operator in its own way over a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from trainwright.loop_nests.layer_wiring import wire_layer
from trainwright.operator_shardings import SpanSpecs
from trainwright.strategy import Sharding
from trainwright_worker.executor.flat_parameter import FlatParameter, MeshCopies, ShardGroup, Weight, WeightBox
from trainwright_worker.executor.gradient_reduction import FullTiedReduction, Reduction, make_mesh_reduction
from trainwright_worker.executor.mesh_groups import joint_line, mesh_peers
from trainwright_worker.executor.optimizer import SquaredNorm
from trainwright_worker.executor.parameter_groups import TiedParameterGroup, tied_parameter_groups
from trainwright_worker.executor.plan_ranks import MESH_DIMENSIONS, RunRanks, StageRanks
from trainwright_worker.executor.stage_module import (
    TORCH_DTYPES,
    ParameterUse,
    RankLayer,
    RankStageBuilder,
    StageModule,
)
from trainwright_worker.initial_weights import DeferredWeights, InitialValues
from trainwright_worker.layers.layer import SharedWeights
from trainwright_worker.layers.operators.layouts import EVERYWHERE, REPLICATED, Layout, part_of, without_sums
from trainwright_worker.layers.operators.operator_layer import OperatorLayer, StageEnd
from trainwright_worker.layers.operators.operator_tensors import ROWS
from trainwright_worker.layers.operators.placed_weights import PlacedWeight
from trainwright_worker.layers.operators.resharding import Mesh
from trainwright_worker.layers.tensor_parallel import TensorShard


@dataclass(frozen=True, slots=True)
class _Keeping:
    """Way in which weights of a layer are kept and reduced; those with the same one share a flat parameter."""

    summed: tuple[int, ...]
    divided: tuple[int, ...]
    sharding: Sharding

    @classmethod
    def of(cls, placed: PlacedWeight) -> _Keeping:
        sharding = placed.sharding if placed.summed_dimensions else Sharding.NONE
        divided = tuple(dimension for dimension, placement in enumerate(placed.layout) if placement >= 0)
        return cls(placed.summed_dimensions, divided, sharding)

    @classmethod
    def joint(cls, uses: Sequence[_Keeping]) -> _Keeping:
        """Return how a part that several layers use is kept."""
        summed = {dimension for use in uses for dimension in use.summed}
        shardings = {use.sharding for use in uses}
        strongest = next(each for each in (Sharding.ZERO3, Sharding.ZERO2, Sharding.NONE) if each in shardings)
        return cls(tuple(sorted(summed)), uses[0].divided, strongest)


@dataclass(frozen=True, slots=True)
class _TiedPart:
    """Part of a tied weight on this rank.

    Attributes:
        summed: mesh dimensions over which its gradient is summed, if this is the only part and no other stage holds the
            weight; None if all owners sum all of it.
    """

    flat_parameter: FlatParameter
    weight: Weight
    summed: tuple[int, ...] | None


class OperatorStageBuilder(RankStageBuilder):
    """Builder of a stage on a mesh."""

    def _build(self, seed: int, initial_weights: DeferredWeights) -> StageModule:
        initial = dict[nn.Parameter, InitialValues]()
        modules = self._make_layers(seed, initial_weights, initial)
        uses: dict[int, list[ParameterUse]] = {layer: [] for layer in modules}
        reductions: list[Reduction] = []
        flat_parameters: list[FlatParameter] = []
        for layer, module in modules.items():
            weights = dict[_Keeping, list[Weight]]()
            for attribute, placed in module.operators.placed.items():
                if attribute not in module.shared_weights:
                    name = module.checkpoint_name(layer, attribute)
                    weights.setdefault(_Keeping.of(placed), []).append(self._weight(name, module, attribute, initial))
            for keeping, of_keeping in weights.items():
                flat_parameter = self._flatten(of_keeping, keeping)
                reduction = self._reduction(flat_parameter, keeping.summed, overlaps_backward=True)
                uses[layer].append(ParameterUse(flat_parameter, reduction=reduction))
                flat_parameters.append(flat_parameter)
                reductions.append(reduction)
        for tied_group in tied_parameter_groups(self.plan_ranks, self.model):
            parts = self._tied_parts(tied_group, modules, initial, uses)
            if parts:
                reductions.append(self._tied_reduction(tied_group, parts))
                flat_parameters += [part.flat_parameter for part in parts]
        layers = tuple(
            RankLayer(
                layer,
                module,
                tuple(uses[layer]),
                self._stage.run_of(layer),
                needs_input_gradients=layer > 0,
            )
            for layer, module in modules.items()
        )
        norms = tuple(
            SquaredNorm(flat_parameter, includes_split=counts, includes_unsplit=counts)
            for flat_parameter in flat_parameters
            for counts in [flat_parameter.copies is not None and flat_parameter.copies.counts]
        )
        return StageModule((layers,), tuple(flat_parameters), tuple(reductions), norms)

    def _make_layers(
        self, seed: int, initial_weights: DeferredWeights, initial: dict[nn.Parameter, InitialValues]
    ) -> dict[int, OperatorLayer]:
        """Make the layers with this rank's parts of their weights, whose initial values are added to `initial`."""
        stage, mesh = self._stage, self._make_mesh()
        specs = _require_operators(stage)
        modules: dict[int, OperatorLayer] = {}
        shared: SharedWeights = {}
        parts: dict[tuple[str, Layout], nn.Parameter] = {}
        for layer, layer_specs in specs.each_layer():
            self.beat(f"making layer {layer}")
            whole = self.family.make(layer, seed=seed, shard=TensorShard(), shared=shared)
            before = modules.get(layer - 1)
            entering = None if before is None else before.leaving
            wiring = wire_layer(self.model, self.model.kind_of(layer))
            module = OperatorLayer(whole, layer_specs, wiring, mesh, entering)
            if layer == stage.first and layer > 0:
                module.first_end = self._stage_end(stage.runs[0], mesh)
            if layer == stage.end - 1:
                module.last_end = self._stage_end(stage.runs[-1], mesh)
            for attribute, placed in module.operators.placed.items():
                part = self._part(whole.get_parameter(attribute), placed, mesh, initial_weights, initial)
                name = module.shared_weights.get(attribute)
                if name is not None:
                    part = parts.setdefault((name, without_sums(placed.layout)), part)
                module.register_weight(attribute, part)
            modules[layer] = module
        return modules

    def _make_mesh(self) -> Mesh:
        ranks = self._stage.mesh
        lines = [ranks.line(self.rank, dimensions) for dimensions in MESH_DIMENSIONS]
        first, second, whole = map(self.collectives, lines)
        return Mesh(ranks.shape, ranks.coordinates(self.rank), (first, second, whole))

    def _stage_end(self, run: RunRanks, mesh: Mesh) -> StageEnd:
        """Return how a run divides the rows of the boundary at an end of the stage: over the mesh, where its dimensions do."""
        ranks = self._stage.mesh
        for layout in ((ROWS, REPLICATED), (REPLICATED, ROWS), (ROWS, ROWS), EVERYWHERE):
            rows = [part_of(ranks.shape, ranks.coordinates(rank), layout, ROWS) for rank in run.members]
            if rows == [(run.position_of(rank).replica, run.replicas) for rank in run.members]:
                return StageEnd(mesh, layout)
        position = run.position_of(self.rank)
        data, tensor = run.data_groups[position.tensor_rank], run.tensor_groups[position.replica]
        groups = self.collectives(data), self.collectives(tensor), self.collectives(run.members)
        degrees = Mesh((len(data), len(tensor)), (position.replica, position.tensor_rank), groups)
        return StageEnd(degrees, (ROWS, REPLICATED))

    def _part(
        self,
        whole: nn.Parameter,
        placed: PlacedWeight,
        mesh: Mesh,
        initial_weights: DeferredWeights,
        initial: dict[nn.Parameter, InitialValues],
    ) -> nn.Parameter:
        """Return this rank's part of a weight; one with deferred values has memory for one only."""
        values = initial_weights.get(whole)
        if values is None:
            return nn.Parameter(mesh.own_part(whole.detach(), placed.layout).clone())
        part = nn.Parameter(
            torch.empty((), device=whole.device).expand(mesh.own_part(whole.detach(), placed.layout).shape)
        )
        initial[part] = values.box({axis: mesh.part(placed.layout, axis) for axis in range(whole.dim())})
        return part

    def _weight(
        self, name: str, module: OperatorLayer, attribute: str, initial: dict[nn.Parameter, InitialValues]
    ) -> Weight:
        parameter = module.get_parameter(attribute)
        full_shape = tuple(module.whole_shape(attribute))
        layout, mesh = module.operators.placed[attribute].layout, module.operators.mesh
        offsets = tuple(mesh.interval(layout, axis, size)[0] for axis, size in enumerate(full_shape))
        return Weight(name, parameter, initial=initial.get(parameter), box=WeightBox(offsets, full_shape))

    def _flatten(
        self, weights: list[Weight], keeping: _Keeping, *, is_shared: bool = False, is_first: bool = True
    ) -> FlatParameter:
        ranks = tuple(sorted(self._stage.mesh.line(self.rank, keeping.summed)))
        shard_group = ShardGroup()
        if keeping.sharding is not Sharding.NONE and len(ranks) > 1:
            shard_group = ShardGroup(keeping.sharding, self.groups.group_of(ranks), ranks.index(self.rank), len(ranks))
        sharded = keeping.summed if shard_group.count > 1 else ()
        alike = tuple(dimension for dimension in (0, 1) if dimension not in {*keeping.divided, *sharded})
        copies = self._stage.mesh.line(self.rank, alike)
        return FlatParameter(
            weights,
            shard_group,
            dtype=TORCH_DTYPES[self.model.dtype],
            device=self.device,
            is_shared=is_shared,
            copies=MeshCopies(copies.index(self.rank), len(copies), is_first and self._stage.pipeline == 0),
            beat=self.beat,
        )

    def _reduction(
        self, flat_parameter: FlatParameter, summed: tuple[int, ...], *, overlaps_backward: bool
    ) -> Reduction:
        """Return the reduction over these mesh dimensions and over the pipelines."""
        group, peers = (self.groups.group_of(of(self.plan_ranks, self.rank, summed)) for of in (joint_line, mesh_peers))
        return make_mesh_reduction(flat_parameter, group, peers, overlaps_backward=overlaps_backward)

    def _tied_parts(
        self,
        tied_group: TiedParameterGroup,
        modules: dict[int, OperatorLayer],
        initial: dict[nn.Parameter, InitialValues],
        uses: dict[int, list[ParameterUse]],
    ) -> list[_TiedPart]:
        """Make the flat parameters of a tied weight's parts, one for each different part, and add their uses."""
        weights: dict[nn.Parameter, Weight] = {}
        keeping: dict[nn.Parameter, dict[int, _Keeping]] = {}
        for layer, module in modules.items():
            for attribute, name in module.shared_weights.items():
                if name == tied_group.name:
                    parameter = module.get_parameter(attribute)
                    weights[parameter] = self._weight(name, module, attribute, initial)
                    keeping.setdefault(parameter, {})[layer] = _Keeping.of(module.operators.placed[attribute])
        parts: list[_TiedPart] = []
        for parameter, by_layer in keeping.items():
            joint = _Keeping.joint(list(by_layer.values()))
            is_first = self.rank in tied_group.runs[0].ranks and not parts
            flat_parameter = self._flatten([weights[parameter]], joint, is_shared=True, is_first=is_first)
            is_alone = len(keeping) == 1 and not tied_group.spans_stages
            parts.append(_TiedPart(flat_parameter, weights[parameter], joint.summed if is_alone else None))
            for layer, own in by_layer.items():
                uses[layer].append(ParameterUse(flat_parameter, self._contributes(own, parts[-1])))
        return parts

    def _contributes(self, keeping: _Keeping, part: _TiedPart) -> bool:
        """Return whether the gradient of a use counts: of ranks that compute the same one and are reduced together, the first's."""
        reduced = (0, 1) if part.summed is None else part.summed
        return all(
            coordinate == 0 or dimension in {*keeping.summed, *keeping.divided} or dimension not in reduced
            for dimension, coordinate in enumerate(self._stage.mesh.coordinates(self.rank))
        )

    def _tied_reduction(self, tied_group: TiedParameterGroup, parts: list[_TiedPart]) -> Reduction:
        first = parts[0]
        if first.summed is not None:
            return self._reduction(first.flat_parameter, first.summed, overlaps_backward=False)
        group = self.groups.group_of(tied_group.reduction_group_of(self.rank))
        pairs = [(part.flat_parameter, part.weight.offsets) for part in parts]
        return FullTiedReduction(pairs, first.weight.full_shape, group)


def _require_operators(stage: StageRanks) -> SpanSpecs:
    if stage.operators is None:
        raise RuntimeError(f"the stage of layers {stage.first}…{stage.end - 1} has no shardings of operators")
    return stage.operators
