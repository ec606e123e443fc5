"""Batches of messages between ranks, and all-to-alls of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def all_to_all(
    received: Tensor,
    sent: Tensor,
    group: dist.ProcessGroup | None,
    received_counts: Sequence[int] | None = None,
    sent_counts: Sequence[int] | None = None,
) -> None:
    """Send each rank of a group its part of contiguous `sent`, and fill contiguous `received` with the parts from all.

    Parts lie along the first dimension, in the order of the group's ranks: equal ones, or as long as the counts say.

    On gloo all receives are posted before any send. Its own all-to-all announces only after its sends that it may receive, and
    the announcement waits for them: on a slow link, ranks that do not start at the same moment then take turns (two that
    exchange 64 KiB each over 5 Mbit/s, one of which starts 50 ms later: 208 ms from then on in place of 105).
    """
    if dist.get_backend(group) != "gloo":
        splits = [None if counts is None else list(counts) for counts in (received_counts, sent_counts)]
        dist.all_to_all_single(received, sent, splits[0], splits[1], group)
        return
    ranks = dist.get_process_group_ranks(group)
    to_each, from_each = _parts(sent, sent_counts, len(ranks)), _parts(received, received_counts, len(ranks))
    index = dist.get_rank(group)
    messages = [
        dist.P2POp(pass_on, part, rank, group)
        for pass_on, parts in ((dist.irecv, from_each), (dist.isend, to_each))
        for number, (part, rank) in enumerate(zip(parts, ranks, strict=True))
        if number != index and part.numel()
    ]
    from_each[index].copy_(to_each[index])
    batch_send_receive(messages)


def batch_send_receive(operations: list[dist.P2POp]) -> None:
    """Issue all messages in one batch: with NCCL, opposite messages between two ranks would otherwise deadlock."""
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def _parts(whole: Tensor, counts: Sequence[int] | None, ranks: int) -> tuple[Tensor, ...]:
    return torch.split(whole, whole.shape[0] // ranks if counts is None else list(counts))
