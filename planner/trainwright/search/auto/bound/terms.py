"""What the stages of a chain must at least take, hold and sum: by option and by interval of layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from trainwright.cost.links import links_of
from trainwright.cost.memory import RECEIVED_AHEAD, loss_bytes, optimizer_bytes
from trainwright.search.auto.bound.options import Array, Options
from trainwright.search.protocol import Problem

Indices = NDArray[np.intp]
_MANY_ROWS = 1000
_FEW_SUMS = 1000
"""So few are picked for all intervals at once."""


@dataclass(frozen=True)
class Terms:
    """Of one problem. Intervals are numbered by their first layer, and then by their end."""

    problem: Problem
    options: Options

    @cached_property
    def kind_of(self) -> Indices:
        """[layer] number of its kind."""
        names = [kind.name for kind in self.problem.model.kinds]
        return np.array([names.index(name) for name in self.problem.model.layers], dtype=np.intp)

    @cached_property
    def first(self) -> Indices:
        """[interval] its first layer."""
        return self._ends[0]

    @cached_property
    def end(self) -> Indices:
        """[interval] the layer behind its last."""
        return self._ends[1]

    @cached_property
    def _ends(self) -> tuple[Indices, Indices]:
        first, last = np.triu_indices(self.size)
        return first, last + 1

    def starting(self, layer: int) -> slice:
        """The intervals that start with a layer; their ends are one after the other."""
        before = layer * (2 * self.size - layer + 1) // 2
        return slice(before, before + self.size - layer)

    def ending(self, layer: int) -> Indices:
        """Numbers of the intervals of which a layer is the first behind them, by their own first one."""
        firsts = np.arange(layer)
        found: Indices = firsts * (2 * self.size - firsts - 1) // 2 + layer - 1
        return found

    @cached_property
    def size(self) -> int:
        """Layers."""
        return len(self.problem.model.layers)

    def summed(self, by_kind: Array, more: Array | None = None) -> Array:
        """[…, interval] sums over the layers of what is given by kind […, kind]; their first layer takes so much more."""
        by_layer = by_kind.take(self.kind_of, axis=-1)
        zero = np.zeros((*by_layer.shape[:-1], 1))
        sums = np.concatenate([zero, np.cumsum(by_layer, axis=-1)], axis=-1)
        before = sums[..., :-1] if more is None else sums[..., :-1] - more.take(self.kind_of, axis=-1)
        if sums.size < _FEW_SUMS:
            ends: Array = sums.take(self.end, axis=-1)
            return ends - before.take(self.first, axis=-1)
        found: Array = np.empty((*by_layer.shape[:-1], len(self.first)))
        for layer in range(self.size):
            np.subtract(sums[..., layer + 1 :], before[..., layer, None], out=found[..., self.starting(layer)])
        return found

    @cached_property
    def has_several_owners(self) -> NDArray[np.bool_]:
        """[interval] whether several of its layers share a weight."""
        found = np.zeros(len(self.first), dtype=np.bool_)
        for owners in self._owners.values():
            found |= self.summed(owners) > 1
        return found

    @cached_property
    def _owners(self) -> dict[str, Array]:
        """By shared weight: [kind] 1 for those that hold it."""
        kinds = self.problem.model.kinds
        names = sorted({kind.shared_weight for kind in kinds if kind.shared_weight is not None})
        return {name: np.array([float(kind.shared_weight == name) for kind in kinds]) for name in names}

    def updated_once(self, tensor: int, seconds: Array) -> tuple[Array, float]:
        """Of optimizer seconds [kind]: [kind] the share that counts, and the share of these that a run has at least.

        A stage updates what several of its layers share once, with the first run that holds it: so of all layers but the
        model's first owner that weight's part is left out. A run spares as much of all its layers' seconds as of its values.
        """
        setting, model = self.problem.setting, self.problem.model
        values = np.array([setting.values_at(kind, tensor) for kind in model.kinds], dtype=np.float64)
        own, total = np.ones(len(values)), self.summed(values)
        held = total.copy()
        for name, owners in self._owners.items():
            shared = np.array([setting.shared_at(kind, tensor) for kind in model.kinds]) * owners
            first = setting.first_owner[name]
            repeated = owners * (
                (np.arange(len(owners)) != self.kind_of[first]) | (model.layers.count(model.layers[first]) > 1)
            )
            own = np.minimum(own, 1 - repeated * shared / np.maximum(values, 1.0))
            # Behind the model's first owner another run of the stage may hold it already.
            held -= np.maximum(self.summed(owners) - (self.first <= first), 0.0) * shared.max()
        whole, counted = self.summed(seconds), self.summed(seconds * own)
        there = (counted > 0) & (total > 0)
        kept = np.where(
            there, whole * np.maximum(held, 0.0) / np.maximum(total, 1.0) / np.maximum(counted, 1e-300), 1.0
        )
        return own, float(min(kept.min(initial=1.0), 1.0))

    def held_values(self, tensor: int) -> Array:
        """[interval] values of one rank, a weight that several layers share once."""
        setting, kinds = self.problem.setting, self.problem.model.kinds
        found = self.summed(np.array([setting.values_at(kind, tensor) for kind in kinds], float))
        shared = np.array([setting.shared_at(kind, tensor) for kind in kinds])
        for owners in self._owners.values():
            found -= np.maximum(self.summed(owners) - 1, 0.0) * (shared * owners).max()
        return np.maximum(found, 0.0)

    @cached_property
    def ring_rates(self) -> Array:
        """[number of nodes] bytes per second of the slowest step of a ring over so many, at best; the last for all more."""
        return ring_rates(self.problem)

    @cached_property
    def incoming(self) -> Array:
        """[interval] bytes per row that it takes in."""
        return self._boundary[self.first]

    @cached_property
    def outgoing(self) -> Array:
        """[interval] bytes per row that it passes on."""
        return self._boundary[self.end]

    @cached_property
    def input_bytes(self) -> Array:
        """[layer] bytes per row of its input."""
        return self._boundary[:-1]

    @cached_property
    def _boundary(self) -> Array:
        model = self.problem.model
        size = len(model.layers)
        return np.array([0.0, *(model.output_bytes_per_row(layer) for layer in range(size - 1)), 0.0])

    def state_bytes(self, tensor: int, replicas: Indices, *, single: bool) -> Array:
        """[count, interval] weights, gradients and optimizer state of a rank, all sharded over so many replicas [count]."""
        setting, model = self.problem.setting, self.problem.model
        divided = model.dtype.num_bytes + optimizer_bytes(model, self.problem.optimizer)
        whole = setting.gradient_dtype.num_bytes
        if single:
            divided, whole = divided + whole, 0
        found: Array = self.held_values(tensor)[None, :] * (whole + divided / replicas)[:, None]
        return found

    def moving_bytes(self, kept: int) -> Array:
        """[interval] bytes per row of tensors on their way."""
        found: Array = (kept + RECEIVED_AHEAD) * self.outgoing + RECEIVED_AHEAD * self.incoming
        return found

    def loss_bytes(self, tensor: int) -> Array:
        """[interval] of the loss for each row, where it is there."""
        each = max(loss_bytes(self.problem.setting, tensor, _MANY_ROWS) - 1, 0) / _MANY_ROWS
        found: Array = (self.end == self.size) * each
        return found


def ring_rates(problem: Problem) -> Array:
    """[number of nodes] the largest rate at which so many nodes are connected: a ring over them has no faster step."""
    cluster, indices = problem.cluster, problem.node_numbers
    ratio = problem.runtime.link_ratio
    if not any(link.source != link.target for link in cluster.links):
        ports = [cluster.nodes[index].network for index in indices]
        cards = sorted((port.bandwidth_bytes_per_second for port in ports if port is not None), reverse=True)
        return np.array([np.inf, np.inf, *cards[1:]]) * ratio
    table = links_of(cluster).bandwidth[np.ix_(indices, indices)]
    mutual = np.maximum(table, table.T)
    upper = np.triu_indices(len(indices), 1)
    order = np.argsort(-mutual[upper], kind="stable")
    parent, size, largest = list(range(len(indices))), [1] * len(indices), 1
    rates = [np.inf, np.inf]
    for edge in order.tolist():
        a, b = _root(parent, int(upper[0][edge])), _root(parent, int(upper[1][edge]))
        if a != b:
            parent[a] = b
            size[b] += size[a]
            while largest < size[b]:
                largest += 1
                rates.append(float(mutual[upper][edge]))
            if largest == len(indices):
                break
    return np.array(rates) * ratio


def _root(parent: list[int], node: int) -> int:
    while parent[node] != node:
        parent[node] = parent[parent[node]]
        node = parent[node]
    return node


def geometric(highest: int, exact: int, ratio: float) -> list[tuple[int, int]]:
    """Gapless intervals of the numbers 1 … highest: single ones up to `exact`, then of about that ratio."""
    starts, value = list(range(1, min(highest, exact) + 1)), float(exact)
    while starts[-1] < highest and value < highest:
        value = max(value * ratio, starts[-1] + 1)
        if int(value) <= highest:
            starts.append(int(value))
    return [(a, b - 1) for a, b in pairwise((*starts, highest + 1))]
