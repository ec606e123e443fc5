"""Process groups by their ranks: made once by all ranks in the same order, always ascending, and used again."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

import torch.distributed as dist

from trainwright.model import Model
from trainwright_worker.executor.mesh import Mesh, Ranks
from trainwright_worker.executor.units import SharedSpan, Span, shared_spans, spans


class Groups:
    """The process groups of one process.

    Plans that run one after another in the same processes share their groups, since making one costs a meeting.

    Attributes:
        forward, backward: for messages between stages, activations and gradients apart: within a group, messages
            between two ranks come in the order of the micro-batches, and with NCCL neither waits for the other.
        inside: for rows that move within a stage.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._everyone: Ranks = tuple(range(dist.get_world_size()))
        self._made: dict[Ranks, dist.ProcessGroup] = {}
        self.forward = dist.new_group(timeout=timeout)
        self.backward = dist.new_group(timeout=timeout)
        self.inside = dist.new_group(timeout=timeout)

    def make(self, wanted: Iterable[Ranks]) -> None:
        """Make those that are not there yet. All ranks of the world call this, with the same groups in the same order."""
        for ranks in wanted:
            if len(ranks) > 1 and ranks != self._everyone and ranks not in self._made:
                self._made[ranks] = dist.new_group(list(ranks), timeout=self._timeout)

    def of(self, ranks: Ranks) -> dist.ProcessGroup | None:
        """The group of these ranks, ascending; None for a rank by itself."""
        if len(ranks) < 2:
            return None
        return dist.group.WORLD if ranks == self._everyone else self._made[ranks]

    def close(self) -> None:
        """Give the connections back. All ranks do so when none of them uses a group any more."""
        for group in (*self._made.values(), self.forward, self.backward, self.inside):
            dist.destroy_process_group(group)
        self._made.clear()


def wanted_groups(mesh: Mesh, model: Model) -> tuple[Ranks, ...]:
    """Every group that a plan's collectives need, in one order for all ranks."""
    found: dict[Ranks, None] = {mesh.ranks: None}
    for stages in mesh.pipelines:
        for run in (run for stage in stages for run in stage.runs):
            found.update(dict.fromkeys(run.replica_ranks(replica[0]) for replica in run.replicas))
            found.update(dict.fromkeys(run.data_ranks(tensor) for tensor in range(run.tensor)))
    for span in spans(mesh):
        found.update(dict.fromkeys(_across(span)))
    for shared in shared_spans(mesh, model):
        found.update(dict.fromkeys(_of_shared(shared)))
    return tuple(found)


def _across(span: Span) -> tuple[Ranks, ...]:
    if len(span.holders) == 1:
        return ()
    if span.is_alike and span.is_sharded:
        first = span.holders[0]
        return tuple(span.twins(first, rank) for rank in first.ranks)
    return tuple(span.slice_ranks(number) for number in range(span.slices))


def _of_shared(shared: SharedSpan) -> tuple[Ranks, ...]:
    homes = [one for one in shared.holders if shared.home(one.ranks[0]) is one]
    inside = (one.data_ranks(tensor) for one in homes for tensor in range(one.tensor))
    across = (shared.twins(one, rank) for one in shared.homes[:1] for rank in one.ranks)
    return (*shared.groups(), *inside, *across)
