"""Which states of the stage programme can be part of a whole pipeline whose stages take at most t_max."""

from __future__ import annotations

import numpy as np

from trainwright.search.alpa.edges import Edges, Indices

NEVER = np.iinfo(np.int64).min // 4


class Reach:
    """Bounds on the devices used before a boundary, were devices allowed to idle.

    That is all that whether a stage fits behind another depends on, so each bound takes one pass over the stages.
    """

    def __init__(self, edges: Edges, clusters: int, devices: int) -> None:
        self.edges, self.clusters, self.devices = edges, clusters, devices
        self._starts = np.searchsorted(edges.first, np.arange(clusters + 1))
        self._by_end = np.argsort(edges.end, kind="stable")
        self._ends = np.searchsorted(edges.end[self._by_end], np.arange(clusters + 2))

    def latest(self, longest: float) -> Indices:
        """[boundary] the most devices that may be used before it so that what follows still finds room."""
        found = np.full(self.clusters + 1, NEVER, dtype=np.int64)
        found[-1] = self.devices
        for boundary in range(self.clusters - 1, -1, -1):
            here = slice(self._starts[boundary], self._starts[boundary + 1])
            edges = self.edges
            place = np.minimum(found[edges.end[here]] - edges.size[here], edges.high[here])
            place = np.where((place >= edges.low[here]) & (edges.seconds[here] <= longest), place, NEVER)
            found[boundary] = place.max(initial=NEVER)
        return found

    def earliest(self, longest: float) -> Indices:
        """[boundary] the fewest devices that what lies before it needs."""
        found = np.full(self.clusters + 1, -NEVER, dtype=np.int64)
        found[0] = 0
        for boundary in range(1, self.clusters + 1):
            here = self._by_end[self._ends[boundary] : self._ends[boundary + 1]]
            edges = self.edges
            place = np.maximum(found[edges.first[here]], edges.low[here])
            open_here = (place <= edges.high[here]) & (edges.seconds[here] <= longest)
            found[boundary] = np.where(open_here, place + edges.size[here], -NEVER).min(initial=-NEVER)
        return found

    def least_sum(self) -> float:
        """Σ t_i of the whole model at least, whatever devices its stages use."""
        best = np.full(self.clusters + 1, np.inf)
        best[-1] = 0.0
        for boundary in range(self.clusters - 1, -1, -1):
            here = slice(self._starts[boundary], self._starts[boundary + 1])
            best[boundary] = (self.edges.seconds[here] + best[self.edges.end[here]]).min(initial=np.inf)
        return float(best[0])

    def shortest_longest(self) -> float:
        """No pipeline has a longest stage shorter than this; infinite where there is none."""
        times = np.unique(self.edges.seconds)
        low, high = 0, len(times)
        while low < high:
            middle = (low + high) // 2
            if self.latest(float(times[middle]))[0] >= 0:
                high = middle
            else:
                low = middle + 1
        return float(times[low]) if low < len(times) else np.inf
