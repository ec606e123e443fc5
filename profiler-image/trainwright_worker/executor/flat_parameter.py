"""Flat buffer of parameters, unsharded or sharded over the replicas of a layer run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainwright.strategy import Sharding
from trainwright_worker.executor.boundary_exchange import require_work
from trainwright_worker.executor.process_groups import all_gather_single
from trainwright_worker.initial_weights import InitialValues, part_start

ALIGNED_VALUES = 8
"""Values to a multiple of which weights and shards are padded: 16 bytes in half precision, which tensor cores need."""


@dataclass(frozen=True, slots=True)
class WeightBox:
    """Rectangle of a full weight that a rank of a mesh has.

    Attributes:
        offsets: its first entry in each dimension.
        full_shape: shape of the full weight.
    """

    offsets: tuple[int, ...]
    full_shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Weight:
    """Parameter within a flat parameter.

    Attributes:
        name: layer index and parameter name, or the tied weight's name.
        split_dimension: dimension that the tensor degree splits, or None if the parameter is replicated.
        split_size: full size of that dimension.
        has_partial_gradient: whether each rank of a tensor group computes only one summand of its gradient.
        initial: initial values, drawn where they are kept; None if the parameter holds them.
        box: part of the weight that the parameter is, where a mesh and no tensor degree splits it.
    """

    name: str
    parameter: nn.Parameter
    split_dimension: int | None = None
    split_size: int | None = None
    has_partial_gradient: bool = False
    initial: InitialValues | None = None
    box: WeightBox | None = None

    @property
    def aligned_size(self) -> int:
        """Number of values and of padding after them."""
        return _align(self.parameter.numel())

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Shape of the weight that the tensor degree or a mesh splits."""
        if self.box is not None:
            return self.box.full_shape
        shape = list(self.parameter.shape)
        if self.split_dimension is not None and self.split_size is not None:
            shape[self.split_dimension] = self.split_size
        return tuple(shape)

    @property
    def offsets(self) -> tuple[int, ...]:
        """First entry of the part that a mesh gives this rank, in each dimension."""
        return (0,) * self.parameter.dim() if self.box is None else self.box.offsets

    def narrow(self, part: Tensor, number: int, count: int, first: int) -> Tensor:
        """Return slice `number` of the `count` finest slices from a part that begins with slice `first`."""
        if self.split_dimension is None or self.split_size is None:
            return part
        start, stop = (part_start(self.split_size, index, count) for index in (number, number + 1))
        return part.narrow(self.split_dimension, start - part_start(self.split_size, first, count), stop - start)

    def write_initial_values(self, target: Tensor, start: int) -> None:
        """Write the initial values from `start` on to a flat tensor."""
        if self.initial is not None:
            self.initial.draw_into(target, start)
        else:
            target.copy_(self.parameter.detach().flatten()[start : start + target.numel()])


def _align(count: int) -> int:
    return -(-count // ALIGNED_VALUES) * ALIGNED_VALUES


@dataclass(frozen=True, slots=True)
class WeightPart:
    """Part of a weight that a rank updates.

    Attributes:
        first, stop: its values of the flattened weight.
        start: its first value in tensors that lie as the shard of the flat parameter.
    """

    weight: Weight
    first: int
    stop: int
    start: int

    def of(self, shard: Tensor) -> Tensor:
        """Return the part of a tensor that lies as the shard, flat."""
        return shard[self.start : self.start + self.stop - self.first]


@dataclass(frozen=True, slots=True)
class ShardGroup:
    """Ranks that shard a flat parameter; a single rank shards nothing.

    Attributes:
        index: index of this rank's shard, equal to its rank in the group.
    """

    sharding: Sharding = Sharding.NONE
    group: dist.ProcessGroup | None = None
    index: int = 0
    count: int = 1


@dataclass(frozen=True, slots=True)
class MeshCopies:
    """Ranks of a mesh that keep the same values of a flat parameter.

    Attributes:
        number, count: this rank is the number-th of `count` of them.
        is_first: whether no other part of the same weights comes before; a tied weight may have several parts.
    """

    number: int
    count: int
    is_first: bool = True

    @property
    def counts(self) -> bool:
        """Return whether this rank stands for all of them."""
        return self.is_first and self.number == 0


class FlatParameter:
    """Flat parameter: weights that are reduced, updated and, if sharded, gathered together.

    Under ZeRO-1 a replica updates only its shard of the weights; under ZeRO-2 it also keeps only that shard of the reduced
    gradients; under ZeRO-3 it also keeps only that shard of the weights, except while a layer computes. Gradients
    accumulate over micro-batches unsharded and in float32 under every sharding.

    Weights that are not trained have no gradients; they are sharded under ZeRO-3 alone, and kept in the model's dtype alone.

    Each rank draws only the initial values that it keeps; `beat` is called meanwhile.

    Attributes:
        weights: parameters, those that the tensor degree splits first.
        starts: first value of each weight.
        split_size: values of the split parameters, with padding.
        size: values of all parameters, with padding.
        full_gradients: unsharded gradients, padded to equal shards; None while there are none.
        gradient_views: its views in the shapes of the weights; empty while there are none.
        gradient_shard: this rank's shard of the reduced gradients; None before reduction.
        master_shard: this rank's shard of the weights in float32, which the optimizer updates; `shard` if none does.
        shard: this rank's shard of the weights in the model's dtype.
        is_unsharded: whether layers can compute with the weights now.
        copies: ranks that keep the same values, if a mesh splits the weights.
    """

    def __init__(  # noqa: PLR0913 (what it holds, and where)
        self,
        weights: Sequence[Weight],
        shard_group: ShardGroup,
        *,
        dtype: torch.dtype,
        device: torch.device,
        is_shared: bool = False,
        is_trained: bool = True,
        copies: MeshCopies | None = None,
        beat: Callable[[str], None] = lambda _doing: None,
    ) -> None:
        self.copies = copies
        self.weights = tuple(sorted(weights, key=lambda weight: weight.split_dimension is None))
        self.shard_group, self.is_trained = shard_group, is_trained
        # Autograd must not accumulate a tied weight's gradient by itself, since a layer's gradient may not count.
        self.accumulates_in_place = dtype is torch.float32 and not is_shared
        self._beat = beat
        ends = list(accumulate(weight.aligned_size for weight in self.weights))
        self.starts = (0, *ends[:-1])
        self.size = ends[-1]
        self.split_size = sum(weight.aligned_size for weight in self.weights if weight.split_dimension is not None)
        self.shard_size = _align(-(-self.size // shard_group.count))
        self.shard_start, self.shard_stop = (
            shard_group.index * self.shard_size,
            (shard_group.index + 1) * self.shard_size,
        )
        self.is_unsharded = not self.is_sharded
        self.full_values = torch.zeros(self.shard_size * shard_group.count, dtype=dtype, device=device)
        self._full_bytes = self.full_values.untyped_storage().nbytes()
        views = self.views(self.full_values)
        if self.is_sharded:
            self.full_values.untyped_storage().resize_(0)
        self._make_shards(dtype, device)
        for weight, view in zip(self.weights, views, strict=True):
            weight.parameter.data = view
        self.full_gradients: Tensor | None = None
        self.gradient_shard: Tensor | None = None
        self.gradient_views: list[Tensor] = []
        self._all_gather: dist.Work | None = None

    def _make_shards(self, dtype: torch.dtype, device: torch.device) -> None:
        """Make this rank's shard of the weights, and the other shards unless they are gathered when needed."""
        start, stop = self.shard_start, self.shard_stop
        master_dtype = torch.float32 if self.is_trained else dtype
        if self.is_sharded or dtype is not master_dtype:
            self.master_shard = torch.zeros(self.shard_size, dtype=master_dtype, device=device)
        else:
            self.master_shard = self.full_values[start:stop]
        self._write_initial_values(self.master_shard, start)
        if dtype is master_dtype:
            self.shard = self.master_shard
        else:
            self.shard = self.master_shard.to(dtype) if self.is_sharded else self.full_values[start:stop]
            self.shard.copy_(self.master_shard)
        if not self.is_sharded:
            self._write_initial_values(self.full_values[:start], 0)
            self._write_initial_values(self.full_values[stop:], stop)

    def _write_initial_values(self, target: Tensor, start: int) -> None:
        """Write the initial values from `start` on to a part of the flat buffer."""
        stop = start + len(target)
        for weight, first in zip(self.weights, self.starts, strict=True):
            low, high = max(start, first), min(stop, first + weight.parameter.numel())
            if low < high:
                self._beat(f"drawing {weight.name}")
                weight.write_initial_values(target[low - start : high - start], low - first)

    @property
    def own_parts(self) -> tuple[WeightPart, ...]:
        """Parts of the weights, in their order, that lie in this rank's shard."""
        parts = []
        for weight, begin in zip(self.weights, self.starts, strict=True):
            low, high = max(self.shard_start, begin), min(self.shard_stop, begin + weight.parameter.numel())
            if low < high:
                parts.append(WeightPart(weight, low - begin, high - begin, low - self.shard_start))
        return tuple(parts)

    @property
    def is_sharded(self) -> bool:
        """Return whether each rank keeps only its shard of the weights."""
        return self.shard_group.sharding is Sharding.ZERO3

    @property
    def keeps_full_gradients(self) -> bool:
        """Return whether unsharded gradients persist between iterations."""
        return self.shard_group.sharding in {Sharding.NONE, Sharding.ZERO1}

    @property
    def resident_tensors(self) -> list[Tensor]:
        """Tensors that persist between iterations."""
        tensors = [self.full_values, self.shard, self.master_shard, self.full_gradients, self.gradient_shard]
        return [tensor for tensor in tensors if tensor is not None]

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return views of a flat buffer in the shapes of the weights."""
        return [
            flat[start : start + weight.parameter.numel()].view(weight.parameter.shape)
            for start, weight in zip(self.starts, self.weights, strict=True)
        ]

    def zero_gradients(self) -> None:
        """Reset gradients at the start of an iteration."""
        self.gradient_shard = None
        if self.full_gradients is not None:
            self.full_gradients.zero_()

    def ensure_gradients(self) -> None:
        """Allocate unsharded gradients before a backward accumulates into them."""
        if self.full_gradients is not None or not self.is_trained:
            return
        self.full_gradients = torch.zeros(self.shard_size * self.shard_group.count, device=self.full_values.device)
        self.gradient_views = self.views(self.full_gradients)
        if self.accumulates_in_place:
            for weight, view in zip(self.weights, self.gradient_views, strict=True):
                weight.parameter.grad = view

    def accumulate_gradients(self, *, contributes: bool = True) -> None:
        """Accumulate or drop the gradients that a backward left in the parameters; no-op if autograd accumulates in place.

        One addition for each weight: torch's addition of many tensors at once is one kernel only if all have one dtype.
        """
        if self.accumulates_in_place or not self.is_trained:
            return
        for weight, view in zip(self.weights, self.gradient_views, strict=True):
            gradient, weight.parameter.grad = weight.parameter.grad, None
            if gradient is not None and contributes:
                view.add_(gradient)

    def release_full_gradients(self) -> None:
        """Free the unsharded gradients, unless they persist."""
        if self.keeps_full_gradients:
            return
        self.full_gradients, self.gradient_views = None, []
        for weight in self.weights:
            weight.parameter.grad = None

    def keep_gradient_shard(self) -> None:
        """Keep this rank's shard of the reduced, unsharded gradients."""
        if self.full_gradients is None:
            raise RuntimeError("there are no gradients to shard")
        part = self.full_gradients[self.shard_start : self.shard_stop]
        self.gradient_shard = part if self.keeps_full_gradients else part.clone()
        self.release_full_gradients()

    def start_unshard(self) -> None:
        """Start to all-gather the weights, if they are sharded."""
        if self.is_unsharded or self._all_gather is not None:
            return
        self.full_values.untyped_storage().resize_(self._full_bytes)
        self._all_gather = require_work(
            all_gather_single(self.full_values, self.shard, group=self.shard_group.group, async_op=True)
        )

    def unshard(self) -> None:
        """Wait until the weights are unsharded."""
        self.start_unshard()
        if self._all_gather is not None:
            self._all_gather.wait()
            self._all_gather, self.is_unsharded = None, True

    def reshard(self) -> None:
        """Free the other ranks' shards of the weights, if they are sharded."""
        if self.is_sharded:
            if self._all_gather is not None:
                self._all_gather.wait()
                self._all_gather = None
            self.full_values.untyped_storage().resize_(0)
            self.is_unsharded = False

    @property
    def gathers_after_update(self) -> bool:
        """Return whether an all-gather over the replicas follows the update."""
        return self.shard_group.sharding in {Sharding.ZERO1, Sharding.ZERO2}

    def start_publishing(self) -> dist.Work | None:
        """Copy the updated `master_shard` to the weights that layers read; ZeRO-1 and ZeRO-2 start to all-gather them."""
        if self.shard is not self.master_shard:
            self.shard.copy_(self.master_shard)
        if not self.gathers_after_update:
            return None
        return all_gather_single(self.full_values, self.shard.clone(), group=self.shard_group.group, async_op=True)


def publish_updates(flat_parameters: Sequence[FlatParameter]) -> None:
    """Copy the updated weights to where layers read them, and wait until they are gathered."""
    for work in [flat_parameter.start_publishing() for flat_parameter in flat_parameters]:
        if work is not None:
            work.wait()
