"""Stages and pipelines of a plan on fewer or more devices, with as little changed as possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby

from trainwright.cluster import Device
from trainwright.plan import LayerRun, Order, Pipeline, Sharding, Stage


def on_devices_left(stage: Stage, left: frozenset[Device]) -> Stage | None:
    """The stage without the devices that are gone; None where no tensor group can be made of those that are left.

    Whole tensor groups stay as they are, with the rows in the proportion that they had; what is left of broken ones
    forms new groups, and what does not fill one is not used.
    """
    if all(device in left for device in stage.devices):
        return stage
    first = stage.layers[0]
    if any((run.tensor, run.order) != (first.tensor, first.order) for run in stage.layers):
        return _of_several_degrees(stage, left)
    groups = first.tensor_groups(stage.devices)
    kept = [(group, number) for number, group in enumerate(groups) if all(device in left for device in group)]
    whole = {device for group, _ in kept for device in group}
    loose = [device for device in stage.devices if device in left and device not in whole]
    fresh = [tuple(loose[start : start + first.tensor]) for start in range(0, len(loose), first.tensor)]
    fresh = [group for group in fresh if len(group) == first.tensor]
    members = [*(group for group, _ in kept), *fresh][: sum(first.rows)]
    if not members:
        return None
    runs = []
    for run in stage.layers:
        mean = sum(run.rows) / run.data
        shares = [*(run.rows[number] for _, number in kept), *(mean for _ in fresh)]
        runs.append(_of_rows(run, shares[: len(members)]))
    return Stage(_laid_out(members, first.order), tuple(runs))


def with_more(stage: Stage, devices: Sequence[Device]) -> Stage | None:
    """The stage with as many more replicas as the devices make; None where there is no row or no degree for them."""
    first = stage.layers[0]
    more = len(devices) // first.tensor
    if more == 0 or any((run.tensor, run.order) != (first.tensor, first.order) for run in stage.layers):
        return None
    if first.data + more > sum(first.rows):
        return None
    groups = [*first.tensor_groups(stage.devices)]
    groups += [tuple(devices[n * first.tensor : (n + 1) * first.tensor]) for n in range(more)]
    runs = [_of_rows(run, [*run.rows, *(sum(run.rows) / run.data for _ in range(more))]) for run in stage.layers]
    return Stage(_laid_out(groups, first.order), tuple(runs))


def _of_several_degrees(stage: Stage, left: frozenset[Device]) -> Stage | None:
    """As many of the devices as every tensor degree of the stage divides, in their order, rows even."""
    devices = [device for device in stage.devices if device in left]
    size = sum(stage.layers[0].rows)
    for count in range(len(devices), 0, -1):
        if all(count % run.tensor == 0 and count // run.tensor <= size for run in stage.layers):
            runs = (_of_rows(run, [1.0] * (count // run.tensor)) for run in stage.layers)
            return Stage(tuple(devices[:count]), tuple(runs))
    return None


def _of_rows(run: LayerRun, shares: Sequence[float]) -> LayerRun:
    """The run on so many replicas, which share the same rows in that proportion."""
    sharding = run.sharding if len(shares) > 1 else Sharding.NONE
    return replace(run, data=len(shares), rows=in_proportion(sum(run.rows), shares), sharding=sharding)


def _laid_out(groups: Sequence[tuple[Device, ...]], order: Order) -> tuple[Device, ...]:
    """The devices of a stage, given its tensor groups."""
    if order is Order.TENSOR_INNER:
        return tuple(device for group in groups for device in group)
    return tuple(device for same_part in zip(*groups, strict=True) for device in same_part)


def in_proportion(total: int, shares: Sequence[float]) -> tuple[int, ...]:
    """`total` in whole parts of at least 1, as near to the proportion as that allows: largest remainders first.

    Raises ValueError where there are more parts than units.
    """
    if total < len(shares):
        raise ValueError(f"{total} cannot be split into {len(shares)} parts of at least 1")
    spare, weight = total - len(shares), sum(shares)
    # What a share is due beyond the 1 that everybody gets.
    due = [max(total * share / weight - 1, 0.0) if weight else 1.0 for share in shares]
    scale = spare / sum(due) if sum(due) else 0.0
    exact = [one * scale for one in due]
    parts = [int(one) for one in exact]
    behind = sorted(range(len(parts)), key=lambda number: (parts[number] - exact[number], number))
    for number in range(spare - sum(parts)):
        parts[behind[number % len(parts)]] += 1
    return tuple(1 + part for part in parts)


def with_counts(stages: Sequence[Stage], counts: Sequence[int]) -> tuple[Stage, ...]:
    """The stages with so many layers each; layers that come to a stage are trained as its nearest layer was."""
    found, first = [], 0
    for stage, count in zip(stages, counts, strict=True):
        found.append(_moved(stage, first, count))
        first += count
    return tuple(found)


def _moved(stage: Stage, first: int, count: int) -> Stage:
    if (stage.first, stage.end) == (first, first + count):
        return stage
    nearest = [run_of(stage)(layer) for layer in range(first, first + count)]
    runs = []
    for number, group in groupby(nearest):
        size = len(list(group))
        runs.append(replace(stage.layers[number], first=first, count=size))
        first += size
    return Stage(stage.devices, tuple(runs))


def run_of(stage: Stage) -> Callable[[int], int]:
    """Number of the run that a layer is in or nearest to."""

    def number(layer: int) -> int:
        inside = min(max(layer, stage.first), stage.end - 1)
        return next(index for index, run in enumerate(stage.layers) if inside < run.end)

    return number


def without(stages: Sequence[Stage | None], layers: Sequence[int]) -> tuple[Stage, ...]:
    """Those that are there, the layers of each of the others shared by its neighbours.

    `layers` are the layers of each, those of the missing ones included.
    """
    counts = list(layers)
    here = [number for number, stage in enumerate(stages) if stage is not None]
    for number in (number for number, stage in enumerate(stages) if stage is None):
        behind = [other for other in here if other > number][:1]
        before = [other for other in here if other < number][-1:]
        neighbours = [*behind, *before]
        for index, neighbour in enumerate(neighbours):
            share, more = divmod(layers[number], len(neighbours))
            counts[neighbour] += share + (index < more)
    kept = [stage for stage in stages if stage is not None]
    return with_counts(kept, [counts[number] for number in here]) if kept else ()


def sharing(pipelines: Sequence[Pipeline], rows: int) -> tuple[Pipeline, ...] | None:
    """The pipelines with other numbers of micro-batches, in proportion, so that they take so many rows together.

    None where no numbers near the proportion do.
    """
    taken = sum(one.micro_batches * one.micro_batch_size for one in pipelines)
    if taken == rows:
        return tuple(pipelines)
    counts = [max(one.micro_batches * rows // taken, 1) for one in pipelines]
    left = rows - sum(count * one.micro_batch_size for count, one in zip(counts, pipelines, strict=True))
    for number in sorted(range(len(pipelines)), key=lambda n: -pipelines[n].micro_batch_size):
        more = left // pipelines[number].micro_batch_size if left > 0 else 0
        counts[number] += more
        left -= more * pipelines[number].micro_batch_size
    if left != 0:
        return None
    return tuple(replace(one, micro_batches=count) for one, count in zip(pipelines, counts, strict=True))
