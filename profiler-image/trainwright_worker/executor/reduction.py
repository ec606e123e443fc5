"""Sums of gradients: over the replicas of a run, over all pipelines slice by slice, and over the owners of a shared weight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright_worker.executor.groups import Groups
from trainwright_worker.executor.mesh import RunMesh
from trainwright_worker.executor.messages import present
from trainwright_worker.executor.unit import Unit
from trainwright_worker.executor.units import BY_LAYER, SharedSpan, Span


class Reduction(ABC):
    """How one unit's gradients are summed. All ranks of the plan go through their reductions in the same order.

    Attributes:
        is_beside_backward: whether `start` may be called as soon as the unit's last backward is done.
    """

    is_beside_backward = False

    def __init__(self, unit: Unit) -> None:
        self.unit = unit

    def start(self) -> None:  # noqa: B027 (most reductions have nothing to do before the last backward is over)
        """Begin without waiting."""

    def settle(self) -> None:  # noqa: B027
        """Until what `start` began is done."""

    @abstractmethod
    def finish(self) -> None:
        """Sum; afterwards the unit's `gradient` is that of the whole batch."""


def reduction_of(span: Span, unit: Unit, run: RunMesh, rank: int, groups: Groups) -> Reduction:
    """The reduction of a span's unit on a rank, whose pipeline holds it in `run`."""
    place = run.position(rank)
    partial = _Partial(unit, groups.of(run.replica_ranks(rank)))
    if not span.is_alike:
        parts = span.slices // run.tensor
        numbers = range(place.tensor * parts, (place.tensor + 1) * parts)
        return _OfSlices(unit, partial, [groups.of(span.slice_ranks(number)) for number in numbers])
    if span.is_sharded:
        twins = groups.of(span.twins(run, rank)) if len(span.holders) > 1 else None
        return _Scattered(unit, partial, run, twins)
    return _Whole(unit, partial, groups.of(span.slice_ranks(place.tensor)))


class _Partial:
    """Sums, over a tensor group, the gradients of which each of its ranks has a part."""

    def __init__(self, unit: Unit, group: dist.ProcessGroup | None) -> None:
        self._unit, self._group = unit, group
        self._places = [place for place, weight in enumerate(unit.weights) if weight.is_partial]

    def sum(self) -> None:
        gradients = self._unit.gradients
        if self._group is None or not self._places or gradients is None:
            return
        views = self._unit.views(gradients)
        packed = torch.cat([views[place].flatten() for place in self._places])
        dist.all_reduce(packed, group=self._group)
        _unpack(packed, [views[place] for place in self._places])


class _Whole(Reduction):
    """One all-reduce of the flat gradients, over all ranks that hold the same part of the weights."""

    def __init__(self, unit: Unit, partial: _Partial, group: dist.ProcessGroup | None) -> None:
        super().__init__(unit)
        self._partial, self._group = partial, group

    def finish(self) -> None:
        self.unit.expect()
        self._partial.sum()
        if self._group is not None:
            dist.all_reduce(self.unit.gradients, group=self._group)
        self.unit.take_whole()


class _Scattered(Reduction):
    """A reduce-scatter over the replicas, then an all-reduce of the parts over the pipelines."""

    def __init__(self, unit: Unit, partial: _Partial, run: RunMesh, twins: dist.ProcessGroup | None) -> None:
        super().__init__(unit)
        self._partial, self._twins = partial, twins
        self.is_beside_backward = run.sharding in BY_LAYER
        self._work: dist.Work | None = None

    def start(self) -> None:
        unit = self.unit
        unit.expect()
        if unit.gradients is None:
            return
        self._partial.sum()
        unit.gradient = torch.empty_like(unit.master, dtype=torch.float32)
        self._work = present(
            dist.reduce_scatter_single(unit.gradient, unit.gradients, group=unit.replicas.group, async_op=True)
        )

    def settle(self) -> None:
        """Until the parts are summed over the replicas; whole gradients that nobody needs any more are let go."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            self.unit.release()

    def finish(self) -> None:
        if self.unit.gradient is None:
            self.start()
        self.settle()
        if self._twins is not None:
            dist.all_reduce(self.unit.gradient, group=self._twins)


class _OfSlices(Reduction):
    """One all-reduce for every finest slice of the weights, where pipelines divide them differently.

    A rank that holds several slices takes part in several sums. Weights that no tensor degree divides are part of
    each slice's message, so that every rank gets them. Where a pipeline shards, it keeps its part afterwards.
    """

    def __init__(self, unit: Unit, partial: _Partial, groups: Sequence[dist.ProcessGroup | None]) -> None:
        super().__init__(unit)
        self._partial, self._groups = partial, groups
        self._parts = len(groups)

    def finish(self) -> None:
        unit = self.unit
        unit.expect()
        if unit.gradients is None:
            return
        self._partial.sum()
        views = unit.views(unit.gradients)
        pieces = [self._slice(views, part) for part in range(self._parts)]
        messages = [torch.cat([piece.flatten() for piece in slice_]) for slice_ in pieces]
        for message, group in zip(messages, self._groups, strict=True):
            if group is not None:
                dist.all_reduce(message, group=group)
        for message, slice_ in zip(messages, pieces, strict=True):
            _unpack(message, slice_)
        unit.take_whole()

    def _slice(self, views: list[Tensor], part: int) -> list[Tensor]:
        return [
            view if weight.split is None else view.chunk(self._parts, weight.split)[part]
            for view, weight in zip(views, self.unit.weights, strict=True)
        ]


def shared_reduction_of(shared: SharedSpan, unit: Unit, rank: int, groups: Groups) -> Reduction:
    """The reduction of a shared weight on a rank that holds it."""
    home = next((one for one in shared.homes if rank in one.ranks), None)
    if home is None:
        return _OfOwners(unit, groups.of(shared.group_of(rank)))
    return _Scattered(unit, _Partial(unit, None), home, groups.of(shared.twins(home, rank)))


class _OfOwners(Reduction):
    """One all-reduce over the owners of a weight that several layers hold."""

    def __init__(self, unit: Unit, group: dist.ProcessGroup | None) -> None:
        super().__init__(unit)
        self._group = group

    def finish(self) -> None:
        self.unit.expect()
        if self._group is not None and self.unit.gradients is not None:
            # Not the padding: owners may share the weight out in different ways.
            dist.all_reduce(self.unit.gradients[: self.unit.size], group=self._group)
        self.unit.take_whole()


def _unpack(packed: Tensor, targets: list[Tensor]) -> None:
    start = 0
    for target in targets:
        target.copy_(packed[start : start + target.numel()].view(target.shape))
        start += target.numel()
