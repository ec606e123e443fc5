"""Point-to-point exchange of boundaries (tensors between two layers) and their gradients with neighbouring stages."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright.model import Model
from trainwright.rank_layout import WHOLE, Interval, ShardIndex, Transfer, relayout_transfers
from trainwright.worker_api import FailureReason
from trainwright_worker.executor.message_batches import batch_send_receive
from trainwright_worker.executor.plan_ranks import PlanRanks, Ranks, RunRanks, transfers_between
from trainwright_worker.executor.process_groups import GroupKey, ProcessGroups, Purpose, all_gather_single
from trainwright_worker.gang.errors import WorkerError
from trainwright_worker.layers.layer import Boundary, dtype_name

GroupWith = Callable[[int], dist.ProcessGroup | None]
"""Returns the group of this rank and another one."""


FORMATS: Final = (torch.bool, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32)
"""Number formats of boundaries between stages."""


@dataclass(frozen=True, slots=True)
class BoundarySpec:
    """Tensors of a boundary: their shapes for one row, number formats and device.

    A message holds tensor after tensor: as values if all have one format, else as bytes.

    Attributes:
        formats: None of a user's model until a stage has computed it, since autocast decides then.
    """

    shapes: tuple[tuple[int, ...], ...]
    formats: tuple[torch.dtype, ...] | None
    device: torch.device

    @property
    def message_format(self) -> torch.dtype:
        formats = set(self._known_formats)
        return formats.pop() if len(formats) == 1 else torch.uint8

    @property
    def row_size(self) -> int:
        """Return the size of one row in a message, in elements of its format."""
        return sum(self._row_sizes)

    @property
    def _known_formats(self) -> tuple[torch.dtype, ...]:
        if self.formats is None:
            raise RuntimeError("the formats of this boundary are not known yet")
        return self.formats

    @property
    def _row_sizes(self) -> list[int]:
        """Size of each tensor's row in a message."""
        sizes = map(math.prod, self.shapes)
        if len(set(self._known_formats)) == 1:
            return list(sizes)
        return [size * dtype.itemsize for size, dtype in zip(sizes, self._known_formats, strict=True)]

    def slices(self, degree: int) -> BoundarySpec:
        """Return one of `degree` slices along the sequence, the first dimension of each shape."""
        return replace(self, shapes=tuple((sequence // degree, *rest) for sequence, *rest in self.shapes))

    @property
    def gradients(self) -> BoundarySpec:
        """Return the tensors of the boundary's gradient: those of floating-point formats."""
        pairs = zip(self.shapes, self._known_formats, strict=True)
        kept = tuple((shape, dtype) for shape, dtype in pairs if dtype.is_floating_point)
        return replace(self, shapes=tuple(shape for shape, _ in kept), formats=tuple(dtype for _, dtype in kept))

    def with_integers(self, gradients: Boundary, rows: int) -> Boundary:
        """Return the gradient with a tensor, which nobody reads, for each one of the boundary that has none."""
        given = iter(gradients)
        return tuple(
            next(given)
            if dtype.is_floating_point
            else torch.zeros((), dtype=dtype, device=self.device).expand(rows, *shape)
            for shape, dtype in zip(self.shapes, self._known_formats, strict=True)
        )

    def empty(self, count: int) -> Tensor:
        return torch.empty(count, dtype=self.message_format, device=self.device)

    def unflatten(self, pieces: Sequence[Tensor]) -> Boundary:
        """Return the tensors of consecutive rows, given by piece as `flatten_rows` returns them."""
        if not self.shapes:
            return ()
        by_piece = [self._tensors(piece) for piece in pieces]
        return by_piece[0] if len(pieces) == 1 else tuple(map(torch.cat, zip(*by_piece, strict=True)))

    def _tensors(self, piece: Tensor) -> Boundary:
        rows = piece.numel() // self.row_size
        parts = torch.split(piece, [rows * size for size in self._row_sizes])
        tensors = []
        for part, shape, dtype in zip(parts, self.shapes, self._known_formats, strict=True):
            aligned = part if part.dtype is dtype else part.clone().view(dtype)
            tensors.append(aligned.view(rows, *shape))
        return tuple(tensors)


def flatten_rows(boundary: Boundary, start: int, stop: int) -> Tensor:
    """Return the message of these rows; a view if the boundary is one contiguous tensor."""
    flat = [tensor[start:stop].reshape(-1).contiguous() for tensor in boundary]  # one that was expanded may stay so
    if len({tensor.dtype for tensor in flat}) > 1:
        flat = [tensor.view(torch.uint8) for tensor in flat]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def slice_size(count: int, part: ShardIndex) -> int:
    """Return the size of each slice of `count` values but the last, which may be shorter."""
    return -(-count // part[1])


def slice_interval(count: int, part: ShardIndex) -> Interval:
    """Return the start and stop of a slice of `count` values."""
    size = slice_size(count, part)
    return min(part[0] * size, count), min((part[0] + 1) * size, count)


class BoundaryReceiver:
    """Receiver of one boundary per micro-batch, assembled from the rows of several senders.

    Ranks of a tensor group that are sent slices all-gather them. Receives are posted ahead, since gloo moves a message only
    once its receiver has posted.

    Args:
        transfers: messages between the two stages, to all ranks of this one.
        own: run of the rank's stage that receives.
        gather_group: returns the group of the ranks that gather.
        sender: of the boundary whose gradient this rank receives, in its formats; None of one that receives boundaries.
    """

    def __init__(  # noqa: PLR0913, PLR0917 (both ends, and the groups between them)
        self,
        group_with: GroupWith,
        gather_group: Callable[[Ranks], dist.ProcessGroup | None],
        transfers: Sequence[Transfer[int]],
        own: RunRanks,
        rank: int,
        spec: BoundarySpec,
        sender: BoundarySender | None = None,
    ) -> None:
        self._group_with, self._sender = group_with, sender
        self._transfers = [transfer for transfer in transfers if transfer.target == rank]
        self._rows = sum(transfer.stop - transfer.start for transfer in self._transfers)
        self._set_spec(spec)
        self._sliced = [index for index, transfer in enumerate(self._transfers) if transfer.part != WHOLE]
        self._posted: list[tuple[list[Tensor], list[dist.Work]]] = []
        if self._sliced:
            ranks = own.node_ranks(rank)
            self._gather_group = gather_group(tuple(sorted(ranks)))
            self._slice_order = [sorted(ranks).index(member) for member in ranks]

    def post_receive(self) -> None:
        """Post the receives of the next micro-batch's boundary. The first one of a user's model waits for its formats."""
        if self._boundary_spec.formats is None:
            formats = self._receive_formats() if self._sender is None else self._sender.formats
            self._set_spec(replace(self._boundary_spec, formats=formats))
        buffers, operations = [], []
        for transfer, count in zip(self._transfers, self._counts, strict=True):
            start, stop = slice_interval(count, transfer.part)
            buffers.append(self._spec.empty(slice_size(count, transfer.part)))
            received = buffers[-1][: stop - start]
            operations.append(dist.P2POp(dist.irecv, received, transfer.source, self._group_with(transfer.source)))
        self._posted.append((buffers, _start_messages(operations)))

    def _set_spec(self, spec: BoundarySpec) -> None:
        """Set the boundary and, once its formats are known, what messages hold of it and their sizes."""
        self._boundary_spec = spec
        if spec.formats is not None:
            self._spec = spec if self._sender is None else spec.gradients
            self._counts = [(transfer.stop - transfer.start) * self._spec.row_size for transfer in self._transfers]

    def _receive_formats(self) -> tuple[torch.dtype, ...]:
        """Return the formats that every sender states before its first message."""
        sources, tensors = (
            list(dict.fromkeys(transfer.source for transfer in self._transfers)),
            len(self._boundary_spec.shapes),
        )
        codes = torch.zeros(len(sources), tensors, dtype=torch.int64, device=self._boundary_spec.device)
        pairs = zip(codes, sources, strict=True)
        operations = [dist.P2POp(dist.irecv, own, source, self._group_with(source)) for own, source in pairs]
        for work in _start_messages(operations):
            work.wait()
        return tuple(FORMATS[code] for code in codes[0].tolist())

    def wait_for_next(self) -> tuple[Boundary, float]:
        """Return the boundary posted first, and the seconds waited for it."""
        pieces, works = self._posted.pop(0)
        wait_start = time.perf_counter()
        for work in works:
            work.wait()
        if self._sliced:
            self._gather(pieces)
        waited = time.perf_counter() - wait_start
        boundary = self._spec.unflatten(pieces)
        if self._sender is not None:
            boundary = self._boundary_spec.with_integers(boundary, self._rows)
        return boundary, waited

    def _gather(self, pieces: list[Tensor]) -> None:
        """Replace this rank's slices of pieces by the pieces, in one all-gather."""
        sizes = [pieces[index].numel() for index in self._sliced]
        own = pieces[self._sliced[0]] if len(sizes) == 1 else torch.cat([pieces[index] for index in self._sliced])
        stacked = own.new_empty(len(self._slice_order), own.numel())
        all_gather_single(stacked.view(-1), own, group=self._gather_group)
        if self._slice_order != sorted(self._slice_order):
            stacked = stacked[self._slice_order]
        for index, slices in zip(self._sliced, torch.split(stacked, sizes, 1), strict=True):
            pieces[index] = slices.reshape(-1)[: self._counts[index]]


class BoundarySender:
    """Asynchronous sender of one boundary per micro-batch.

    Gloo reports a send as done only when waited for, so sent values are kept until `wait_for_sends`, which is called once
    the receiver is known to have them.

    Args:
        transfers: messages between the two stages, of all ranks of this one.
        own: run of the rank's stage that sends.
        spec: every boundary that is sent; None of gradients, whose integer tensors are not sent.
        layer: name of the layer that returns the boundary, for errors.
    """

    def __init__(  # noqa: PLR0913, PLR0917 (as of a receiver)
        self,
        group_with: GroupWith,
        transfers: Sequence[Transfer[int]],
        own: RunRanks,
        rank: int,
        spec: BoundarySpec | None = None,
        layer: str = "",
    ) -> None:
        self._first_row, end = own.row_interval_of(rank)
        self._rows = end - self._first_row
        self._group_with, self._spec, self._layer = group_with, spec, layer
        self._transfers = [transfer for transfer in transfers if transfer.source == rank]
        self._sent: dict[int, tuple[list[Tensor], list[dist.Work]]] = {}

    @property
    def formats(self) -> tuple[torch.dtype, ...] | None:
        """Return the formats of the boundary; None until one of a user's model has been sent."""
        return None if self._spec is None else self._spec.formats

    def send(self, micro_batch: int, boundary: Boundary) -> None:
        """Start to send a boundary. Raises WorkerError if it has not the shapes and formats that receivers expect."""
        detached = tuple(tensor.detach() for tensor in boundary)
        operations = []
        if self._spec is None:
            detached = tuple(tensor for tensor in detached if tensor.is_floating_point())
        else:
            self._check(self._spec, detached)
            if self._spec.formats is None:
                self._spec = replace(self._spec, formats=tuple(tensor.dtype for tensor in detached))
                operations = self._format_messages(self._spec)
        pieces: dict[Interval, Tensor] = {}
        for transfer in self._transfers if detached else ():
            rows = transfer.start - self._first_row, transfer.stop - self._first_row
            if rows not in pieces:
                pieces[rows] = flatten_rows(detached, *rows)
            start, stop = slice_interval(pieces[rows].numel(), transfer.part)
            sent = pieces[rows][start:stop]
            operations.append(dist.P2POp(dist.isend, sent, transfer.target, self._group_with(transfer.target)))
        self._sent[micro_batch] = [operation.tensor for operation in operations], _start_messages(operations)

    def _check(self, spec: BoundarySpec, boundary: Boundary) -> None:
        formats = tuple(tensor.dtype for tensor in boundary)
        shapes = tuple(tuple(tensor.shape) for tensor in boundary)
        expected = tuple((self._rows, *shape) for shape in spec.shapes)
        if shapes != expected:
            what = f"returns tensors of shape {_listed(shapes)} for {self._rows} rows, but {_listed(expected)} when it was probed"
        elif spec.formats is not None and formats != spec.formats:
            what = f"returns {_named(formats)}, but {_named(spec.formats)} before"
        elif spec.formats is None and not set(formats) <= set(FORMATS):
            what = f"returns {_named(formats)}, but between stages only {_named(FORMATS)} can pass"
        else:
            return
        message = f"{self._layer} {what}; it must return the same shapes and formats in every iteration"
        raise WorkerError(FailureReason.CRASHED, message)

    def _format_messages(self, spec: BoundarySpec) -> list[dist.P2POp]:
        """Return messages that state the formats to every receiver."""
        codes = torch.tensor([FORMATS.index(dtype) for dtype in spec.formats or ()], device=spec.device)
        targets = dict.fromkeys(transfer.target for transfer in self._transfers)
        return [dist.P2POp(dist.isend, codes, target, self._group_with(target)) for target in targets]

    def wait_for_sends(self, micro_batches: Sequence[int]) -> None:
        """Wait for unfinished sends of these micro-batches, and free their values."""
        for micro_batch in micro_batches:
            _, works = self._sent.pop(micro_batch, ([], []))
            for work in works:
                work.wait()

    def wait_for_all_sends(self) -> None:
        """Wait for all unfinished sends."""
        self.wait_for_sends(tuple(self._sent))


def _named(formats: Iterable[torch.dtype]) -> str:
    return ", ".join(map(dtype_name, formats))


def _listed(shapes: Iterable[tuple[int, ...]]) -> str:
    return " and ".join(f"({', '.join(map(str, shape))})" for shape in shapes)


def _start_messages(operations: Iterable[dist.P2POp]) -> list[dist.Work]:
    """Start messages, each in a batch of its own: all go to or come from different ranks; empty slices are left out."""
    return [
        work for operation in operations if operation.tensor.numel() for work in dist.batch_isend_irecv([operation])
    ]


class RowRelayout:
    """Relayout of a boundary's rows between two runs of a stage with different layouts; all ranks of the stage take part."""

    def __init__(self, group: dist.ProcessGroup | None, old: RunRanks, new: RunRanks, rank: int) -> None:
        self._group, self._rank = group, rank
        self._old, self._new = old.row_interval_of(rank), new.row_interval_of(rank)
        transfers = relayout_transfers(old, new, old.node_of.__getitem__)
        self._sends = [transfer for transfer in transfers if transfer.source == rank and transfer.target != rank]
        self._receives = [transfer for transfer in transfers if transfer.target == rank]

    def relayout(self, boundary: Boundary) -> Boundary:
        rows = self._new[1] - self._new[0]
        relaid: list[Tensor] = []
        operations: list[dist.P2POp] = []
        for tensor_before in boundary:
            tensor = tensor_before.detach()
            target = tensor.new_empty((rows, *tensor.shape[1:]))
            for piece in self._receives:
                part = target[piece.start - self._new[0] : piece.stop - self._new[0]]
                if piece.source == self._rank:
                    part.copy_(tensor[piece.start - self._old[0] : piece.stop - self._old[0]])
                else:
                    operations.append(dist.P2POp(dist.irecv, part, piece.source, self._group))
            for piece in self._sends:
                part = tensor[piece.start - self._old[0] : piece.stop - self._old[0]].contiguous()
                operations.append(dist.P2POp(dist.isend, part, piece.target, self._group))
            relaid.append(target)
        batch_send_receive(operations)
        return tuple(relaid)


def require_work(work: dist.Work | None) -> dist.Work:
    """Return the work handle. Raises RuntimeError if this rank is not in the group."""
    if work is None:
        raise RuntimeError("this rank is not in the group of the message")
    return work


@dataclass(frozen=True)
class BoundaryExchange:
    """Receivers and senders of a rank; None if there is no previous or next stage."""

    activation_receiver: BoundaryReceiver | None = None
    activation_sender: BoundarySender | None = None
    gradient_receiver: BoundaryReceiver | None = None
    gradient_sender: BoundarySender | None = None

    @classmethod
    def of(
        cls,
        plan_ranks: PlanRanks,
        rank: int,
        groups: ProcessGroups,
        model: Model,
        boundary_spec_after: Callable[[int], BoundarySpec],
    ) -> BoundaryExchange:
        """Return a rank's receivers and senders; `boundary_spec_after` gives the whole boundary after a layer."""
        stage = plan_ranks.stage_of(rank)
        stages = plan_ranks.pipelines[stage.pipeline]
        first, last = stage.runs[0], stage.runs[-1]

        def boundaries_with(peer: int) -> dist.ProcessGroup | None:
            return groups.group_of((min(rank, peer), max(rank, peer)), Purpose.BOUNDARIES)

        def gradients_with(peer: int) -> dist.ProcessGroup | None:
            return groups.group_of((min(rank, peer), max(rank, peer)), Purpose.BOUNDARY_GRADIENTS)

        divided_boundaries = plan_ranks.divided_boundaries(stage, model)

        def spec_after(layer: int, run: RunRanks) -> BoundarySpec:
            spec = boundary_spec_after(layer)
            return spec.slices(run.arrangement.tensor) if layer in divided_boundaries else spec

        activation_receiver = activation_sender = gradient_receiver = gradient_sender = None
        if stage.index > 0:
            previous_run = stages[stage.index - 1].runs[-1]
            received, sent = (
                transfers_between(*ends, model) for ends in ((previous_run, first), (first, previous_run))
            )
            spec = spec_after(stage.first - 1, first)
            activation_receiver = BoundaryReceiver(boundaries_with, groups.group_of, received, first, rank, spec)
            gradient_sender = BoundarySender(gradients_with, sent, first, rank)
        if stage.index + 1 < len(stages):
            next_run = stages[stage.index + 1].runs[0]
            received, sent = (transfers_between(*ends, model) for ends in ((next_run, last), (last, next_run)))
            spec = spec_after(stage.end - 1, last)
            layer = f"layer {stage.end - 1} ({model.layers[stage.end - 1]})"
            activation_sender = BoundarySender(boundaries_with, sent, last, rank, spec, layer)
            gradient_receiver = BoundaryReceiver(
                gradients_with, groups.group_of, received, last, rank, spec, activation_sender
            )
        return cls(activation_receiver, activation_sender, gradient_receiver, gradient_sender)

    @staticmethod
    def warm_up(
        needed: Sequence[GroupKey], rank: int, groups: ProcessGroups, device: torch.device, beat: Callable[[str], None]
    ) -> None:
        """Connect the ranks that exchange messages, in one order; all ranks of the plan call this.

        NCCL's first call in a group blocks until all members make it, and the first message of a pair blocks its process
        until the peer's. In a relayout some have no message, and within a schedule, which posts receives ahead, ranks could
        wait for each other in a cycle.
        """
        token = torch.zeros(2, device=device)
        for key in needed:
            if key.purpose is Purpose.COLLECTIVES or rank not in key.ranks:
                continue
            beat(f"connecting ranks {', '.join(map(str, key.ranks))} for {key.purpose.value}")
            group = groups.group_of(key.ranks, key.purpose)
            if len(key.ranks) == 2:
                peer = sum(key.ranks) - rank
                sending = dist.P2POp(dist.isend, token[:1], peer, group)
                batch_send_receive([sending, dist.P2POp(dist.irecv, token[1:], peer, group)])
            else:
                dist.all_reduce(token, group=group)

    def wait_for_sends(self) -> None:
        """Wait for all unfinished sends."""
        for sender in (self.activation_sender, self.gradient_sender):
            if sender is not None:
                sender.wait_for_all_sends()
