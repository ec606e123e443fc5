"""The collectives of a layer run's tensor group, between which an emulated device's pace stands still."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from trainwright.timeline import Action
from trainwright_worker.emulation import Pacer
from trainwright_worker.executor.mesh import Ranks
from trainwright_worker.executor.timeline import Recorder


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """One rank's end of them: `Collectives` as layers know them.

    Attributes:
        group: None for a rank by itself, which has nobody to meet.
        ranks: of the group, ascending.
        rank: this one.
    """

    group: dist.ProcessGroup | None
    ranks: Ranks
    rank: int
    pacer: Pacer
    recorder: Recorder
    beat: Callable[[str], None]

    @property
    def index(self) -> int:
        return self.ranks.index(self.rank)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def all_reduce(self, tensor: Tensor) -> None:
        with self._communication("summing within the tensor group"):
            dist.all_reduce(tensor, group=self.group)

    def all_gather(self, part: Tensor) -> Tensor:
        stacked = part.new_empty(self.size, part.numel())
        with self._communication("collecting a sequence within the tensor group"):
            dist.all_gather_single(stacked.view(-1), part.contiguous(), group=self.group)
        return stacked

    def reduce_scatter(self, parts: Tensor) -> Tensor:
        own = parts.new_empty(parts.shape[1])
        with self._communication("summing a sequence within the tensor group"):
            dist.reduce_scatter_single(own, parts.contiguous().view(-1), group=self.group)
        return own

    @contextmanager
    def _communication(self, doing: str) -> Iterator[None]:
        self.pacer.interrupt()
        self.beat(doing)
        with self.recorder.action(Action.TENSOR_SUM):
            yield
        self.pacer.resume()
