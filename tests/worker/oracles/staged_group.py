"""Back end `staged`: gloo between copies of the tensors on the host, so that several processes can share one GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

NAME = "staged"
Start = Callable[[], dist.Work]


class StagedWork:
    """Work on host copies; waiting for it copies its results to the device."""

    def __init__(self, work: dist.Work, results: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._work, self._results = work, results

    def wait(self, *timeout: timedelta) -> bool:
        self._work.wait(*timeout)
        for target, host in self._results:
            target.copy_(host)
        self._results = ()
        return True

    def is_completed(self) -> bool:
        return self._work.is_completed()


class StagedGroup(dist.ProcessGroup):
    """Process group that copies to the host, calls gloo, and copies back.

    A copy to the host waits for the device, so the order of calls is that of the device's work.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def allreduce(self, tensors, opts=None) -> StagedWork:
        hosts = _on_host(tensors)
        return StagedWork(self._gloo.allreduce(hosts, opts or dist.AllreduceOptions()), _pairs(tensors, hosts))

    def broadcast(self, tensors, opts=None) -> StagedWork:
        hosts = _on_host(tensors)
        return StagedWork(self._gloo.broadcast(hosts, opts or dist.BroadcastOptions()), _pairs(tensors, hosts))

    def allgather(self, outputs, inputs, opts=None) -> StagedWork:
        hosts = [[_empty(tensor) for tensor in part] for part in outputs]
        work = self._gloo.allgather(hosts, _on_host(inputs), opts or dist.AllgatherOptions())
        return StagedWork(work, [pair for parts in _pairs(outputs, hosts) for pair in _pairs(*parts)])

    def _allgather_base(self, output, own, opts=None) -> StagedWork:
        host = _empty(output)
        work = self._gloo._allgather_base(host, *_on_host([own]), opts or dist.AllgatherOptions())
        return StagedWork(work, [(output, host)])

    def _reduce_scatter_base(self, output, parts, opts=None) -> StagedWork:
        host = _empty(output)
        work = self._gloo._reduce_scatter_base(host, *_on_host([parts]), opts or dist.ReduceScatterOptions())
        return StagedWork(work, [(output, host)])

    def alltoall_base(self, output, parts, sent, received, opts=None) -> StagedWork:
        host = _empty(output)
        work = self._gloo.alltoall_base(host, *_on_host([parts]), sent, received, opts or dist.AllToAllOptions())
        return StagedWork(work, [(output, host)])

    # Names of releases after 2.11.
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base

    def send(self, tensors, target, tag=0) -> StagedWork:
        return StagedWork(self._gloo.send(_on_host(tensors), target, tag), [])

    def recv(self, tensors, source, tag=0) -> StagedWork:
        hosts = [_empty(tensor) for tensor in tensors]
        return StagedWork(self._gloo.recv(hosts, source, tag), _pairs(tensors, hosts))

    def barrier(self, opts=None) -> StagedWork:
        return StagedWork(self._gloo.barrier(), [])

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return NAME

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        """Name of the group; torch keeps it in a back end, of which a group written in Python has none."""
        return self._name


def _on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().to("cpu", copy=True).contiguous() for tensor in tensors]


def _pairs(targets, hosts) -> list:
    return list(zip(targets, hosts, strict=True))


def _empty(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def register() -> None:
    """Register the back end; each process does so once."""
    dist.Backend.register_backend(NAME, StagedGroup, devices=["cpu", "cuda"])
