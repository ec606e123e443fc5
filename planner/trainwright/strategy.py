"""Strategy of layers: how the devices of a stage divide them, their batch and their state."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from typing import Annotated, Any, Self, TypeVar

from trainwright.bounds import OMITTED_DEFAULT

T = TypeVar("T")


class Sharding(StrEnum):
    """State that a layer's replicas shard among them (ZeRO stages)."""

    NONE = "none"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    ZERO3 = "zero3"


class RankOrder(StrEnum):
    """Degree that runs over neighbouring devices of a stage."""

    TENSOR_INNER = "tensor_inner"
    DATA_INNER = "data_inner"

    def tensor_groups(self, members: tuple[T, ...], tensor: int) -> tuple[tuple[T, ...], ...]:
        """Split the members of a stage into the tensor group of each data replica, in order."""
        if self is RankOrder.TENSOR_INNER:
            return tuple(members[start : start + tensor] for start in range(0, len(members), tensor))
        data = len(members) // tensor
        return tuple(members[replica::data] for replica in range(data))

    def members(self, tensor_groups: Iterable[Iterable[T]]) -> tuple[T, ...]:
        """Return the members of a stage in device order, given its tensor groups: the inverse of `tensor_groups`."""
        rows = tensor_groups if self is RankOrder.TENSOR_INNER else zip(*tensor_groups, strict=True)
        return tuple(chain.from_iterable(rows))


@dataclass(frozen=True, slots=True)
class Strategy:
    """Strategy of consecutive layers on the devices of a stage. Nothing else lists these fields.

    Attributes:
        tensor, data: degrees; their product is the number of the stage's devices.
        recompute: compute activations again in the backward instead of saving them.
        sequence_parallel: tensor groups divide activations along the sequence outside of products and attention (Korthikanti et
            al. 2022), in layers that allow it and whose sequences the tensor degree divides; results do not change.
        keep_gathered_weights: under zero3 weights stay gathered from the first forward of an iteration to its last backward,
            instead of being gathered for every pass; results do not change.
    """

    tensor: int
    data: int
    order: RankOrder = RankOrder.TENSOR_INNER
    sharding: Sharding = Sharding.NONE
    recompute: bool = False
    sequence_parallel: Annotated[bool, OMITTED_DEFAULT] = False
    keep_gathered_weights: Annotated[bool, OMITTED_DEFAULT] = False

    def __post_init__(self) -> None:
        if self.tensor < 1 or self.data < 1:
            raise ValueError(f"degrees must be at least 1, got tensor {self.tensor}, data {self.data}")

    @property
    def width(self) -> int:
        """Number of devices."""
        return self.tensor * self.data

    @property
    def degrees(self) -> tuple[int, int]:
        """Tensor and data degree."""
        return self.tensor, self.data

    @property
    def product(self) -> str:
        """The degrees and their product in words: `tensor 2 × data 4 = 8`."""
        return f"tensor {self.tensor} × data {self.data} = {self.width}"

    def indivisible_degree(self, max_tensor_degree: int) -> str | None:
        """Return `tensor degree 3`, the degree that does not divide a model's maximum; None where all divide theirs."""
        return f"tensor degree {self.tensor}" if max_tensor_degree % self.tensor else None

    @property
    def effective(self) -> Self:
        """The strategy without what changes nothing: one replica shards no state, and one device divides no sequence."""
        sharding = self.sharding if self.data > 1 else Sharding.NONE
        keeps = self.keep_gathered_weights and sharding is Sharding.ZERO3
        divides = self.sequence_parallel and self.tensor > 1
        return self.replace(sharding=sharding, sequence_parallel=divides, keep_gathered_weights=keeps)

    @property
    def divides_weights(self) -> bool:
        """True if a rank updates a part of a weight alone."""
        return self.tensor > 1 or self.effective.sharding is not Sharding.NONE

    @property
    def arrangement(self) -> Strategy:
        """The strategy with its degrees and order alone, which say where ranks are."""
        return Strategy(self.tensor, self.data, self.order)

    @property
    def without_runtime_choices(self) -> Self:
        """The strategy with what the runtime decides left open."""
        return self.replace(sequence_parallel=False) if self.sequence_parallel else self

    def replace(self, **changes: Any) -> Self:
        """Return the strategy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def with_replicas(self, data: int) -> Self:
        """Return the strategy at another data degree; a single replica shards no state."""
        if data == self.data and (data > 1 or self.sharding is Sharding.NONE):
            return self
        if data > 1:
            return self.replace(data=data)
        return self.replace(data=data, sharding=Sharding.NONE, keep_gathered_weights=False)

    def tensor_groups(self, members: tuple[T, ...]) -> tuple[tuple[T, ...], ...]:
        """Return the tensor group of each data replica, in order."""
        return self.order.tensor_groups(members, self.tensor)

    def data_groups(self, members: tuple[T, ...]) -> tuple[tuple[T, ...], ...]:
        """Return the members with the same shard of the weights, for each tensor rank in order."""
        return tuple(zip(*self.tensor_groups(members), strict=True))
