"""What crosses a stage's boundary: tensors that arrive from and leave for the neighbouring stages, piece by piece."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright_worker.executor.mesh import Transfer


class Inbox:
    """Receives one boundary tensor a micro-batch, assembled from the rows of several senders.

    Receives are posted ahead, since gloo moves a message only once its receiver has asked for it.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        pieces: Sequence[Transfer],
        *,
        first_row: int,
        shape: tuple[int, ...],
        device: torch.device,
    ) -> None:
        self._group = group
        self._pieces = [(piece.source, piece.start - first_row, piece.stop - first_row) for piece in pieces]
        self._shape = shape
        self._device = device
        self._posted: list[tuple[Tensor, list[dist.Work]]] = []

    def post(self) -> None:
        """Ask for the next micro-batch's tensor."""
        buffer = torch.empty(self._shape, device=self._device)
        works = [_work(dist.irecv(buffer[low:high], source, self._group)) for source, low, high in self._pieces]
        self._posted.append((buffer, works))

    def take(self) -> tuple[Tensor, float]:
        """The tensor asked for first, and the seconds waited for it."""
        buffer, works = self._posted.pop(0)
        begin = time.perf_counter()
        for work in works:
            work.wait()
        return buffer, time.perf_counter() - begin


class Outbox:
    """Sends one boundary tensor a micro-batch to those who need its rows, and goes on without waiting.

    Gloo says that a send is done only when it is waited for, so sent tensors are kept until `release`, which is
    called when the receiver is known to be past them.
    """

    def __init__(self, group: dist.ProcessGroup, pieces: Sequence[Transfer], *, first_row: int) -> None:
        self._group = group
        self._pieces = [(piece.target, piece.start - first_row, piece.stop - first_row) for piece in pieces]
        self._sent: dict[int, tuple[Tensor, list[dist.Work]]] = {}

    def send(self, micro_batch: int, tensor: Tensor) -> None:
        tensor = tensor.detach().contiguous()
        works = [_work(dist.isend(tensor[low:high], target, self._group)) for target, low, high in self._pieces]
        self._sent[micro_batch] = tensor, works

    def release(self, micro_batches: Sequence[int]) -> None:
        """Wait for the sends of these micro-batches, as far as they are not done, and let go of their tensors."""
        for micro_batch in micro_batches:
            _, works = self._sent.pop(micro_batch, (None, []))
            for work in works:
                work.wait()

    def drain(self) -> None:
        """Wait for all that is still on its way."""
        self.release(tuple(self._sent))


def _work(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise RuntimeError("a message was to pass through a group that this rank is not in")
    return work
