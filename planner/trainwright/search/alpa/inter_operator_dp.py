"""Dynamic program over stages and submeshes for one t_max (Alpa Eq. 3), with boundary messages added."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from trainwright.cost.boundary_terms import boundary_terms
from trainwright.cost.layer_sums import Array
from trainwright.cost.stage_tables import StageSpans, StageTables
from trainwright.cost.time_terms import pipeline_seconds
from trainwright.search.alpa.stage_candidates import Indices, StageCandidates
from trainwright.search.alpa.submeshes import Block, DeviceChain
from trainwright.search.problem import Problem


@dataclass(frozen=True, eq=False)
class StageBoundaryCosts:
    """Message costs at stage boundaries, by the number of devices before the boundary.

    The paper omits messages from Eq. 2 because its networks are fast. Here they lengthen a micro-batch's path, so they
    count in the sum; and one boundary's messages in one direction are sequential, so the slowest boundary bounds t_max
    like a stage.

    Attributes:
        message_bytes: `[boundary]` bytes of one micro-batch; 0 at both ends of the model.
        seconds_per_byte: `[direction, devices before]` seconds per byte, forward then backward.
        latency_seconds: `[direction, devices before]` seconds, forward then backward.
    """

    message_bytes: Array
    seconds_per_byte: Array
    latency_seconds: Array

    def seconds(self, edges: StageCandidates, chosen: Indices, devices_before: Indices) -> tuple[Array, Array]:
        """Return seconds of all messages received by the chosen stages, and of the longer direction without latency.

        Each tensor rank of a stage receives all rows: activations from the previous stage, gradients from the next one.
        """
        copies, devices_after = edges.message_copies[chosen], devices_before + edges.size[chosen]
        there = self.message_bytes[edges.first[chosen]] * copies * self.seconds_per_byte[0, devices_before]
        back = self.message_bytes[edges.end[chosen]] * copies * self.seconds_per_byte[1, devices_after]
        return there + back + self.latency_seconds[0, devices_before] + self.latency_seconds[
            1, devices_after
        ], np.maximum(there, back)

    def possible_seconds(self, edges: StageCandidates) -> Array:
        """Return all distinct message seconds that any placement of these stages can give, ascending."""
        there = np.unique(self.message_bytes[edges.first] * edges.message_copies)
        back = np.unique(self.message_bytes[edges.end] * edges.message_copies)
        seconds_of_sides = [
            np.multiply.outer(sizes, np.unique(pace))
            for sizes, pace in zip((there, back), self.seconds_per_byte, strict=True)
        ]
        return np.unique(np.concatenate([values.ravel() for values in seconds_of_sides]))


def no_boundary_costs(clusters: int, devices: int) -> StageBoundaryCosts:
    """Return zero message costs, as in the paper's Eq. 2."""
    return StageBoundaryCosts(np.zeros(clusters + 1), np.zeros((2, devices + 1)), np.zeros((2, devices + 1)))


def boundary_costs_of(problem: Problem, spans: StageSpans, line: DeviceChain, rows: int) -> StageBoundaryCosts:
    """Return message costs along the device chain: within nodes, between neighbouring nodes of a block and between blocks."""
    paces, latencies = np.zeros((2, line.size + 1)), np.zeros((2, line.size + 1))
    number = problem.cost_context.node_numbers

    def lay(places: slice, source: str, target: str) -> None:
        nodes = np.array([number[source]]), np.array([number[target]])
        paces[:, places], latencies[:, places] = boundary_terms(*nodes, problem.cost_context)

    last: Block | None = None
    for block, start in zip(line.blocks, line.starts, strict=False):
        end = start + block.size
        if block.width > 1:
            lay(slice(start + 1, end), block.nodes[0], block.nodes[0])
        if len(block.nodes) > 1:
            lay(slice(start + block.width, end, block.width), block.nodes[0], block.nodes[1])
        if last is not None:
            lay(slice(start, start + 1), last.nodes[-1], block.nodes[0])
        last = block
    return StageBoundaryCosts(rows * StageTables(problem.cost_context, spans).row_bytes, paces, latencies)


UNREACHABLE = np.iinfo(np.int64).min // 4


class ReachableStates:
    """Bounds on the number of devices used before a boundary, if devices may stay idle.

    Whether a stage fits after another depends only on that number, so each bound takes one pass over the stages.
    """

    def __init__(self, edges: StageCandidates, clusters: int, devices: int) -> None:
        self.candidates, self.clusters, self.devices = edges, clusters, devices
        self._starts = np.searchsorted(edges.first, np.arange(clusters + 1))
        self._by_end = np.argsort(edges.end, kind="stable")
        self._ends = np.searchsorted(edges.end[self._by_end], np.arange(clusters + 2))

    def max_devices_before(self, t_max: float) -> Indices:
        """Return `[boundary]` the most devices usable before it that leave enough for the stages after it."""
        device_counts = np.full(self.clusters + 1, UNREACHABLE, dtype=np.int64)
        device_counts[-1] = self.devices
        for boundary in range(self.clusters - 1, -1, -1):
            here = slice(self._starts[boundary], self._starts[boundary + 1])
            edges = self.candidates
            place = np.minimum(device_counts[edges.end[here]] - edges.size[here], edges.max_devices_before[here])
            place = np.where(
                (place >= edges.min_devices_before[here]) & (edges.seconds[here] <= t_max), place, UNREACHABLE
            )
            device_counts[boundary] = place.max(initial=UNREACHABLE)
        return device_counts

    def min_devices_before(self, t_max: float) -> Indices:
        """Return `[boundary]` the fewest devices that the stages before it need."""
        device_counts = np.full(self.clusters + 1, -UNREACHABLE, dtype=np.int64)
        device_counts[0] = 0
        for boundary in range(1, self.clusters + 1):
            here = self._by_end[self._ends[boundary] : self._ends[boundary + 1]]
            edges = self.candidates
            place = np.maximum(device_counts[edges.first[here]], edges.min_devices_before[here])
            open_here = (place <= edges.max_devices_before[here]) & (edges.seconds[here] <= t_max)
            device_counts[boundary] = np.where(open_here, place + edges.size[here], -UNREACHABLE).min(
                initial=-UNREACHABLE
            )
        return device_counts

    def min_sum_seconds(self) -> float:
        """Return a lower bound on Σ t_i of the whole model that ignores device counts."""
        best = np.full(self.clusters + 1, np.inf)
        best[-1] = 0.0
        for boundary in range(self.clusters - 1, -1, -1):
            here = slice(self._starts[boundary], self._starts[boundary + 1])
            best[boundary] = (self.candidates.seconds[here] + best[self.candidates.end[here]]).min(initial=np.inf)
        return float(best[0])

    def min_t_max(self) -> float:
        """Return a lower bound on any pipeline's longest stage, infinite if no pipeline exists."""
        times = np.unique(self.candidates.seconds)
        low, high = 0, len(times)
        while low < high:
            middle = (low + high) // 2
            if self.max_devices_before(float(times[middle]))[0] >= 0:
                high = middle
            else:
                low = middle + 1
        return float(times[low]) if low < len(times) else np.inf


ROUNDING = 1e-9
"""Relative tolerance for rounding errors of sums."""


@dataclass(frozen=True)
class StageAssignment:
    """Stages in pipeline order, as indices of stage candidates.

    Attributes:
        sum_seconds: Σ t_i plus all boundary messages.
        longest_seconds: max t_j, or the slowest boundary's messages in one direction if longer.
    """

    candidates: tuple[int, ...]
    sum_seconds: float
    longest_seconds: float

    def seconds(self, micro_batches: int) -> float:
        """Return T of Eq. 2."""
        return pipeline_seconds(self.sum_seconds, self.longest_seconds, micro_batches)


@dataclass(frozen=True, eq=False)
class _Transitions:
    """Stage candidates at every number of devices used before them, sorted by (boundary, devices before).

    Attributes:
        candidate: index of the stage candidate.
        seconds: the stage plus the messages into it.
        longest: the longer of the stage and its messages in one direction.
        source, target: state before and after the stage: boundary × (all devices + 1) + devices used.
    """

    candidate: Indices
    seconds: Array
    longest: Array
    source: Indices
    target: Indices

    def __getitem__(self, chosen: NDArray[np.bool_] | NDArray[np.intp]) -> _Transitions:
        return _Transitions(
            self.candidate[chosen],
            self.seconds[chosen],
            self.longest[chosen],
            self.source[chosen],
            self.target[chosen],
        )


class InterOperatorDP:
    """Eq. 3 for one set of stage candidates: F(s, k, d; t_max), where d counts the devices left for the remaining stages.

    Device blocks follow the pipeline in a fixed order, so the number of devices used also determines their types.
    """

    def __init__(self, edges: StageCandidates, boundary_costs: StageBoundaryCosts, max_stages: int) -> None:
        self.candidates, self.boundary_costs = edges, boundary_costs
        self.clusters, self.devices = (
            len(boundary_costs.message_bytes) - 1,
            boundary_costs.seconds_per_byte.shape[1] - 1,
        )
        self.max_stages = min(max_stages, self.clusters)
        self.reachable = ReachableStates(edges, self.clusters, self.devices)
        self._states_per_boundary = self.devices + 1

    def relaxation(self, t_max: float, unevenness: float = 0.0) -> Relaxation:
        """Solve the program without s, so that every stage fits in memory whatever follows it.

        `unevenness` adds that multiple of t_i² / t_max to every t_i.
        """
        moves = self._transitions(t_max)
        if unevenness:
            moves = replace(moves, seconds=moves.seconds + unevenness * moves.longest**2 / t_max)
        size = (self.clusters + 1) * self._states_per_boundary
        suffix_seconds = np.full(size, np.inf)
        suffix_seconds[-1] = 0.0
        slices = np.searchsorted(moves.source, np.arange(self.clusters + 1) * self._states_per_boundary)
        for boundary in range(self.clusters - 1, -1, -1):
            here = slice(slices[boundary], slices[boundary + 1])
            source = moves.source[here]
            if len(source):
                values = moves.seconds[here] + suffix_seconds[moves.target[here]]
                starts = _run_starts(source)
                suffix_seconds[source[starts]] = np.minimum.reduceat(values, starts)
        useful = np.isfinite(suffix_seconds[moves.target])
        moves = moves[useful]
        prefix_seconds = np.full(size, np.inf)
        prefix_seconds[0] = 0.0
        slices = np.searchsorted(moves.source, np.arange(self.clusters + 1) * self._states_per_boundary)
        for boundary in range(self.clusters):
            here = slice(slices[boundary], slices[boundary + 1])
            np.minimum.at(prefix_seconds, moves.target[here], moves.seconds[here] + prefix_seconds[moves.source[here]])
        return Relaxation(self, moves, prefix_seconds, suffix_seconds)

    def assignment_of(self, edges: Indices) -> StageAssignment:
        devices_before = np.cumsum(self.candidates.size[edges]) - self.candidates.size[edges]
        sent, longer = self.boundary_costs.seconds(self.candidates, edges, devices_before)
        seconds = self.candidates.seconds[edges]
        longest = float(np.maximum(seconds, longer).max())
        return StageAssignment(tuple(edges.tolist()), math.fsum((seconds + sent).tolist()), longest)

    def _transitions(self, t_max: float) -> _Transitions:
        """Return every stage of at most `t_max` seconds at every position that leaves enough devices for the others."""
        latest, earliest = self.reachable.max_devices_before(t_max), self.reachable.min_devices_before(t_max)
        edges = self.candidates
        low = np.maximum(np.maximum(edges.min_devices_before, earliest[edges.first]), earliest[edges.end] - edges.size)
        high = np.minimum(np.minimum(edges.max_devices_before, latest[edges.first]), latest[edges.end] - edges.size)
        chosen = np.flatnonzero((edges.seconds <= t_max) & (high >= low))
        low, counts = low[chosen], (high - low)[chosen] + 1
        edge = np.repeat(chosen, counts)
        place = np.arange(len(edge)) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(low, counts)
        sent, longer = self.boundary_costs.seconds(edges, edge, place)
        stage = edges.seconds[edge]
        source, target = (
            edges.first[edge] * self._states_per_boundary + place,
            edges.end[edge] * self._states_per_boundary + place + edges.size[edge],
        )
        moves = _Transitions(edge, stage + sent, np.maximum(stage, longer), source, target)
        order = np.argsort(source, kind="stable")
        return moves[order[moves.longest[order] <= t_max]]


class Relaxation:
    """Solution of F without s from both ends, which bounds every pipeline through a given stage from below."""

    def __init__(
        self, programme: InterOperatorDP, moves: _Transitions, prefix_seconds: Array, suffix_seconds: Array
    ) -> None:
        self.programme, self._transitions, self._prefix_seconds, self._suffix_seconds = (
            programme,
            moves,
            prefix_seconds,
            suffix_seconds,
        )

    @property
    def sum_seconds(self) -> float:
        """Return the least Σ t_i."""
        return float(self._suffix_seconds[0])

    def best_assignments(self, limit: float) -> list[StageAssignment]:
        """Return the assignment of least Σ t_i within memory for each stage count, ascending, omitting those above the limit."""
        if not self.sum_seconds <= limit:
            return []
        moves = self._transitions
        through = self._prefix_seconds[moves.source] + moves.seconds + self._suffix_seconds[moves.target]
        table = _StageTable(self.programme, moves[through <= limit * (1 + ROUNDING)])
        return table.assignments(limit)


class _StageTable:
    """F(s, k, d) over the remaining transitions, one table per s."""

    def __init__(self, programme: InterOperatorDP, moves: _Transitions) -> None:
        self.programme, self.transitions = programme, moves
        self.seconds = moves.seconds
        self.max_remaining_stages = programme.candidates.max_remaining_stages[moves.candidate]
        # States that no transition touches would only enlarge the tables.
        self.states, numbers = np.unique(np.concatenate([moves.source, moves.target]), return_inverse=True)
        self.source, self.target = numbers[: len(moves.candidate)], numbers[len(moves.candidate) :]
        self.starts = _run_starts(self.source)
        self.tables: list[Array] = []

    def assignments(self, limit: float) -> list[StageAssignment]:
        """Return the best assignment for each stage count, ascending."""
        whole = (self.programme.clusters + 1) * (self.programme.devices + 1) - 1
        if not len(self.source) or self.states[0] != 0 or self.states[-1] != whole:
            return []
        suffix_seconds = np.full(len(self.states), np.inf)
        suffix_seconds[-1] = 0.0
        self.tables = [suffix_seconds]
        assignments = []
        for stages in range(1, self.programme.max_stages + 1):
            values = np.where(self.max_remaining_stages >= stages, self.seconds + suffix_seconds[self.target], np.inf)
            suffix_seconds = np.full(len(self.states), np.inf)
            suffix_seconds[self.source[self.starts]] = np.minimum.reduceat(values, self.starts)
            self.tables.append(suffix_seconds)
            if np.isfinite(suffix_seconds[0]) and suffix_seconds[0] <= limit * (1 + ROUNDING):
                assignments.append(self._trace_back(stages))
            elif not np.isfinite(suffix_seconds).any():
                break
        return assignments

    def _trace_back(self, stages: int) -> StageAssignment:
        state, chosen = 0, []
        for left in range(stages, 0, -1):
            low, high = np.searchsorted(self.source, [state, state + 1])
            here = slice(low, high)
            values = np.where(
                self.max_remaining_stages[here] >= left,
                self.seconds[here] + self.tables[left - 1][self.target[here]],
                np.inf,
            )
            move = int(low) + int(values.argmin())
            chosen.append(move)
            state = int(self.target[move])
        return self.programme.assignment_of(self.transitions.candidate[chosen])


def _run_starts(values: Indices) -> NDArray[np.intp]:
    """Return the indices at which runs of equal values begin."""
    return np.flatnonzero(np.concatenate(([True], values[1:] != values[:-1]))) if len(values) else np.empty(0, np.intp)
