"""What a replica can be: an accelerator, a tensor degree and its rows, with the least seconds its layers take so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from trainwright.layer import LayerKind
from trainwright.profiles import LayerProfile
from trainwright.search.auto.bound.pools import by_accelerator
from trainwright.search.auto.bound.reach import Reach, reach_of
from trainwright.search.degrees import divisors
from trainwright.search.protocol import Problem

Array = NDArray[np.float64]

NEVER = 1e30
"""Seconds of what there is not."""
_FINENESS = 32
"""Up to so many every number of rows is an option of its own; beyond, rows that differ by less than one part of it share
one."""


@dataclass(frozen=True)
class Options:
    """All options of a problem.

    Attributes:
        accelerators: names; `accelerator` counts them.
        accelerator, tensor, high: [option]; its replicas compute so many rows at a time, at most.
        crosses: [option] whether its tensor group spans nodes.
        forward, backward: [option, kind] least seconds of a layer for any of these rows, tensor all-reduces at the
            best links there are included. Between profiled rows they are linear, so that the least is at an end.
        update: [option, kind] least seconds of the optimizer for a layer that is not sharded.
        activation: [option, kind] least bytes that a layer keeps for the backward.
        reach: by accelerator.
    """

    accelerators: tuple[str, ...]
    accelerator: NDArray[np.intp]
    tensor: NDArray[np.intp]
    high: NDArray[np.intp]
    crosses: NDArray[np.bool_]
    forward: Array
    backward: Array
    update: Array
    activation: Array
    reach: tuple[Reach, ...]

    @property
    def density(self) -> Array:
        """[option] devices for each row of a micro-batch, at least."""
        found: Array = self.tensor / self.high
        return found


def options_of(problem: Problem) -> Options:
    """The options that some plan of the problem may use."""
    return _options_on(_grid(problem), problem, reach_of(problem, by_accelerator(problem)))


def exact_options(problem: Problem, pools: Sequence[Sequence[int]]) -> Options:
    """The same by pool of nodes, with one option for every number of rows up to the global batch, ascending by head."""
    rows = np.arange(1, problem.global_batch_size + 1, dtype=np.intp)
    return _options_on(np.stack([rows, rows], axis=1), problem, reach_of(problem, pools))


def _options_on(grid: NDArray[np.intp], problem: Problem, reach: tuple[Reach, ...]) -> Options:
    kinds = problem.model.kinds
    low, high = grid[:, 0], grid[:, 1]
    columns: dict[str, list[Array]] = {name: [] for name in ("forward", "backward", "update", "activation")}
    heads: list[tuple[int, int, bool]] = []
    lone = len(problem.node_numbers) == 1
    for number, one in enumerate(reach):
        name = one.accelerator
        for tensor in _degrees(problem, name):
            if tensor > len(problem.devices):
                continue
            tables = [_kind_tables(problem, name, kind, tensor, low, high) for kind in kinds]
            stacked = [np.stack(part, axis=1) for part in zip(*tables, strict=True)]
            for crosses in (False, True):
                if (crosses and (tensor == 1 or lone)) or (not crosses and tensor > one.group):
                    continue
                sync = [_sync_seconds(problem, kind, tensor, crosses=crosses, reach=one) for kind in kinds]
                latency, per_row = np.array([s[0] for s in sync]), np.array([s[1] for s in sync])
                added = latency.T[:, None, :] + per_row.T[:, None, :] * low[None, :, None]
                heads.append((number, tensor, crosses))
                columns["forward"].append(stacked[0] + added[0])
                columns["backward"].append(stacked[1] + added[1])
                columns["update"].append(stacked[2])
                columns["activation"].append(stacked[3])
    repeated = np.repeat(np.array(heads), len(grid), axis=0)
    return Options(
        tuple(one.accelerator for one in reach),
        repeated[:, 0],
        repeated[:, 1],
        np.tile(high, len(heads)),
        repeated[:, 2].astype(np.bool_),
        np.concatenate(columns["forward"]),
        np.concatenate(columns["backward"]),
        np.concatenate(columns["update"]),
        np.concatenate(columns["activation"]),
        reach,
    )


def _degrees(problem: Problem, accelerator: str) -> Iterator[int]:
    """Tensor degrees at which a layer of some kind can be costed on the accelerator: others of a stage may have another.

    Where a kind is not divided, any degree will do: each rank of a group computes all of its rows.
    """
    limit = problem.limits.max_tensor_degree or problem.model.max_tensor_degree
    for degree in divisors(problem.model.max_tensor_degree):
        if degree <= min(limit, len(problem.devices)) and any(
            _profiles_of(problem, accelerator, kind, degree) for kind in problem.model.kinds
        ):
            yield degree


def _profiles_of(problem: Problem, accelerator: str, kind: LayerKind, tensor: int) -> tuple[list[LayerProfile], float]:
    """What a kind of layer is costed from, ascending by rows, and how many times that; empty where it cannot be.

    A layer that was too large for so few ranks is costed from a larger degree, as in `Profiles.cost`.
    """
    profiles = problem.profiles
    degree = tensor if problem.setting.divides(kind, tensor) else 1
    name = accelerator, kind.name
    source = degree
    if not profiles.has(*name, degree):
        further = [one for one in profiles.tensor_degrees(*name) if one > degree]
        was_tried = any((one.accelerator, one.kind, one.tensor_degree) == (*name, degree) for one in profiles.too_large)
        if not further or not was_tried:
            return [], 1.0
        source = further[0]
    series = [one for one in profiles.layers if (one.accelerator, one.kind, one.tensor_degree) == (*name, source)]
    return sorted(series, key=lambda profile: profile.rows), source / degree


def _grid(problem: Problem) -> NDArray[np.intp]:
    """[option, (first, last)] rows, gapless from 1 to the global batch; no interval has profiled rows inside."""
    batch = problem.global_batch_size
    starts = {*range(1, min(batch, _FINENESS) + 1), batch}
    row = float(_FINENESS)
    while row < batch:
        row *= 1 + 1 / _FINENESS
        starts.add(int(row))
    for profile in problem.profiles.layers:
        starts.update((profile.rows, profile.rows + 1))
    ordered = sorted(start for start in starts if 1 <= start <= batch)
    return np.array([(a, b - 1) for a, b in pairwise((*ordered, batch + 1))], dtype=np.intp)


def _kind_tables(  # noqa: PLR0913, PLR0917 - a layer, where it runs, and how many rows
    problem: Problem, accelerator: str, kind: LayerKind, tensor: int, low: NDArray[np.intp], high: NDArray[np.intp]
) -> tuple[Array, Array, Array, Array]:
    """[option] forward, backward, update seconds and activation bytes: `Setting.layer_cost` at the better end.

    Beyond reason where it cannot be costed.
    """
    series, times = _profiles_of(problem, accelerator, kind, tensor)
    if not series:
        never = np.full(len(low), NEVER)
        return never, never, never, never
    rows = np.array([profile.rows for profile in series], dtype=np.float64)
    runtime = problem.runtime
    growth, ratio = runtime.row_growth_ratio, runtime.compute_ratio(accelerator)
    found = []
    for field in ("forward_seconds", "backward_seconds", "update_seconds", "activation_bytes"):
        values = np.array([getattr(profile, field) for profile in series], dtype=np.float64) * times
        grows = field != "update_seconds" or len(series) > 1
        ends = [_along(rows, values, at, grows=grows) for at in (low, high)]
        if field in {"forward_seconds", "backward_seconds"}:
            one = _along(rows, values, np.ones(1), grows=True)
            ends = [ratio * np.maximum(one + growth * (end - one), 0.0) for end in ends]
        elif field == "update_seconds":
            ends = [ratio * end for end in ends]
        else:
            ends = [runtime.activation_ratio * end for end in ends]
        found.append(np.minimum(*ends))
    return found[0], found[1], found[2], found[3]


def _along(rows: Array, values: Array, at: NDArray[np.generic], *, grows: bool) -> Array:
    """Linear between profiled rows and on beyond them, as `Profiles.cost`; a lone profile is scaled where it grows."""
    where = at.astype(np.float64)
    if len(rows) == 1:
        scaled: Array = values[0] * where / rows[0] if grows else np.full_like(where, values[0])
        return scaled
    right = np.clip(np.searchsorted(rows, where), 1, len(rows) - 1)
    start, step = values[right - 1], rows[right] - rows[right - 1]
    found: Array = np.maximum(start + (where - rows[right - 1]) / step * (values[right] - start), 0.0)
    return found


def _sync_seconds(
    problem: Problem, kind: LayerKind, tensor: int, *, crosses: bool, reach: Reach
) -> tuple[tuple[float, float], tuple[float, float]]:
    """(latency, seconds per row) of the tensor all-reduces of a forward, and of a backward, on the best links there are."""
    if tensor == 1 or not kind.is_tensor_parallel:
        return (0.0, 0.0), (0.0, 0.0)
    steps, per_byte = reach.all_reduce(tensor, crosses=crosses, ratio=problem.runtime.link_ratio)
    sides = [
        [getattr(segment, f"{side}_all_reduce_elements_per_row") for segment in kind.segments]
        for side in ("forward", "backward")
    ]
    size = problem.model.dtype.num_bytes
    counts = [sum(1 for elements in side if elements) for side in sides]
    return (
        (counts[0] * steps, counts[1] * steps),
        (sum(sides[0]) * size * per_byte, sum(sides[1]) * size * per_byte),
    )
