"""Layers dealt out anew among the stages of a plan, by what the stages' devices take for them."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from itertools import pairwise

import numpy as np

from trainwright.cost.links import links_of
from trainwright.plan import Plan
from trainwright.search.auto.cells import Cells
from trainwright.search.auto.setups import Setup, setups, with_setups
from trainwright.search.partition import partition
from trainwright.search.protocol import Problem
from trainwright.search.spans import Array

_KEPT_BYTES, _LEAST_KEPT = 2**26, 16
"""Of tables of stages that are remembered, and how many at least: plans that are looked at one after the other have most
stages in common."""


class Dealing:
    """Of one problem's plans."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        cuts = len(problem.model.layers) + 1
        self._cells = Cells(problem, cuts)
        self._number = {node.name: index for index, node in enumerate(problem.cluster.nodes)}
        self._seconds = lru_cache(max(_KEPT_BYTES // (8 * cuts**2), _LEAST_KEPT))(self._of_stage)

    def dealt(self, plan: Plan) -> Plan:
        """The plan with the cuts that AMP's Eq. 5 likes best, each stage at the degrees of most of its layers.

        Of layers that are computed again each stage keeps its share. Left out of account is what collecting and summing
        weights takes, and what memory allows: the exact replay tells.
        Layers that a stage takes over are computed as those next to them. A pipeline keeps its cuts where some layer has no
        profile at a stage's degree.
        """
        for index, pipeline in enumerate(plan.pipelines):
            before = setups(pipeline)
            if len(before) > 1:
                try:
                    times = np.stack([self._of_setup(stage) for stage in before])
                except ValueError:  # a layer without a profile
                    continue
                ends = partition(times, self._exchanges(before, pipeline.micro_batch_size), pipeline.micro_batches)
                if ends is not None:
                    plan = with_setups(plan, index, _with_ends(before, ends))
        return plan

    def _of_setup(self, stage: Setup) -> Array:
        """[first, end] seconds of a micro-batch in its slowest replica."""
        usual, _ = Counter(stage.layers).most_common(1)[0]
        again = sum(layer.recompute for layer in stage.layers) / len(stage.layers)
        groups = usual.run(0, 1).tensor_groups(stage.devices)
        replicas = tuple(tuple(device.node for device in group) for group in groups)
        return self._seconds(replicas, usual.rows, again)

    def _of_stage(self, replicas: tuple[tuple[str, ...], ...], rows_of: tuple[int, ...], again: float) -> Array:
        """The same of replicas on these nodes, and the share of layers that is computed again."""
        groups = dict.fromkeys(zip(replicas, rows_of, strict=True))
        forward, backward, _, _ = self._cells.sums([(self._cells.cell(group), rows) for group, rows in groups])
        passes = (1 + again) * forward + backward
        found: Array = (passes[:, None, :] - passes[:, :, None]).max(axis=0)
        found[np.tril_indices(len(found))] = np.inf
        return found

    def _exchanges(self, stages: tuple[Setup, ...], rows: int) -> Array:
        """[stage, end] seconds both ways over the link from a stage's last device to the next one's first."""
        links, ratio = links_of(self.problem.cluster), self.problem.runtime.link_ratio
        found = []
        for upper, lower in pairwise(stages):
            here, there = self._number[upper.devices[-1].node], self._number[lower.devices[0].node]
            found.append((1 / links.bandwidth[here, there] + 1 / links.bandwidth[there, here]) / ratio)
        exchanged: Array = np.array(found)[:, None] * (rows * self._cells.row_bytes)
        return exchanged


def _with_ends(stages: tuple[Setup, ...], ends: tuple[int, ...]) -> list[Setup]:
    """The stages with other layers."""
    found, first, start = [], 0, 0
    for stage, end in zip(stages, ends, strict=True):
        size = len(stage.layers)
        layers = tuple(stage.layers[min(max(layer - first, 0), size - 1)] for layer in range(start, end))
        found.append(Setup(stage.devices, layers))
        first, start = first + size, end
    return found
