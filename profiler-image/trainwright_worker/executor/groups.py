"""The process groups of one plan, made by all ranks in the same order and always ascending by rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from trainwright_worker.executor.mesh import Mesh, Ranks


@dataclass
class Groups:
    """One rank's groups; None where it is alone.

    Attributes:
        forward_in, forward_out: with the stage before and behind, for activations. Each boundary and direction has a
            group of its own: within it, messages between two ranks come in the order of the micro-batches.
        backward_in, backward_out: with the stage behind and before, for gradients.
        shared: by shared weight, the group that sums its gradient.
    """

    tensor: dist.ProcessGroup | None = None
    data: dist.ProcessGroup | None = None
    forward_in: dist.ProcessGroup | None = None
    forward_out: dist.ProcessGroup | None = None
    backward_in: dist.ProcessGroup | None = None
    backward_out: dist.ProcessGroup | None = None
    shared: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    _made: list[dist.ProcessGroup] = field(default_factory=list)

    @classmethod
    def create(cls, mesh: Mesh, shared_owners: dict[str, tuple[int, ...]], rank: int, timeout: timedelta) -> Groups:
        """The groups of `rank`. `shared_owners` names the stages that own each weight shared between stages."""
        groups = cls()
        for number, stage in enumerate(mesh.stages):
            for ranks in stage.replicas:
                groups.tensor = groups._make(ranks, rank, timeout) or groups.tensor
            for ranks in stage.data_groups:
                groups.data = groups._make(ranks, rank, timeout) or groups.data
            if number + 1 < len(mesh.stages):
                behind = mesh.stages[number + 1].ranks
                forward = groups._make(stage.ranks + behind, rank, timeout)
                backward = groups._make(stage.ranks + behind, rank, timeout)
                if rank in stage.ranks:
                    groups.forward_out, groups.backward_in = forward, backward
                elif rank in behind:
                    groups.forward_in, groups.backward_out = forward, backward
        for name, owners in sorted(shared_owners.items()):
            for ranks in mesh.shared_groups(owners):
                group = groups._make(ranks, rank, timeout)
                if group is not None:
                    groups.shared[name] = group
        return groups

    def _make(self, ranks: Ranks, rank: int, timeout: timedelta) -> dist.ProcessGroup | None:
        """A group of these ranks. Every rank of the world takes part in the making, whether it is in the group or not."""
        if len(ranks) == 1:
            return None
        group: dist.ProcessGroup = dist.new_group(sorted(ranks), timeout=timeout)
        if rank not in ranks:
            return None
        self._made.append(group)
        return group

    def close(self) -> None:
        """Give the groups' connections back. All ranks do so when none of them uses a group any more."""
        for group in self._made:
            dist.destroy_process_group(group)
        self._made.clear()
