"""Context of a cost evaluation: cluster, model, profiles, optimizer and runtime, with caches shared by all plans.

A row is one sample of a micro-batch (a sequence or an image); a layer run is consecutive layers with one strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from trainwright.cluster import EMULATED_PREFIX, Cluster
from trainwright.cost.boundaries import BoundaryCache
from trainwright.cost.collectives import Collectives
from trainwright.cost.divided_activations import DividedActivations
from trainwright.cost.divided_model import DividedModel
from trainwright.cost.memory_terms import ValueBytes
from trainwright.cost.network import LinkMatrices, Network, link_matrices
from trainwright.families import Custom
from trainwright.layer import (
    Dtype,
    LayerKind,
    TensorSplit,
    sequence_parallel_bytes_ratio,
    sequence_parallel_seconds_ratio,
)
from trainwright.model import Model
from trainwright.profiles import MORE_THAN_ANY_DEVICE_BYTES, LayerCost, Profiles
from trainwright.runtime import Runtime
from trainwright.strategy import Strategy
from trainwright.training import Optimizer

Value = TypeVar("Value")
_MAX_KNOWN_STAGES: Final = 20_000
"""Number of stages above which those that are known are forgotten, to bound memory."""


class KnownStages(Generic[Value]):
    """Values of stages in plans costed so far, by what each depends on."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Value] = {}

    def value(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """Return the value of a key, made if it is not known."""
        if key not in self._known:
            if len(self._known) > _MAX_KNOWN_STAGES:
                self._known.clear()
            self._known[key] = make()
        return self._known[key]


def _divided_ratio(left: float, seconds: float, seconds_of_double: float) -> float:
    """Return what is left of a layer's seconds if of the part that grows with its rows only `left` is."""
    growing = min(max(seconds_of_double / seconds - 1, 0.0), 1.0) if seconds > 0 else 0.0
    return 1 - (1 - left) * growing


@dataclass(frozen=True)
class CostContext:
    """Inputs of the cost model, with caches that all plans share.

    Attributes:
        least_rows: rows that one replica computes at once at least; fewer do not fit into any memory, so that no search
            takes a plan with them.
    """

    model: Model
    cluster: Cluster
    profiles: Profiles
    optimizer: Optimizer = "adam"
    runtime: Runtime = field(default_factory=Runtime)
    least_rows: int = 1

    @cached_property
    def divided_activations(self) -> DividedActivations:
        return DividedActivations(self.model, self.runtime, self.row_bytes, self.is_tensor_sharded)

    @cached_property
    def network(self) -> Network:
        return Network(self.cluster, self.runtime.link_ratio, self.runtime.inside_link_ratio)

    @cached_property
    def collectives(self) -> Collectives:
        return Collectives(self.network, self.runtime.collective_ratios)

    @cached_property
    def boundary_costs(self) -> BoundaryCache:
        return BoundaryCache(self.network, collectives=self.collectives if self.runtime.splits_boundaries else None)

    @cached_property
    def link_matrices(self) -> LinkMatrices:
        """Links as stated, but inside nodes such that link_ratio leads to what the runtime achieves there."""
        matrices, ratio = link_matrices(self.cluster), self.runtime.inside_ratio / self.runtime.link_ratio
        return matrices if ratio == 1 else matrices.with_inside(ratio)

    @cached_property
    def node_numbers(self) -> dict[str, int]:
        """Indices into the cluster's nodes, by node name."""
        return {node.name: index for index, node in enumerate(self.cluster.nodes)}

    @cached_property
    def accelerator_of_node(self) -> dict[str, str]:
        return {node.name: node.accelerator for node in self.cluster.nodes}

    @cached_property
    def memory_of_node(self) -> dict[str, int]:
        """Memory bytes of each of a node's devices, by node name."""
        size = {accelerator.name: accelerator.memory_bytes for accelerator in self.cluster.accelerators}
        return {node.name: size[node.accelerator] for node in self.cluster.nodes}

    @property
    def gradient_dtype(self) -> Dtype:
        return self.runtime.gradient_dtype or self.model.dtype

    def keeps_whole_gradients(self, micro_batches: int) -> bool:
        """Return whether replicas that shard gradients keep them whole until the last micro-batch."""
        return micro_batches > 1 and not self.runtime.reduces_every_micro_batch

    def chunks_of_equal_stages(self, micro_batches: int, stages: int) -> int:
        """Return the chunks of each rank before searches know its layers; 1 if no division of the model is interleaved."""
        return self.runtime.chunks_of(micro_batches, [len(self.model.layers) // stages] * stages)

    @cached_property
    def value_bytes(self) -> ValueBytes:
        value_bytes = ValueBytes.of(self.model, self.optimizer, self.gradient_dtype)
        return value_bytes._replace(copies=self.runtime.copied_bytes_per_parameter)

    @property
    def model_state_bytes(self) -> int:
        """Bytes of training state of the full model, on one device."""
        frozen = sum(self.model.kind(name).frozen_parameters for name in self.model.layers)
        return round(self.value_bytes.unsharded_state(self.model.parameters - frozen, frozen))

    def layer_cost(self, accelerator: str, kind: LayerKind, split: TensorSplit, rows: int) -> LayerCost:
        """Return the profiled cost of one layer, scaled by the runtime's calibrated ratios.

        Division along the sequence shortens only the part of the seconds that grows with the rows, not that of starting kernels.
        Emulated devices take time for products alone, so it saves them none.
        """
        key = (accelerator, kind.name, split, rows)
        cost = self._layer_costs.get(key)
        if cost is None:
            tensor = split.degree
            degree = tensor if self.is_tensor_sharded(kind, tensor) else 1
            profile = self.profiles.cost(accelerator, kind.name, degree, rows)
            forward, backward = profile.forward_seconds, profile.backward_seconds
            growth, ratio = self.runtime.row_growth_ratio, self.runtime.compute_ratio(accelerator)
            if growth != 1.0:
                one_row = self.profiles.cost(accelerator, kind.name, degree, 1)
                # Clamp at zero: the profile of one row may have been measured too slow.
                forward = max(one_row.forward_seconds + growth * (forward - one_row.forward_seconds), 0.0)
                backward = max(one_row.backward_seconds + growth * (backward - one_row.backward_seconds), 0.0)
            saved_ratio = self.runtime.activation_ratio
            computed, dtype = self.divided_at(tensor).kind(kind), self.model.dtype
            update = profile.update_seconds * ratio
            if split.divides_sequence:
                again = self.runtime.gathers_inputs_again
                saved_ratio *= sequence_parallel_bytes_ratio(computed, tensor, rows, dtype, gathers_inputs_again=again)
                if not accelerator.startswith(EMULATED_PREFIX):
                    double = self.profiles.cost(accelerator, kind.name, degree, 2 * rows)
                    left = sequence_parallel_seconds_ratio(computed, tensor, rows, dtype)
                    forward *= _divided_ratio(left, profile.forward_seconds, double.forward_seconds)
                    backward *= _divided_ratio(left, profile.backward_seconds, double.backward_seconds)
            activation_bytes = profile.activation_bytes * saved_ratio
            cost = self._layer_costs[key] = LayerCost(
                forward * ratio,
                backward * ratio,
                update,
                activation_bytes if rows >= self.least_rows else max(activation_bytes, MORE_THAN_ANY_DEVICE_BYTES),
                profile.parameter_bytes,
            )
        return cost

    @property
    def counts_layer_workspace(self) -> bool:
        """Return whether layers may take a workspace: those of a user's own model."""
        return isinstance(self.model.family, Custom)

    def workspace_bytes(self, kind: LayerKind, rows: int) -> float:
        """Return what a layer of a user's model takes for a moment, on the accelerator where that is the most.

        It is the measured peak beyond training state and buffers of the worker, which measures it, and beyond what the layer saves; else
        what its description counted. 0 for layers of families, of which a formula knows that only losses take some.
        """
        if not self.counts_layer_workspace:
            return 0.0
        key = (kind.name, rows)
        if key not in self._workspace_bytes:
            per_value = ValueBytes.of(self.model, self.optimizer, Dtype.FLOAT32)
            state = per_value.unsharded_state(kind.trained_parameters, kind.frozen_parameters) + kind.buffer_bytes
            measured = [
                self.profiles.workspace_bytes(accelerator.name, kind.name, 1, rows, state)
                for accelerator in self.cluster.accelerators
            ]
            sizes = [bytes_taken for bytes_taken in measured if bytes_taken is not None]
            self._workspace_bytes[key] = max(sizes) if sizes else rows * kind.workspace_bytes_per_row
        return self._workspace_bytes[key]

    def slowest_layer_cost(
        self, accelerators: tuple[str, ...], kind: LayerKind, split: TensorSplit, rows: int
    ) -> LayerCost:
        """Return the cost of one layer where devices of several accelerators wait for each other: each part's maximum."""
        if len(accelerators) == 1:
            return self.layer_cost(accelerators[0], kind, split, rows)
        key = (accelerators, kind.name, split, rows)
        slowest = self._slowest_layer_costs.get(key)
        if slowest is None:
            costs = [self.layer_cost(name, kind, split, rows) for name in accelerators]
            slowest = self._slowest_layer_costs[key] = LayerCost(
                max(cost.forward_seconds for cost in costs),
                max(cost.backward_seconds for cost in costs),
                max(cost.update_seconds for cost in costs),
                max(cost.activation_bytes for cost in costs),
                max(cost.parameter_bytes for cost in costs),
            )
        return slowest

    def is_tensor_sharded(self, kind: LayerKind, tensor: int) -> bool:
        """Return whether a tensor group splits the layer's computation and parameters over its ranks.

        Kinds that are not tensor parallel are replicated, unless every accelerator with a profile of the kind was measured at
        this degree: then the measured runtime divides the vocabulary, as Megatron and the worker do.
        """
        if kind.is_tensor_parallel or tensor == 1:
            return True
        key = (kind.name, tensor)
        if key not in self._tensor_sharded:
            names = [accelerator.name for accelerator in self.cluster.accelerators]
            degrees = [profiled for name in names if (profiled := self.profiles.tensor_degrees(name, kind.name))]
            self._tensor_sharded[key] = bool(degrees) and all(tensor in profiled_here for profiled_here in degrees)
        return self._tensor_sharded[key]

    def divided_by(self, strategy: Strategy) -> DividedModel:
        """Return the model as tensor groups divide it under a strategy."""
        return self.divided_at(strategy.tensor)

    def divided_at(self, tensor: int) -> DividedModel:
        """Return the model as tensor groups of one degree divide it."""
        divided = self._divided_models.get(tensor)
        if divided is None:
            divided = self._divided_models[tensor] = DividedModel(
                self.model,
                tensor,
                partial(self.is_tensor_sharded, tensor=tensor),
                self.kind_counts,
                self._kind_prefix_sums,
            )
        return divided

    @cached_property
    def kind_numbers(self) -> NDArray[np.intp]:
        """`[layer]` index of its kind in the model's kinds."""
        number = {kind.name: index for index, kind in enumerate(self.model.kinds)}
        return np.array([number[name] for name in self.model.layers], dtype=np.intp)

    def kind_counts(self, first: int, end: int) -> list[tuple[LayerKind, int]]:
        """Count the layers `first … end - 1` of each kind; kinds without such layers are left out."""
        key = (first, end)
        counts = self._kind_counts.get(key)
        if counts is None:
            counts = self._kind_counts[key] = [
                (kind, sums[end] - sums[first]) for kind, sums in self._kind_prefix_sums if sums[end] > sums[first]
            ]
        return counts

    @cached_property
    def row_bytes(self) -> tuple[int, ...]:
        """`[cut]` bytes of one row over the boundary before a layer; 0 at both ends of the model."""
        return (0, *(self.model.output_bytes_per_row(layer) for layer in range(len(self.model.layers) - 1)), 0)

    @cached_property
    def first_layer_with_tied_weight(self) -> dict[str, int]:
        """First layer that uses each tied weight, by the weight's name."""
        first_layer: dict[str, int] = {}
        for layer in range(len(self.model.layers)):
            name = self.model.kind_of(layer).shared_weight
            if name is not None:
                first_layer.setdefault(name, layer)
        return first_layer

    @cached_property
    def known_workers(self) -> KnownStages[Any]:
        """Workers of stages (`PlanTimes`)."""
        return KnownStages()

    @cached_property
    def known_memory(self) -> KnownStages[Any]:
        """Memory of stages (`stage_memory`)."""
        return KnownStages()

    @cached_property
    def known_operator_stages(self) -> KnownStages[Any]:
        """Costs of stages with shardings of operators (`operator_stage_costs`)."""
        return KnownStages()

    @cached_property
    def _layer_costs(self) -> dict[tuple[str, str, TensorSplit, int], LayerCost]:
        return {}

    @cached_property
    def _workspace_bytes(self) -> dict[tuple[str, int], float]:
        return {}

    @cached_property
    def _divided_models(self) -> dict[int, DividedModel]:
        return {}

    @cached_property
    def _slowest_layer_costs(self) -> dict[tuple[tuple[str, ...], str, TensorSplit, int], LayerCost]:
        return {}

    @cached_property
    def _tensor_sharded(self) -> dict[tuple[str, int], bool]:
        return {}

    @cached_property
    def _kind_counts(self) -> dict[tuple[int, int], list[tuple[LayerKind, int]]]:
        return {}

    @cached_property
    def _kind_prefix_sums(self) -> list[tuple[LayerKind, list[int]]]:
        # In layer order, not kind order: a tied weight has the size that its first owner states.
        layers = self.model.layers
        kinds = dict.fromkeys(self.model.kind_of(layer) for layer in range(len(layers)))
        return [(kind, list(accumulate((name == kind.name for name in layers), initial=0))) for kind in kinds]
