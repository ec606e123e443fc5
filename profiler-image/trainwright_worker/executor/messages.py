"""What crosses a stage's boundary: tensors that arrive from and leave for other ranks, piece by piece."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright_worker.executor.mesh import Transfer
from trainwright_worker.layers.layer import Boundary


@dataclass(frozen=True, slots=True)
class Form:
    """The tensors of a boundary: their shapes of one row, and their number format."""

    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    device: torch.device

    def empty(self, rows: int) -> Boundary:
        return tuple(torch.empty((rows, *shape), dtype=self.dtype, device=self.device) for shape in self.shapes)


class Inbox:
    """Receives one boundary a micro-batch, assembled from the rows of several senders.

    Receives are posted ahead, since gloo moves a message only once its receiver has asked for it.

    Args:
        pieces: what comes in, by sender.
        rows: the rows that it makes together: start and stop.
    """

    def __init__(
        self, group: dist.ProcessGroup, pieces: Sequence[Transfer], *, rows: tuple[int, int], form: Form
    ) -> None:
        self._group = group
        self._pieces = [(piece.source, piece.start - rows[0], piece.stop - rows[0]) for piece in pieces]
        self._rows = rows[1] - rows[0]
        self._form = form
        self._posted: list[tuple[Boundary, list[dist.Work]]] = []

    def post(self) -> None:
        """Ask for the next micro-batch's boundary."""
        buffers = self._form.empty(self._rows)
        works = [
            present(dist.irecv(buffer[low:high], source, self._group))
            for source, low, high in self._pieces
            for buffer in buffers
        ]
        self._posted.append((buffers, works))

    def take(self) -> tuple[Boundary, float]:
        """The boundary asked for first, and the seconds waited for it."""
        buffers, works = self._posted.pop(0)
        begin = time.perf_counter()
        for work in works:
            work.wait()
        return buffers, time.perf_counter() - begin


class Outbox:
    """Sends one boundary a micro-batch to those who need its rows, and goes on without waiting.

    Gloo says that a send is done only when it is waited for, so sent tensors are kept until `release`, which is
    called when the receiver is known to be past them.
    """

    def __init__(self, group: dist.ProcessGroup, pieces: Sequence[Transfer], *, rows: tuple[int, int]) -> None:
        self._group = group
        self._pieces = [(piece.target, piece.start - rows[0], piece.stop - rows[0]) for piece in pieces]
        self._sent: dict[int, tuple[Boundary, list[dist.Work]]] = {}

    def send(self, micro_batch: int, boundary: Boundary) -> None:
        tensors = tuple(tensor.detach().contiguous() for tensor in boundary)
        works = [
            present(dist.isend(tensor[low:high], target, self._group))
            for target, low, high in self._pieces
            for tensor in tensors
        ]
        self._sent[micro_batch] = tensors, works

    def release(self, micro_batches: Sequence[int]) -> None:
        """Wait for the sends of these micro-batches, as far as they are not done, and let go of their tensors."""
        for micro_batch in micro_batches:
            _, works = self._sent.pop(micro_batch, ((), []))
            for work in works:
                work.wait()

    def drain(self) -> None:
        """Wait for all that is still on its way."""
        self.release(tuple(self._sent))


class Mover:
    """Moves a boundary's rows between the ranks of a stage whose next layers are arranged anew; all of them call it.

    Args:
        transfers: of all ranks.
        old, new: the rows that this rank has and gets: start and stop.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        transfers: Sequence[Transfer],
        *,
        rank: int,
        old: tuple[int, int],
        new: tuple[int, int],
    ) -> None:
        self._group, self._rank, self._old, self._new = group, rank, old, new
        self._out = [one for one in transfers if one.source == rank and one.target != rank]
        self._in = [one for one in transfers if one.target == rank]

    def move(self, boundary: Boundary) -> Boundary:
        rows = self._new[1] - self._new[0]
        found: list[Tensor] = []
        operations: list[dist.P2POp] = []
        for whole in boundary:
            tensor = whole.detach()
            target = tensor.new_empty((rows, *tensor.shape[1:]))
            for piece in self._in:
                part = target[piece.start - self._new[0] : piece.stop - self._new[0]]
                if piece.source == self._rank:
                    part.copy_(tensor[piece.start - self._old[0] : piece.stop - self._old[0]])
                else:
                    operations.append(dist.P2POp(dist.irecv, part, piece.source, self._group))
            for piece in self._out:
                part = tensor[piece.start - self._old[0] : piece.stop - self._old[0]].contiguous()
                operations.append(dist.P2POp(dist.isend, part, piece.target, self._group))
            found.append(target)
        exchange(operations)
        return tuple(found)


def exchange(operations: list[dist.P2POp]) -> None:
    """Do them all at once: with NCCL, messages both ways between two ranks would otherwise wait for each other."""
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def connect(group: dist.ProcessGroup, pairs: Sequence[tuple[int, int]], rank: int, device: torch.device) -> None:
    """A first message over each of these (source, target), in one order for all ranks.

    With NCCL the first message between two ranks waits until both are there to connect. In the middle of a schedule,
    where receives are asked for ahead, ranks would then wait for each other in a circle.
    """
    token = torch.zeros(1, device=device)
    for source, target in sorted(set(pairs)):
        if rank == source:
            dist.send(token, target, group)
        elif rank == target:
            dist.recv(token, source, group)


def present(work: dist.Work | None) -> dist.Work:
    """The work itself. Raises RuntimeError where this rank is not in the group that it was to use."""
    if work is None:
        raise RuntimeError("a message was to pass through a group that this rank is not in")
    return work
