"""Galvatron-BMW's plain algorithms: every sequence of strategies, Algorithm 3's table, and Algorithm 2's queue."""

from __future__ import annotations

import math
from collections import deque
from itertools import product

import numpy as np
from numpy.typing import NDArray

from trainwright.search.galvatron.pipeline_solutions import PipelineSplit, StageEnds
from trainwright.search.galvatron.strategy_dp import StageChoices

Path = tuple[int, ...]


def objective(choices: StageChoices, path: Path) -> float:
    """Σ c(l, s) + R(l, s, s')."""
    total = sum(float(choices.seconds[layer, s]) for layer, s in enumerate(path))
    for layer in range(1, len(path)):
        before, after = choices.layouts[path[layer - 1]], choices.layouts[path[layer]]
        total += float(choices.transformation_seconds[layer, before, after])
    return total


def needed_bytes(choices: StageChoices, path: Path) -> float:
    """Return E_all of Eq. 2. During a layer's backward all later layers have released their bytes."""
    forward = sum(float(choices.forward_bytes[layer, s]) for layer, s in enumerate(path))
    peaks = [0.0]
    for layer, s in enumerate(path):
        released = sum(float(choices.released_bytes[k, path[k]]) for k in range(layer + 1, len(path)))
        peaks.append(float(choices.peak_bytes[layer, s]) - released)
    return forward + max(peaks)


def brute_force(choices: StageChoices) -> float:
    """Return the minimum objective of all assignments that fit; infinite if none does."""
    layers, size = choices.seconds.shape
    paths = np.array(list(product(range(size), repeat=layers))).T
    seconds, held = of_all(choices, paths)
    return float(np.where(held <= choices.budget_bytes, seconds, np.inf).min())


def of_all(choices: StageChoices, paths: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return objective and E_all of assignments `[layer, assignment]`."""
    layers = range(len(paths))
    seconds = sum(choices.seconds[layer, paths[layer]] for layer in layers)
    for layer in layers[1:]:
        seconds = (
            seconds
            + choices.transformation_seconds[layer, choices.layouts[paths[layer - 1]], choices.layouts[paths[layer]]]
        )
    forward = sum(choices.forward_bytes[layer, paths[layer]] for layer in layers)
    peaks = [np.zeros(paths.shape[1])]
    for layer in layers:
        released = sum(
            (choices.released_bytes[k, paths[k]] for k in layers[layer + 1 :]), start=np.zeros(paths.shape[1])
        )
        peaks.append(choices.peak_bytes[layer, paths[layer]] - released)
    return seconds, forward + np.max(peaks, axis=0)


def table_algorithm(choices: StageChoices, granules: int) -> Path | None:
    """Algorithm 3: a table over forward budgets in granules, each layer rounded up; the largest valid budget wins."""
    layers, size = choices.seconds.shape
    granule = choices.budget_bytes / granules
    need = [[math.ceil(float(value) / granule - 1e-9) for value in row] for row in choices.forward_bytes]
    empty: tuple[float, Path] = (math.inf, ())
    table = [[empty] * size for _ in range(granules + 1)]
    for budget in range(granules + 1):
        for s in range(size):
            if need[0][s] <= budget:
                table[budget][s] = (float(choices.seconds[0, s]), (s,))
    for layer in range(1, layers):
        table = [
            [_extended(choices, table, budget - need[layer][s], layer, s) for s in range(size)]
            for budget in range(granules + 1)
        ]
    best: Path | None = None
    for row in table[1:]:
        seconds, path = min(row)
        if seconds == math.inf:
            continue
        if needed_bytes(choices, path) > choices.budget_bytes:
            break
        best = path
    return best


def _extended(
    choices: StageChoices, table: list[list[tuple[float, Path]]], budget: int, layer: int, s: int
) -> tuple[float, Path]:
    """Eq. 4 for one layer, strategy and forward budget."""
    if budget < 0:
        return math.inf, ()
    best: tuple[float, Path] = (math.inf, ())
    for before, (seconds, path) in enumerate(table[budget]):
        total = seconds + float(choices.transformation_seconds[layer, choices.layouts[before], choices.layouts[s]])
        if total < best[0]:
            best = (total, path)
    return (best[0] + float(choices.seconds[layer, s]), (*best[1], s)) if best[1] else best


def plain_partition(
    cut: PipelineSplit, ends: StageEnds, granules: int
) -> tuple[float, list[float], list[float]] | None:
    """Eq. 8, steady seconds and bytes of every stage of a partition; None where a stage does not fit."""
    steady, last, held = [], [], []
    for stage, first, end in zip(cut.stages, (0, *ends), ends, strict=False):
        path = table_algorithm(stage.choices(first, end, 0.0, stage.group.budget_bytes), granules)
        if path is None or stage.exact_bytes(first, path)[1] > 0:
            return None
        seconds = stage.seconds(first, end, path)
        steady.append(seconds[0])
        last.append(seconds[1])
        held.append(stage.exact_bytes(first, path)[0])
    sent = sum(float(cut.exchange_seconds[number, end]) for number, end in enumerate(ends[:-1]))
    return (cut.micro_batches - 1) * max(steady) + sum(last) + sent, steady, held


def plain_queue(
    cut: PipelineSplit, memory_balanced: StageEnds, time_balanced: StageEnds | None, granules: int
) -> float:
    """Run Algorithm 2: return the minimum of Eq. 8 from p_m towards p_t; infinite if nothing fits."""
    reference = plain_partition(cut, time_balanced, granules) if time_balanced else None
    fullest = max(reference[2]) if reference else math.inf
    best = math.inf
    queue, seen = deque([memory_balanced]), {memory_balanced}
    while queue:
        ends = queue.popleft()
        found = plain_partition(cut, ends, granules)
        if found is None:
            continue
        best = min(best, found[0])
        slowest = found[1].index(max(found[1]))
        for place, step in ((slowest - 1, 1), (slowest, -1)):
            if not 0 <= place < len(ends) - 1:
                continue
            moved = (*ends[:place], ends[place] + step, *ends[place + 1 :])
            if moved in seen or any(a >= b for a, b in zip((0, *moved), moved, strict=False)):
                continue
            seen.add(moved)
            new = plain_partition(cut, moved, granules)
            if new is not None and max(new[1]) <= max(found[1]) and max(new[2]) <= fullest:
                queue.append(moved)
    return best


def plain_micro_batches(batch: int, stages: int) -> int:
    """Return four micro-batches per stage, rounded down to a divisor of the batch."""
    return max(count for count in range(1, batch + 1) if batch % count == 0 and count <= 4 * stages)
