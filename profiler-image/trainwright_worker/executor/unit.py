"""One unit of weights: side by side in a flat buffer, whole or shared out among the replicas of a layer run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainwright.plan import Sharding
from trainwright_worker.executor.messages import present


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter of a unit.

    Attributes:
        name: by the layer's index and the parameter's name, or the shared weight's name.
        split: the dimension in which the tensor degree divides it, or None where it is whole.
        is_partial: whether a rank of a tensor group has but a part of its gradient.
    """

    name: str
    parameter: nn.Parameter
    split: int | None = None
    is_partial: bool = False


@dataclass(frozen=True, slots=True)
class Replicas:
    """Those that share a unit's weights out among them; one by itself shares nothing.

    Attributes:
        index: this rank's place among them, the same as its rank in the group.
    """

    sharding: Sharding = Sharding.NONE
    group: dist.ProcessGroup | None = None
    index: int = 0
    count: int = 1


class Unit:
    """Weights that are summed, updated and, where they are sharded, collected together.

    ZeRO: with zero1 a replica updates its part of the weights, with zero2 it also keeps of the summed gradients no more
    than that part, with zero3 of the weights too but while a layer computes. Gradients of micro-batches add up whole,
    in float32, whatever the sharding.

    Attributes:
        weights: those that a tensor degree divides first.
        split_size: values of those.
        size: values of all.
        gradients: whole, padded to equal parts; None while there are none.
        gradient: this replica's part of the summed gradients; None before they are summed.
        master: its part of the weights in float32: what the optimizer updates.
        own: its part of the weights in their number format.
        is_whole: whether layers can compute with the weights now.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        replicas: Replicas,
        *,
        dtype: torch.dtype,
        device: torch.device,
        is_shared: bool = False,
    ) -> None:
        self.weights = tuple(sorted(weights, key=lambda weight: weight.split is None))
        self.replicas = replicas
        # What a layer adds to a shared weight's gradient may not count, so autograd must not add it by itself.
        self.adds_in_place = dtype is torch.float32 and not is_shared
        sizes = [weight.parameter.numel() for weight in self.weights]
        self.size = sum(sizes)
        self.split_size = sum(size for size, one in zip(sizes, self.weights, strict=True) if one.split is not None)
        self.part = -(-self.size // replicas.count)
        self.low, self.high = replicas.index * self.part, (replicas.index + 1) * self.part
        first = torch.zeros(self.part * replicas.count)
        torch.cat([weight.parameter.detach().flatten() for weight in self.weights], out=first[: self.size])
        self.values = first.to(device, dtype)
        self.master = self._master(first, dtype, device)
        self.own = self.values[self.low : self.high]
        self._bytes = self.values.untyped_storage().nbytes()
        self._point_at_values()
        self.gradients: Tensor | None = None
        self.gradient: Tensor | None = None
        self._gradient_views: list[Tensor] = []
        self._gathering: dist.Work | None = None
        self.is_whole = True
        if self.is_scattered:
            self.own = self.own.clone() if dtype is not torch.float32 else self.master
            self.free()

    def _master(self, first: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        if dtype is not torch.float32:
            return first[self.low : self.high].to(device, copy=True)
        part = self.values[self.low : self.high]
        return part.clone() if self.is_scattered else part

    @property
    def is_scattered(self) -> bool:
        """Whether replicas keep but their part of the weights."""
        return self.replicas.sharding is Sharding.ZERO3

    @property
    def keeps_gradients(self) -> bool:
        """Whether whole gradients stay from one iteration to the next."""
        return self.replicas.sharding in {Sharding.NONE, Sharding.ZERO1}

    @property
    def held_tensors(self) -> list[Tensor]:
        """What lives between iterations."""
        held = [self.values, self.own, self.master, self.gradients, self.gradient]
        return [tensor for tensor in held if tensor is not None]

    def views(self, flat: Tensor) -> list[Tensor]:
        """The weights' parts of a flat buffer, in their shapes."""
        sizes = [weight.parameter.numel() for weight in self.weights]
        parts = torch.split(flat[: self.size], sizes)
        return [part.view(one.parameter.shape) for part, one in zip(parts, self.weights, strict=True)]

    def _point_at_values(self) -> None:
        for weight, view in zip(self.weights, self.views(self.values), strict=True):
            weight.parameter.data = view

    def begin(self) -> None:
        """An iteration begins: no gradients yet."""
        self.gradient = None
        if self.gradients is not None:
            self.gradients.zero_()

    def expect(self) -> None:
        """Backwards are about to add to the gradients."""
        if self.gradients is not None:
            return
        self.gradients = torch.zeros(self.part * self.replicas.count, device=self.values.device)
        self._gradient_views = self.views(self.gradients)
        if self.adds_in_place:
            for weight, view in zip(self.weights, self._gradient_views, strict=True):
                weight.parameter.grad = view

    def collect(self, *, contributes: bool = True) -> None:
        """Add what a backward left in the parameters to the gradients, or drop it; autograd may have added it itself."""
        if self.adds_in_place:
            return
        for weight, view in zip(self.weights, self._gradient_views, strict=True):
            gradient, weight.parameter.grad = weight.parameter.grad, None
            if gradient is not None and contributes:
                view.add_(gradient)

    def release(self) -> None:
        """Let go of the whole gradients, unless they stay."""
        if self.keeps_gradients:
            return
        self.gradients, self._gradient_views = None, []
        for weight in self.weights:
            weight.parameter.grad = None

    def take_whole(self) -> None:
        """The summed gradients are whole here: keep this replica's part of them."""
        if self.gradients is None:
            raise RuntimeError("there are no gradients to keep a part of")
        part = self.gradients[self.low : self.high]
        self.gradient = part if self.keeps_gradients else part.clone()
        self.release()

    def gather(self) -> None:
        """Begin to collect the weights from all replicas, where they are scattered."""
        if self.is_whole or self._gathering is not None:
            return
        self.values.untyped_storage().resize_(self._bytes)
        self._gathering = present(
            dist.all_gather_single(self.values, self.own, group=self.replicas.group, async_op=True)
        )

    def wait(self) -> None:
        """Until the weights are whole."""
        self.gather()
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering, self.is_whole = None, True

    def free(self) -> None:
        """Let go of the other replicas' parts of the weights, where they are scattered."""
        if self.is_scattered:
            if self._gathering is not None:
                self._gathering.wait()
                self._gathering = None
            self.values.untyped_storage().resize_(0)
            self.is_whole = False

    @property
    def is_published(self) -> bool:
        """Whether replicas collect from each other what each of them has updated."""
        return self.replicas.sharding in {Sharding.ZERO1, Sharding.ZERO2}

    def publish(self) -> None:
        """The optimizer has updated `master`: bring the update to where layers read it, on every replica."""
        if self.own.data_ptr() != self.master.data_ptr():
            self.own.copy_(self.master)
        if self.is_published:
            dist.all_gather_single(self.values, self.own.clone(), group=self.replicas.group)
