"""Gradient reduction over replicas, over pipelines, and over the owners of a tied weight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright.rank_layout import slices_of
from trainwright.strategy import Sharding
from trainwright_worker.executor.boundary_exchange import require_work
from trainwright_worker.executor.flat_parameter import FlatParameter, Weight
from trainwright_worker.executor.parameter_groups import ParameterGroup, TiedParameterGroup
from trainwright_worker.executor.plan_ranks import RunRanks
from trainwright_worker.executor.process_groups import ProcessGroups, reduce_scatter_single
from trainwright_worker.initial_weights import part_start

MAX_MESSAGE_BYTES = 25 * 2**20
"""Largest message that is copied from gradients, as the largest bucket of torch's DistributedDataParallel."""

SliceGroups = Mapping[int, dist.ProcessGroup | None]
"""Ranks that reduce each slice that this rank holds, by the slice's number; None for a single rank."""


class Reduction(ABC):
    """Reduction of one flat parameter's gradients. All ranks of the plan run their reductions in the same order.

    Attributes:
        overlaps_backward: whether `start` may be called as soon as the parameter's last backward is done.
    """

    def __init__(self, flat_parameter: FlatParameter, *, overlaps_backward: bool = False) -> None:
        self.flat_parameter = flat_parameter
        self.overlaps_backward = overlaps_backward
        self._work: dist.Work | None = None

    @abstractmethod
    def start(self) -> None:
        """Start, without waiting if it overlaps the backward; `gradient_shard` then holds, or will hold, the result."""

    def wait(self) -> None:
        """Wait for what `start` began, and free unsharded gradients that are no longer needed."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            self.flat_parameter.release_full_gradients()

    def finish(self) -> None:
        """Complete the reduction; afterwards `gradient_shard` is the whole batch's gradient."""
        if self.flat_parameter.gradient_shard is None:
            self.start()
        self.wait()


def make_reduction(
    parameter_group: ParameterGroup, flat_parameter: FlatParameter, run: RunRanks, rank: int, groups: ProcessGroups
) -> Reduction:
    """Return the reduction of a parameter group on a rank whose pipeline holds it in `run`."""
    partial = _PartialReduction(flat_parameter, groups.group_of(run.tensor_group_ranks(rank)))
    if not parameter_group.has_uniform_partition:
        numbers = slices_of(run, rank, parameter_group.slice_count)
        by_slice = {number: groups.group_of(parameter_group.slice_ranks(number)) for number in numbers}
        return _SliceAllReduction(flat_parameter, partial, by_slice, parameter_group.slice_count)
    if parameter_group.is_sharded:
        peer_group = groups.group_of(parameter_group.peer_ranks(run, rank)) if len(parameter_group.runs) > 1 else None
        return _ReduceScatter(flat_parameter, partial, peer_group, overlaps_backward=parameter_group.overlaps_backward)
    group = groups.group_of(parameter_group.slice_ranks(run.position_of(rank).tensor_rank))
    return _AllReduction(flat_parameter, partial, group, overlaps_backward=parameter_group.overlaps_backward)


def make_mesh_reduction(
    flat_parameter: FlatParameter,
    group: dist.ProcessGroup | None,
    peers: dist.ProcessGroup | None,
    *,
    overlaps_backward: bool,
) -> Reduction:
    """Return the reduction of gradients of a mesh.

    Args:
        flat_parameter: weights that are kept alike.
        group: ranks of all pipelines that have a summand each; None if this rank has all of it.
        peers: ranks of all pipelines with this rank's shard; None in a plan of one pipeline. Backwards of pipelines end at
            different times, so that no all-reduce over them overlaps one.
        overlaps_backward: whether gradients may be reduced during the last backward.
    """
    partial, overlaps = _PartialReduction(flat_parameter, None), overlaps_backward and group is not None
    if flat_parameter.shard_group.sharding is not Sharding.NONE:
        return _ReduceScatter(flat_parameter, partial, peers, overlaps_backward=overlaps)
    return _AllReduction(flat_parameter, partial, group, overlaps_backward=overlaps and peers is None)


class _PartialReduction:
    """All-reduce over a tensor group of gradients whose summands its ranks hold."""

    def __init__(self, flat_parameter: FlatParameter, group: dist.ProcessGroup | None) -> None:
        self._flat_parameter, self._group = flat_parameter, group
        self._partial_indices = [
            place for place, weight in enumerate(flat_parameter.weights) if weight.has_partial_gradient
        ]

    def sum(self) -> None:
        views = self._flat_parameter.gradient_views
        if self._group is None or not self._partial_indices or not views:
            return
        packed = torch.cat([views[place].flatten() for place in self._partial_indices])
        dist.all_reduce(packed, group=self._group)
        _unpack(packed, [views[place] for place in self._partial_indices])


class _AllReduction(Reduction):
    """All-reduce of the flat gradients over all ranks with the same tensor slice of the weights."""

    def __init__(
        self,
        flat_parameter: FlatParameter,
        partial: _PartialReduction,
        group: dist.ProcessGroup | None,
        *,
        overlaps_backward: bool,
    ) -> None:
        super().__init__(flat_parameter, overlaps_backward=overlaps_backward)
        self._partial, self._group = partial, group

    def start(self) -> None:
        self.flat_parameter.ensure_gradients()
        self._partial.sum()
        self.flat_parameter.keep_gradient_shard()
        if self._group is not None:
            gradients = self.flat_parameter.full_gradients
            self._work = require_work(dist.all_reduce(gradients, group=self._group, async_op=True))


class _ReduceScatter(Reduction):
    """Reduce-scatter over the replicas, then all-reduce of the shards over the pipelines."""

    def __init__(
        self,
        flat_parameter: FlatParameter,
        partial: _PartialReduction,
        peer_group: dist.ProcessGroup | None,
        *,
        overlaps_backward: bool = False,
    ) -> None:
        super().__init__(flat_parameter, overlaps_backward=overlaps_backward)
        self._partial, self._peer_group = partial, peer_group

    def start(self) -> None:
        flat_parameter = self.flat_parameter
        flat_parameter.ensure_gradients()
        if flat_parameter.full_gradients is None:
            return
        self._partial.sum()
        flat_parameter.gradient_shard = torch.empty_like(flat_parameter.master_shard, dtype=torch.float32)
        self._work = require_work(
            reduce_scatter_single(
                flat_parameter.gradient_shard,
                flat_parameter.full_gradients,
                group=flat_parameter.shard_group.group,
                async_op=True,
            )
        )

    def finish(self) -> None:
        super().finish()
        if self._peer_group is not None:
            dist.all_reduce(self.flat_parameter.gradient_shard, group=self._peer_group)


class _SliceAllReduction(Reduction):
    """All-reduce of each slice (finest equal part) of the weights, for pipelines that partition them differently.

    A rank that holds several slices takes part in several all-reduces. Unsplit weights are part of each slice's message,
    so that every rank gets them. A rank of a sharding pipeline keeps its shard afterwards.
    """

    def __init__(
        self, flat_parameter: FlatParameter, partial: _PartialReduction, groups: SliceGroups, slice_count: int
    ) -> None:
        super().__init__(flat_parameter)
        self._partial, self._groups, self._slice_count = partial, groups, slice_count
        self._messages = tuple(_messages(flat_parameter.weights, slice_count))

    def start(self) -> None:
        flat_parameter = self.flat_parameter
        flat_parameter.ensure_gradients()
        if flat_parameter.full_gradients is None:
            return
        self._partial.sum()
        slices = [self._slice(flat_parameter.gradient_views, number) for number in self._groups]
        for message in self._messages:
            self._reduce([[part.of(slice_) for part in message] for slice_ in slices])
        flat_parameter.keep_gradient_shard()

    def _reduce(self, parts: list[list[Tensor]]) -> None:
        """Reduce the same part of every slice. None is written before all are copied: unsplit weights are in each."""
        messages = [torch.cat([piece.flatten() for piece in part]) for part in parts]
        for message, group in zip(messages, self._groups.values(), strict=True):
            if group is not None:
                dist.all_reduce(message, group=group)
        for message, part in zip(messages, parts, strict=True):
            _unpack(message, part)

    def _slice(self, views: list[Tensor], number: int) -> list[Tensor]:
        first = min(self._groups)
        return [
            weight.narrow(view, number, self._slice_count, first)
            for view, weight in zip(views, self.flat_parameter.weights, strict=True)
        ]


@dataclass(frozen=True)
class TiedPart:
    """Part of a tied weight that a rank holds in a run."""

    flat_parameter: FlatParameter
    run: RunRanks


def make_tied_reduction(
    tied_group: TiedParameterGroup, parts: Sequence[TiedPart], rank: int, groups: ProcessGroups
) -> Reduction:
    """Return the reduction of a tied weight on a rank that holds parts of it: several if its runs divide it differently."""
    if tied_group.meets_mesh:
        shards = [(part, part.run.tensor_shard(rank), part.flat_parameter.weights[0]) for part in parts]
        pairs = [(part.flat_parameter, (part_start(weight.full_shape[0], *shard), 0)) for part, shard, weight in shards]
        group = groups.group_of(tied_group.reduction_group_of(rank))
        return FullTiedReduction(pairs, shards[0][2].full_shape, group)
    if tied_group.reduces_by_slice:
        numbers = sorted({number for part in parts for number in slices_of(part.run, rank, tied_group.slice_count)})
        by_slice = {number: groups.group_of(tied_group.slice_ranks(number)) for number in numbers}
        slices: dict[int, list[tuple[FlatParameter, int]]] = {number: [] for number in numbers}
        for part in parts:
            own = slices_of(part.run, rank, tied_group.slice_count)
            for number in own:
                slices[number].append((part.flat_parameter, own.start))
        return _TiedSliceAllReduction(slices, by_slice, tied_group.slice_count)
    flat_parameter = parts[0].flat_parameter
    sharding_run = next((run for run in tied_group.sharding_runs if rank in run.ranks), None)
    if sharding_run is None:
        return _OwnerAllReduction(flat_parameter, groups.group_of(tied_group.reduction_group_of(rank)))
    return _ReduceScatter(
        flat_parameter,
        _PartialReduction(flat_parameter, None),
        groups.group_of(tied_group.peer_ranks(sharding_run, rank)),
    )


class _OwnerAllReduction(Reduction):
    """All-reduce over the owners of a tied weight."""

    def __init__(self, flat_parameter: FlatParameter, group: dist.ProcessGroup | None) -> None:
        super().__init__(flat_parameter)
        self._group = group

    def start(self) -> None:
        self.flat_parameter.ensure_gradients()
        if self._group is not None and self.flat_parameter.full_gradients is not None:
            # Exclude the padding: owners may shard the weight differently.
            dist.all_reduce(self.flat_parameter.full_gradients[: self.flat_parameter.size], group=self._group)
        self.flat_parameter.keep_gradient_shard()


class _TiedSliceAllReduction(Reduction):
    """All-reduce of each slice of a tied weight over its owners, which divide the weight by different tensor degrees.

    Args:
        slices: the flat parameters of this rank that have a slice, each with its own first slice.
        groups: owners of each of these slices.
        slice_count: number of slices of the full weight.
    """

    def __init__(
        self, slices: Mapping[int, Sequence[tuple[FlatParameter, int]]], groups: SliceGroups, slice_count: int
    ) -> None:
        self._parts = list(dict.fromkeys(part for parts in slices.values() for part, _ in parts))
        super().__init__(self._parts[0])
        self._slices, self._groups, self._slice_count = slices, groups, slice_count
        self._messages = tuple(_messages(self.flat_parameter.weights, slice_count))

    def start(self) -> None:
        for part in self._parts:
            part.ensure_gradients()
        for number, group in self._groups.items():
            pieces = [self._piece(part, number, first) for part, first in self._slices[number]]
            for (part_of_slice,) in self._messages:
                summands = [part_of_slice.of([piece]) for piece in pieces]
                total = torch.stack(summands).sum(0)
                if group is not None:
                    dist.all_reduce(total, group=group)
                for summand in summands:
                    summand.copy_(total)
        for part in self._parts:
            part.keep_gradient_shard()

    def _piece(self, part: FlatParameter, number: int, first: int) -> Tensor:
        return part.weights[0].narrow(part.gradient_views[0], number, self._slice_count, first)


class FullTiedReduction(Reduction):
    """All-reduce of all of a tied weight over its owners, which have any rectangles of it, a few of its rows at a time.

    Args:
        parts: the flat parameters of this rank that hold a part, each with the first entry of its part in each dimension.
        full_shape: shape of the weight, a matrix.
    """

    def __init__(
        self,
        parts: Sequence[tuple[FlatParameter, tuple[int, ...]]],
        full_shape: tuple[int, ...],
        group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__(parts[0][0])
        self._parts, self._full_shape, self._group = parts, full_shape, group

    def start(self) -> None:
        for part, _ in self._parts:
            part.ensure_gradients()
        entries, width = self._full_shape
        rows = max(MAX_MESSAGE_BYTES // (width * torch.float32.itemsize), 1)
        device = self.flat_parameter.full_values.device
        for first in range(0, entries, rows):
            total = torch.zeros(min(rows, entries - first), width, device=device)
            pairs = [(self._rows_of(*part, first, len(total)), part[1]) for part in self._parts]
            for (own, start), offsets in pairs:
                total[start : start + len(own), offsets[1] : offsets[1] + own.shape[1]] += own
            if self._group is not None:
                dist.all_reduce(total, group=self._group)
            for (own, start), offsets in pairs:
                own.copy_(total[start : start + len(own), offsets[1] : offsets[1] + own.shape[1]])
        for part, _ in self._parts:
            part.keep_gradient_shard()

    @staticmethod
    def _rows_of(part: FlatParameter, offsets: tuple[int, ...], first: int, count: int) -> tuple[Tensor, int]:
        """Return a view of a part's gradients among `count` rows of the weight, and where among them it begins."""
        view = part.gradient_views[0]
        low = min(max(first - offsets[0], 0), len(view))
        high = min(max(first + count - offsets[0], 0), len(view))
        return view[low:high], max(offsets[0] + low - first, 0)


@dataclass(frozen=True, slots=True)
class _MessagePart:
    """Part of each slice of a weight: the `number`-th of `count` equal parts of a dimension."""

    place: int
    dimension: int
    number: int
    count: int

    def of(self, slice_: Sequence[Tensor]) -> Tensor:
        """Return a view of the part of the weights' slices."""
        whole = slice_[self.place]
        if self.count == 1:
            return whole
        length = whole.size(self.dimension)
        start, stop = (part_start(length, number, self.count) for number in (self.number, self.number + 1))
        return whole.narrow(self.dimension, start, stop - start)


def _messages(weights: Sequence[Weight], slice_count: int) -> Iterator[tuple[_MessagePart, ...]]:
    """Yield the parts of each slice that are reduced together: several small weights, or a part of a large one.

    They depend on the full weights alone, so that ranks that hold different parts of them agree.
    """
    message: list[_MessagePart] = []
    message_bytes = 0.0
    for place, weight in enumerate(weights):
        slices = 1 if weight.split_dimension is None else slice_count
        slice_bytes = prod(weight.full_shape) / slices * torch.float32.itemsize
        dimension, count = _parting(weight, slices, slice_bytes) if slice_bytes > MAX_MESSAGE_BYTES else (0, 1)
        for number in range(count):
            if message and message_bytes + slice_bytes / count > MAX_MESSAGE_BYTES:
                yield tuple(message)
                message, message_bytes = [], 0.0
            message.append(_MessagePart(place, dimension, number, count))
            message_bytes += slice_bytes / count
    yield tuple(message)


def _parting(weight: Weight, slices: int, slice_bytes: float) -> tuple[int, int]:
    """Return the longest dimension of a weight's slices, by which large ones are parted, and the number of parts."""
    lengths = [
        length // (slices if dimension == weight.split_dimension else 1)
        for dimension, length in enumerate(weight.full_shape)
    ]
    length = max(lengths)
    most = max(int(MAX_MESSAGE_BYTES * length / slice_bytes), 1)
    return lengths.index(length), max(ceil(length / most), 1)


def _unpack(packed: Tensor, targets: list[Tensor]) -> None:
    for target, values in zip(targets, torch.split(packed, [target.numel() for target in targets]), strict=True):
        target.copy_(values.view(target.shape))
