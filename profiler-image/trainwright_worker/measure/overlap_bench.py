"""Benchmark of the slowdown of computation during communication."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from trainwright.cluster import EMULATED_PREFIX
from trainwright.worker_api import LinkTask, Overlap
from trainwright_worker.device import Clock, barrier
from trainwright_worker.executor.boundary_exchange import require_work
from trainwright_worker.executor.stage_module import TORCH_DTYPES
from trainwright_worker.gang.gathering import gather
from trainwright_worker.gang.rank_assignment import RankAssignment
from trainwright_worker.gang.watchdog import Watchdog
from trainwright_worker.measure.collective_bench import TimedGroup, concurrent_group_sets, make_group

_REPEATS = 15
_MATRIX_WIDTHS = {"cpu": 128, "cuda": 4096}
"""Widths of the multiplied square matrices: large enough to keep a device of that type busy."""
_MIN_MESSAGE_SECONDS = 0.02
"""Minimum seconds of a message, so that its start and end are negligible."""
_MIN_MESSAGE_BYTES, _MAX_MESSAGE_BYTES = 2**18, 2**30
_MAX_PRODUCTS = 10_000
_MAX_COMPUTE_SHARE = 0.9
"""Computation that ends within this share of the message's time was slowed down throughout."""


def measure_overlaps(
    task: LinkTask, assignment: RankAssignment, device: torch.device, watchdog: Watchdog
) -> tuple[Overlap, ...]:
    """Return one slowdown per node that has a partner, on real devices. Every rank of the gang returns the same.

    The all-reduce runs within a node that has several devices, else over one device of each node. On emulated devices
    computation is a sleep, which nothing slows down.
    """
    if any(node.accelerator.startswith(EMULATED_PREFIX) for node in task.gang.nodes):
        return ()
    dtype = TORCH_DTYPES[task.overlap_dtype] if device.type == "cuda" else torch.float32
    own_overlaps: list[Overlap] = []
    for group_set in concurrent_group_sets(task.gang)[:2]:
        watchdog.beat("measuring how communication slows computation down")
        process_groups = {ranks: make_group(task.gang, ranks) for ranks in group_set}
        barrier(device)
        for ranks, group in process_groups.items():
            if assignment.rank in ranks:
                own_overlaps.append(_measure_slowdown(TimedGroup(ranks, group, device), assignment.device.node, dtype))
        barrier(device)
        for ranks, group in process_groups.items():
            if assignment.rank in ranks:
                dist.destroy_process_group(group)
    overlaps_by_rank = gather(tuple(own_overlaps[:1]), tuple[Overlap, ...], device)
    overlap_by_node = {
        overlap.node: overlap for ranks in reversed(overlaps_by_rank) for overlap in ranks
    }  # the node's first rank counts
    return tuple(overlap_by_node[node.name] for node in task.gang.nodes if node.name in overlap_by_node)


def _measure_slowdown(group: TimedGroup, node: str, dtype: torch.dtype) -> Overlap:
    message, message_seconds = _find_long_message(group)
    width = _MATRIX_WIDTHS[group.device.type]
    left, right = torch.rand(2, width, width, dtype=dtype, device=group.device)
    out = torch.empty_like(left)

    def compute(products: int) -> None:
        for _ in range(products):
            torch.mm(left, right, out=out)

    compute(3)
    ten_seconds = group.median_of_slowest([_time_compute(group, partial(compute, 10)) for _ in range(_REPEATS)])
    product_count = min(max(round(message_seconds / (ten_seconds / 10) / 2), 1), _MAX_PRODUCTS)
    while True:
        work = partial(compute, product_count)
        # Alternate, so that other load on the machine slows both down equally.
        samples = [(_time_compute(group, work), *_time_overlapped(group, message, work)) for _ in range(_REPEATS)]
        computed, message_done = (
            group.median_of_slowest([sample[1] for sample in samples]),
            group.median_of_slowest([sample[2] for sample in samples]),
        )
        if product_count == 1 or computed <= _MAX_COMPUTE_SHARE * message_done:
            return Overlap(node, statistics.median(beside / alone for alone, beside, _ in samples))
        product_count //= 2  # the message ended first


def _find_long_message(group: TimedGroup) -> tuple[torch.Tensor, float]:
    """Return a message whose all-reduce takes long enough, and its seconds."""
    size = _MIN_MESSAGE_BYTES
    while True:
        message = torch.zeros(size // 4, device=group.device)
        work = partial(dist.all_reduce, message, group=group.group)
        group.measure_seconds(work)
        seconds = group.median_of_slowest([group.measure_seconds(work) for _ in range(_REPEATS)])
        if seconds >= _MIN_MESSAGE_SECONDS or size >= _MAX_MESSAGE_BYTES:
            return message, seconds
        size *= 4


def _time_compute(group: TimedGroup, work: Callable[[], object]) -> float:
    """Return the seconds of computation while no message is in flight."""
    clock = Clock(group.device)
    group.barrier()
    begin = clock.mark()
    work()
    end = clock.mark()
    clock.synchronize()
    return clock.elapsed_seconds(begin, end)


def _time_overlapped(group: TimedGroup, message: torch.Tensor, work: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds of computation that starts together with an all-reduce, and of both."""
    clock = Clock(group.device)
    group.barrier()
    begin = clock.mark()
    all_reduce = require_work(dist.all_reduce(message, group=group.group, async_op=True))
    work()
    computed = clock.mark()
    all_reduce.wait()
    end = clock.mark()
    clock.synchronize()
    return clock.elapsed_seconds(begin, computed), clock.elapsed_seconds(begin, end)
