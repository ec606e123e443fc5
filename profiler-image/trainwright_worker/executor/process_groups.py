"""Process groups of a plan, cached by their ranks, and the collectives of a tensor group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright.model import Model
from trainwright.timeline import Action
from trainwright_worker.emulation import Pacer
from trainwright_worker.executor.mesh_groups import mesh_groups
from trainwright_worker.executor.message_batches import all_to_all
from trainwright_worker.executor.parameter_groups import (
    ParameterGroup,
    TiedParameterGroup,
    parameter_groups,
    tied_parameter_groups,
)
from trainwright_worker.executor.plan_ranks import PlanRanks, Ranks
from trainwright_worker.executor.recorder import Recorder

# torch 2.13 renamed two collectives (2.11 has the old names), and warns of the old names; earlier releases have only those.
all_gather_single: Callable[..., dist.Work | None] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single: Callable[..., dist.Work | None] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)


class Purpose(Enum):
    """Purpose of a process group; calls of one purpose do not wait for those of another."""

    COLLECTIVES = "collectives"
    BOUNDARIES = "boundaries"
    BOUNDARY_GRADIENTS = "gradients of boundaries"
    RELAYOUT = "rows that move within a stage"


@dataclass(frozen=True, slots=True)
class GroupKey:
    """Identity of a process group; its ranks are ascending."""

    purpose: Purpose
    ranks: Ranks


_PAIR_BLOCKS = 8
"""Maximum thread blocks, each with its buffers, of a message between two ranks. NCCL takes two a link of NVLink, 36 for an
H100 (`src/graph/paths.cc`), and a receive that is posted ahead holds them, of 132 multiprocessors, until its message comes;
without NVLink it takes two or few more."""


def backend_options(purpose: Purpose, timeout: timedelta) -> Any:  # a CPU's torch has no such type
    """Return the default back end's options for a group of this purpose; None for its defaults.

    Torch takes the streams of communicators from pools of 32, one of them for high priority. Boundaries take that one, so
    that no other message shares a stream with a receive that was posted ahead, which it would wait for.
    """
    if dist.get_backend() != "nccl" or purpose not in {Purpose.BOUNDARIES, Purpose.BOUNDARY_GRADIENTS}:
        return None
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout  # noqa: SLF001 (its only name; torch warns where it is another than the group's)
    options.is_high_priority_stream = True
    options.config.max_ctas = _PAIR_BLOCKS
    return options


class ProcessGroups:
    """Process groups of one process.

    Every two ranks that exchange boundaries have a group of their own for each direction: so a receive that is posted ahead
    delays no other message.

    Plans that run one after another in the same processes share groups, since creating one is a collective.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._all_ranks: Ranks = tuple(range(dist.get_world_size()))
        self._groups: dict[GroupKey, dist.ProcessGroup] = {}

    def prepare(self, needed: Sequence[GroupKey]) -> None:
        """Destroy groups that are not needed, since their communicators hold memory, and create missing ones.

        All ranks of the world call this, with the same groups in the same order, once no rank uses a group any more.
        """
        kept = set(needed)
        for key in [key for key in self._groups if key not in kept]:
            dist.destroy_process_group(self._groups.pop(key))
        for key in needed:
            if key not in self._groups and not self._is_world(key):
                options = backend_options(key.purpose, self._timeout)
                self._groups[key] = dist.new_group(list(key.ranks), timeout=self._timeout, pg_options=options)

    def _is_world(self, key: GroupKey) -> bool:
        return key.purpose is Purpose.COLLECTIVES and key.ranks == self._all_ranks

    def group_of(self, ranks: Ranks, purpose: Purpose = Purpose.COLLECTIVES) -> dist.ProcessGroup | None:
        """Return the group of these ascending ranks; None for a single rank."""
        if len(ranks) < 2:
            return None
        key = GroupKey(purpose, ranks)
        return dist.group.WORLD if self._is_world(key) else self._groups[key]

    def close(self) -> None:
        """Destroy all groups. All ranks call this once no rank uses a group any more."""
        self.prepare(())


def required_groups(plan_ranks: PlanRanks, model: Model) -> tuple[GroupKey, ...]:
    """Return every group that a plan needs, in one order for all ranks."""
    ranks_by_purpose = {
        Purpose.BOUNDARIES: plan_ranks.boundary_pairs(model),
        Purpose.BOUNDARY_GRADIENTS: plan_ranks.boundary_gradient_pairs(model),
        Purpose.RELAYOUT: plan_ranks.relayout_ranks,
        Purpose.COLLECTIVES: [ranks for ranks in _collective_groups(plan_ranks, model) if len(ranks) > 1],
    }
    return tuple(GroupKey(purpose, ranks) for purpose, groups in ranks_by_purpose.items() for ranks in groups)


def _collective_groups(plan_ranks: PlanRanks, model: Model) -> tuple[Ranks, ...]:
    groups: dict[Ranks, None] = dict.fromkeys((plan_ranks.ranks, *plan_ranks.boundary_gather_ranks(model)))
    for stages in plan_ranks.pipelines:
        for run in (run for stage in stages for run in stage.runs):
            groups.update(dict.fromkeys(run.tensor_group_ranks(replica[0]) for replica in run.tensor_groups))
            groups.update(dict.fromkeys(run.all_data_group_ranks))
    groups.update(dict.fromkeys(mesh_groups(plan_ranks)))
    for parameter_group in parameter_groups(plan_ranks):
        groups.update(dict.fromkeys(_reduction_groups(parameter_group)))
    for tied_group in tied_parameter_groups(plan_ranks, model):
        groups.update(dict.fromkeys(_tied_reduction_groups(tied_group)))
    return tuple(groups)


def _reduction_groups(parameter_group: ParameterGroup) -> tuple[Ranks, ...]:
    if len(parameter_group.runs) == 1:
        return ()
    if parameter_group.has_uniform_partition and parameter_group.is_sharded:
        first = parameter_group.runs[0]
        return tuple(parameter_group.peer_ranks(first, rank) for rank in first.ranks)
    return tuple(parameter_group.slice_ranks(number) for number in range(parameter_group.slice_count))


def _tied_reduction_groups(tied_group: TiedParameterGroup) -> tuple[Ranks, ...]:
    sharding_runs = [run for run in tied_group.runs if tied_group.sharding_run(run) is run]
    data_groups = (ranks for run in sharding_runs for ranks in run.all_data_group_ranks)
    peer_groups = (tied_group.peer_ranks(run, rank) for run in tied_group.sharding_runs[:1] for rank in run.ranks)
    return (*tied_group.reduction_groups(), *data_groups, *peer_groups)


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Collectives of one rank's tensor group, as layers call them; emulated pacing pauses meanwhile.

    Attributes:
        group: None for a single rank.
        ranks: the group's ranks, by tensor index; the process group has them in ascending order.
        rank: this process's rank.
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
            all_gather_single(stacked.view(-1), part.contiguous(), group=self.group)
        ascending = sorted(self.ranks)
        if tuple(ascending) == self.ranks:
            return stacked
        return torch.stack([stacked[ascending.index(rank)] for rank in self.ranks])

    def reduce_scatter(self, parts: Tensor) -> Tensor:
        ascending = sorted(self.ranks)
        if tuple(ascending) != self.ranks:
            parts = torch.stack([parts[self.ranks.index(rank)] for rank in ascending])
        own = parts.new_empty(parts.shape[1])
        with self._communication("summing a sequence within the tensor group"):
            reduce_scatter_single(own, parts.contiguous().view(-1), group=self.group)
        return own

    def all_to_all(self, parts: Tensor) -> Tensor:
        ascending = sorted(self.ranks)
        if tuple(ascending) != self.ranks:
            parts = torch.stack([parts[self.ranks.index(rank)] for rank in ascending])
        received = torch.empty_like(parts, memory_format=torch.contiguous_format)
        with self._communication("exchanging parts of a tensor"):
            all_to_all(received, parts.contiguous(), self.group)
        if tuple(ascending) == self.ranks:
            return received
        return torch.stack([received[ascending.index(rank)] for rank in self.ranks])

    def exchange(self, values: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        order = [self.ranks.index(rank) for rank in sorted(self.ranks)]
        is_ascending = order == list(range(self.size))
        if not is_ascending:
            pieces = torch.split(values, list(sent))
            values = torch.cat([pieces[index] for index in order])
        counts = [received[index] for index in order]
        joined = values.new_empty(sum(counts))
        with self._communication("exchanging uneven parts of a tensor"):
            all_to_all(joined, values.contiguous(), self.group, counts, [sent[index] for index in order])
        if is_ascending:
            return joined
        parts = torch.split(joined, counts)
        return torch.cat([parts[order.index(index)] for index in range(self.size)])

    @contextmanager
    def _communication(self, doing: str) -> Iterator[None]:
        self.pacer.pause()
        self.beat(doing)
        with self.recorder.action(Action.TENSOR_SUM):
            yield
        self.pacer.resume()
