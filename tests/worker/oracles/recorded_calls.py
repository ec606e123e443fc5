"""Process groups that only record: one process walks every rank of a gang in turn, without peers.

Collectives and receives fill their results with ones, so that every rank takes the same branches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

Ranks = tuple[int, ...]
BACKEND = "recording"


@dataclass(frozen=True, slots=True)
class Communicator:
    """Ranks that NCCL connects at their first call: all of a group, or the two of it that send outside a batch."""

    group: str
    ranks: Ranks


@dataclass(frozen=True, slots=True)
class Call:
    """Collective, send or receive of one rank.

    Attributes:
        kind: the collective's name, `send` or `receive`.
        peer: the other rank of a send or receive.
        batch: number of the batch of sends and receives, if it is in one.
        device_ids: what a barrier names.
        scope: what the rank was doing, as the walk named it.
    """

    communicator: Communicator
    kind: str
    values: int = 0
    dtype: torch.dtype | None = None
    peer: int | None = None
    batch: int | None = None
    device_ids: tuple[int, ...] = ()
    scope: str = ""

    @property
    def message(self) -> tuple[str, int, torch.dtype | None]:
        return self.kind, self.values, self.dtype


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for the event with this index."""

    event: int


@dataclass(frozen=True, slots=True)
class Close:
    """End of a group on this rank."""

    group: str


Event = Call | Wait | Close


@dataclass
class Record:
    """Events of one rank, in order."""

    rank: int
    events: list[Event] = field(default_factory=list)
    groups: dict[str, Ranks] = field(default_factory=dict)
    scope: str = ""
    batch: int | None = None
    batches: int = 0

    @property
    def calls(self) -> list[Call]:
        return [event for event in self.events if isinstance(event, Call)]

    def calls_by_communicator(self) -> dict[Communicator, list[Call]]:
        found: dict[Communicator, list[Call]] = {}
        for call in self.calls:
            found.setdefault(call.communicator, []).append(call)
        return found


class _Work:
    def __init__(self, record: Record) -> None:
        self._record, self._event = record, len(record.events) - 1

    def wait(self, _timeout: Any = None) -> bool:
        self._record.events.append(Wait(self._event))
        return True


class _RecordingGroup(dist.ProcessGroup):
    """Group of one rank, which calls it by the names of `ProcessGroup`."""

    def __init__(self, record: Record, ranks: Ranks, name: str) -> None:
        super().__init__(ranks.index(record.rank), len(ranks))
        self._record, self._ranks, self._name = record, ranks, name
        record.groups[name] = ranks

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return BACKEND

    @property
    def group_name(self) -> str:
        return self._name

    def allreduce(self, tensors: list[torch.Tensor], _options: Any = None) -> _Work:
        return self._collective("all_reduce", tensors[0], *tensors)

    def _allgather_base(self, output: torch.Tensor, part: torch.Tensor, _options: Any = None) -> _Work:
        return self._collective("all_gather", part, output)

    def _reduce_scatter_base(self, output: torch.Tensor, whole: torch.Tensor, _options: Any = None) -> _Work:
        return self._collective("reduce_scatter", whole, output)

    def alltoall_base(
        self, output: torch.Tensor, parts: torch.Tensor, _sent: Any = None, _received: Any = None, _options: Any = None
    ) -> _Work:
        return self._collective("all_to_all", parts, output)

    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base  # their names since torch 2.13

    def allgather(self, outputs: list[list[torch.Tensor]], parts: list[torch.Tensor], _options: Any = None) -> _Work:
        """Gather what Python objects become: each rank finds its own in place of the others'."""
        for output in outputs[0]:
            output.copy_(parts[0])
        return self._collective("gather_objects", parts[0])

    def barrier(self, opts: Any = None) -> _Work:
        return self._call(
            Call(Communicator(self._name, self._ranks), "barrier", device_ids=tuple(opts.device_ids or ()))
        )

    def send(self, tensors: list[torch.Tensor], peer: int, _tag: int = 0) -> _Work:
        return self._message("send", tensors[0], peer)

    def recv(self, tensors: list[torch.Tensor], peer: int, _tag: int = 0) -> _Work:
        tensors[0].fill_(1)
        return self._message("receive", tensors[0], peer)

    def shutdown(self) -> None:
        self._record.events.append(Close(self._name))

    def _collective(self, kind: str, message: torch.Tensor, *results: torch.Tensor) -> _Work:
        for result in results:
            result.detach().fill_(1)
        # objects differ in size
        values = 0 if kind == "gather_objects" else message.numel()
        return self._call(Call(Communicator(self._name, self._ranks), kind, values, message.dtype))

    def _message(self, kind: str, tensor: torch.Tensor, peer: int) -> _Work:
        target, batch = self._ranks[peer], self._record.batch
        pair = tuple(sorted((self._record.rank, target)))
        communicator = Communicator(self._name, pair if batch is None else self._ranks)
        return self._call(Call(communicator, kind, tensor.numel(), tensor.dtype, target, batch))

    def _call(self, call: Call) -> _Work:
        self._record.events.append(replace(call, scope=self._record.scope))
        return _Work(self._record)


def _batching(record: Record, original: Callable[..., Any]) -> Callable[..., Any]:
    def batch_isend_irecv(operations: list[dist.P2POp]) -> Any:
        record.batch = record.batches = record.batches + 1
        works = original(operations)
        record.batch = None
        return works

    return batch_isend_irecv


@contextmanager
def recording(rank: int, world_size: int) -> Iterator[Record]:
    """Make this process the given rank of a gang, whose calls are recorded."""
    record = Record(rank)
    _walked.append(record)
    original = dist.batch_isend_irecv
    dist.batch_isend_irecv = _batching(record, original)
    dist.init_process_group(BACKEND, store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield record
    finally:
        dist.destroy_process_group()
        dist.batch_isend_irecv = original
        _walked.clear()


_walked: list[Record] = []


def _make_group(options: Any, _backend_options: Any) -> _RecordingGroup:
    ranks = options.global_ranks_in_group or range(options.group_size)
    return _RecordingGroup(_walked[-1], tuple(ranks), options.group_id)


dist.Backend.register_backend(BACKEND, _make_group, extended_api=True, devices=["cpu"])
