"""What every cost depends on beside the plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from trainwright.cluster import Cluster
from trainwright.cost.boundaries import Boundaries
from trainwright.cost.collectives import Collectives
from trainwright.cost.fabric import Fabric
from trainwright.layer import Dtype, LayerKind
from trainwright.model import Model
from trainwright.profiles import LayerCost, Profiles
from trainwright.runtime import Runtime
from trainwright.training import Optimizer


@dataclass(frozen=True)
class Setting:
    """The model, the devices and links that train it, what its layers cost there, and how the runtime behaves.

    What plans share is computed once for each setting and kept with it.
    """

    model: Model
    cluster: Cluster
    profiles: Profiles
    optimizer: Optimizer = "adam"
    runtime: Runtime = field(default_factory=Runtime)

    @cached_property
    def fabric(self) -> Fabric:
        return Fabric(self.cluster, self.runtime.link_ratio)

    @cached_property
    def collectives(self) -> Collectives:
        return Collectives(self.fabric, self.runtime.collective_ratios)

    @cached_property
    def boundaries(self) -> Boundaries:
        return Boundaries(self.fabric, gathers=self.collectives if self.runtime.splits_boundaries else None)

    @cached_property
    def accelerator_of_node(self) -> dict[str, str]:
        return {node.name: node.accelerator for node in self.cluster.nodes}

    @cached_property
    def memory_of_node(self) -> dict[str, int]:
        """By node: bytes of each of its devices."""
        size = {accelerator.name: accelerator.memory_bytes for accelerator in self.cluster.accelerators}
        return {node.name: size[node.accelerator] for node in self.cluster.nodes}

    @property
    def gradient_dtype(self) -> Dtype:
        return self.runtime.gradient_dtype

    def layer_cost(self, accelerator: str, kind: LayerKind, tensor: int, rows: int) -> LayerCost:
        """Cost of one layer as this runtime reaches it."""
        key = (accelerator, kind.name, tensor, rows)
        found = self._layer_costs.get(key)
        if found is None:
            degree = tensor if self.divides(kind, tensor) else 1
            profile = self.profiles.cost(accelerator, kind.name, degree, rows)
            forward, backward = profile.forward_seconds, profile.backward_seconds
            growth, ratio = self.runtime.row_growth_ratio, self.runtime.compute_ratio(accelerator)
            if growth != 1.0:
                one = self.profiles.cost(accelerator, kind.name, degree, 1)
                # Not below zero, where a first row was measured too slow.
                forward = max(one.forward_seconds + growth * (forward - one.forward_seconds), 0.0)
                backward = max(one.backward_seconds + growth * (backward - one.backward_seconds), 0.0)
            found = self._layer_costs[key] = LayerCost(
                forward * ratio,
                backward * ratio,
                profile.update_seconds * ratio,
                profile.activation_bytes * self.runtime.activation_ratio,
                profile.parameter_bytes,
            )
        return found

    def divides(self, kind: LayerKind, tensor: int) -> bool:
        """Whether the ranks of a tensor group divide a layer's computation and its values among them.

        Kinds that are not tensor parallel each of them computes and holds whole, unless they were measured at that
        degree, on all accelerators that they were measured on: the runtime that was measured divides them all the same
        (Megatron its vocabulary).
        """
        if kind.is_tensor_parallel or tensor == 1:
            return True
        key = (kind.name, tensor)
        if key not in self._divides:
            names = [one.name for one in self.cluster.accelerators]
            degrees = [found for name in names if (found := self.profiles.tensor_degrees(name, kind.name))]
            self._divides[key] = bool(degrees) and all(tensor in found for found in degrees)
        return self._divides[key]

    def values_at(self, kind: LayerKind, tensor: int) -> int:
        """Values of one layer on one rank."""
        if kind.is_tensor_parallel or not self.divides(kind, tensor):
            return kind.parameters_at(tensor)
        return kind.parameters // tensor

    def kind_counts(self, first: int, end: int) -> list[tuple[LayerKind, int]]:
        """How many of the layers `first … end - 1` are of each kind; kinds with none left out."""
        key = (first, end)
        found = self._kind_counts.get(key)
        if found is None:
            found = self._kind_counts[key] = [
                (kind, sums[end] - sums[first]) for kind, sums in self._kind_sums if sums[end] > sums[first]
            ]
        return found

    def parameters(self, first: int, end: int, tensor: int) -> int:
        """Values that one rank holds of the layers `first … end - 1`, a weight that several of them share once."""
        total = sum(count * self.values_at(kind, tensor) for kind, count in self.kind_counts(first, end))
        return total - sum(self.repeated(first, end, tensor).values())

    def shared_at(self, kind: LayerKind, tensor: int) -> int:
        """Values of the kind's shared weight on one rank."""
        return kind.shared_parameters // (tensor if self.divides(kind, tensor) else 1)

    def repeated(self, first: int, end: int, tensor: int) -> dict[str, int]:
        """By shared weight: values that the layers name again but hold once."""
        found: dict[str, int] = {}
        for kind, count in self.kind_counts(first, end):
            if kind.shared_weight is not None:
                size = self.shared_at(kind, tensor)
                found[kind.shared_weight] = found.get(kind.shared_weight, -size) + count * size
        return found

    @cached_property
    def first_owner(self) -> dict[str, int]:
        """By shared weight: the first layer that holds it."""
        found: dict[str, int] = {}
        for layer in range(len(self.model.layers)):
            name = self.model.kind_of(layer).shared_weight
            if name is not None:
                found.setdefault(name, layer)
        return found

    @cached_property
    def _layer_costs(self) -> dict[tuple[str, str, int, int], LayerCost]:
        return {}

    @cached_property
    def _divides(self) -> dict[tuple[str, int], bool]:
        return {}

    @cached_property
    def _kind_counts(self) -> dict[tuple[int, int], list[tuple[LayerKind, int]]]:
        return {}

    @cached_property
    def _kind_sums(self) -> list[tuple[LayerKind, list[int]]]:
        # In the order of the layers, whatever that of the kinds: of a shared weight the first owner's size counts.
        layers = self.model.layers
        kinds = dict.fromkeys(self.model.kind_of(layer) for layer in range(len(layers)))
        return [(kind, list(accumulate((name == kind.name for name in layers), initial=0))) for kind in kinds]
