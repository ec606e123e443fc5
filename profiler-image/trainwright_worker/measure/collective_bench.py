"""Benchmark of collectives within every node, across nodes, and over all devices."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from trainwright.cluster import Device
from trainwright.worker_api import CollectiveKind, CollectiveTime, Gang, LinkTask
from trainwright_worker.device import barrier, synchronize
from trainwright_worker.executor.message_batches import all_to_all
from trainwright_worker.executor.process_groups import all_gather_single, reduce_scatter_single
from trainwright_worker.gang.gathering import gather
from trainwright_worker.gang.rank_assignment import RankAssignment, gang_devices
from trainwright_worker.gang.watchdog import Watchdog

Ranks = tuple[int, ...]

_MAX_REPEATS = 50
_VALUE_BYTES = 4
_MAX_TIME_SHARE = 0.1
"""Maximum share of the total time for one message; its estimate, proportional to the previous size's, is an upper bound."""


def measure_collectives(
    task: LinkTask, assignment: RankAssignment, device: torch.device, watchdog: Watchdog
) -> tuple[CollectiveTime, ...]:
    """Measure all collectives of the task, in about `collective_seconds`. Every rank of the gang returns the same.

    Sizes that may take longer than a tenth of the time are skipped, and so are larger ones.
    """
    watchdog.beat("making the groups of the collectives")
    own_times: list[CollectiveTime] = []
    group_sets = concurrent_group_sets(task.gang)
    measurement_count = max(len(group_sets) * len(task.collectives) * len(task.collective_bytes), 1)
    for group_set in group_sets:
        process_groups = {ranks: make_group(task.gang, ranks) for ranks in group_set}
        barrier(device)
        for ranks, group in process_groups.items():
            if assignment.rank in ranks:
                timed_group = TimedGroup(ranks, group, device)
                for kind in task.collectives:
                    watchdog.beat(f"measuring {kind} of {len(ranks)} devices")
                    own_times += _measure_collective(
                        task, timed_group, kind, task.collective_seconds / measurement_count
                    )
        barrier(device)
        for ranks, group in process_groups.items():
            if assignment.rank in ranks:
                dist.destroy_process_group(group)
    own_device = gang_devices(task.gang)[assignment.rank]
    first_times = tuple(collective_time for collective_time in own_times if collective_time.members[0] == own_device)
    times_by_rank = gather(first_times, tuple[CollectiveTime, ...], device)
    return tuple(collective_time for times in times_by_rank for collective_time in times)


def concurrent_group_sets(gang: Gang) -> list[list[Ranks]]:
    """Return sets of rank groups; groups of one set are disjoint and measured concurrently.

    First the devices of each node, then one device of each node, last all devices if those differ from both.
    """
    node_ranks: list[Ranks] = []
    for node in gang.nodes:
        first = sum(len(ranks) for ranks in node_ranks)
        node_ranks.append(tuple(range(first, first + len(node.slots))))
    all_ranks = tuple(rank for node in node_ranks for rank in node)
    intra_node = [ranks for ranks in node_ranks if len(ranks) > 1]
    one_rank_per_node = tuple(ranks[0] for ranks in node_ranks)
    group_sets = [
        intra_node,
        [one_rank_per_node] if len(one_rank_per_node) > 1 else [],
        [all_ranks] if all_ranks not in {one_rank_per_node, node_ranks[0]} else [],
    ]
    return [stage for stage in group_sets if stage]


def make_group(gang: Gang, ranks: Ranks) -> dist.ProcessGroup:
    """Create a process group; a collective over all ranks of the gang."""
    group: dist.ProcessGroup = dist.new_group(
        list(ranks), timeout=timedelta(seconds=1.5 * gang.collective_timeout_seconds)
    )
    return group


@dataclass(frozen=True)
class TimedGroup:
    """Process group whose members time work together."""

    ranks: Ranks
    group: dist.ProcessGroup
    device: torch.device

    def max_over_ranks(self, seconds: list[float]) -> list[float]:
        """Return the slowest member's value of each duration, equal on every member."""
        durations = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        dist.all_reduce(durations, op=dist.ReduceOp.MAX, group=self.group)
        return durations.tolist()

    def median_of_slowest(self, seconds: list[float]) -> float:
        """Return the median over repeats of the slowest member's seconds, equal on every member."""
        return statistics.median(self.max_over_ranks(seconds))

    def barrier(self) -> None:
        """Wait until all members arrive and their devices are idle."""
        barrier(self.device, self.group)
        synchronize(self.device)

    def measure_seconds(self, work: Callable[[], object]) -> float:
        """Return the seconds of work that all members begin together."""
        self.barrier()
        begin = time.perf_counter()
        work()
        synchronize(self.device)
        return time.perf_counter() - begin


def _measure_collective(
    task: LinkTask, group: TimedGroup, kind: CollectiveKind, seconds: float
) -> Iterator[CollectiveTime]:
    devices = gang_devices(task.gang)
    members = tuple[Device, ...](devices[rank] for rank in group.ranks)
    previous: tuple[int, float] | None = None
    for size in task.collective_bytes:
        if previous is not None and previous[1] * size / previous[0] > _MAX_TIME_SHARE * task.collective_seconds:
            return
        numel = message_numel(size, len(members))
        work = collective_operation(kind, group, numel)
        group.measure_seconds(work)  # warm-up: connections are established
        estimate = group.median_of_slowest([group.measure_seconds(work)])
        repeats = min(max(round(seconds / estimate), 1), _MAX_REPEATS)
        median = (
            group.median_of_slowest([group.measure_seconds(work) for _ in range(repeats)]) if repeats > 1 else estimate
        )
        previous = size, median
        yield CollectiveTime(kind, members, numel * _VALUE_BYTES, median, repeats)


def message_numel(message_bytes: int, members: int) -> int:
    """Return the number of values in a message of about `message_bytes` bytes that divides equally among members."""
    return max(round(message_bytes / _VALUE_BYTES / members), 1) * members


def collective_operation(kind: CollectiveKind, group: TimedGroup, numel: int) -> Callable[[], object]:
    """Return the collective on a full tensor of `numel` values and equal shards of it."""
    whole = torch.zeros(numel, device=group.device)
    part = torch.zeros(numel // len(group.ranks), device=group.device)
    match kind:
        case "all_reduce":
            return lambda: dist.all_reduce(whole, group=group.group)
        case "all_gather":
            return lambda: all_gather_single(whole, part, group=group.group)
        case "reduce_scatter":
            return lambda: reduce_scatter_single(part, whole, group=group.group)
        case "all_to_all":
            received = torch.empty_like(whole)
            return lambda: all_to_all(received, whole, group.group)
