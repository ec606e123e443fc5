"""What goes from stage to stage: messages, and sums of weights that the first and the last stage share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trainwright.search.auto.bound.options import Array
from trainwright.search.auto.bound.shares import Shares
from trainwright.search.auto.bound.sums import across_rates, between_of, card_of, inside_of, shared_values

_SAFE = 1 - 1e-6


@dataclass(frozen=True)
class Crossings:
    """Of stages with some rows in a micro-batch; alone where there is but one stage."""

    shares: Shares
    alone: bool

    @cached_property
    def shared(self) -> Array:
        """[stage] seconds of summing the weights that it shares, as first stage, with the last."""
        return np.zeros(len(self.shares.counts)) if self.alone else self._shared(apart=False)

    def meets(self, number: int, source: tuple[slice, ...]) -> NDArray[np.bool_]:
        """[…] whether the stage may have a node in common with those behind it, by the devices that they use."""
        return self._meetings[int(self._has_shared[number])][source]

    @cached_property
    def _has_shared(self) -> NDArray[np.intp]:
        """[stage] of which accelerators it has devices whose nodes may have others: the sum of a power of two for each."""
        shared = [reach.group > 1 for reach in self.shares.terms.options.reach]
        found: NDArray[np.intp] = ((self.shares.counts > 0) & shared) @ (1 << np.arange(len(shared)))
        return found

    @cached_property
    def _meetings(self) -> dict[int, NDArray[np.bool_]]:
        """By these: [devices …] whether some of them are of such accelerators."""
        used = np.indices([one + 1 for one in self.shares.most]) > 0
        return {
            key: np.array(used[[bool(key >> axis & 1) for axis in range(len(used))]].any(axis=0))
            for key in np.unique(self._has_shared).tolist()
        }

    def messages(self, number: int, pieces: NDArray[np.intp], near: NDArray[np.bool_]) -> Array:
        """[…, boundary] least average seconds there and back between a stage and the next, sent in so many pieces […]."""
        best, between, late = self._links
        row_bytes = self._boundary * (0.0 if self.shares.problem.runtime.splits_boundaries else 1.0)
        rate = np.where(near, best[number], between[number])
        found: Array = 2 * ((self.shares.fewest_rows / (pieces * rate))[..., None] * row_bytes + late[number])
        return found

    def to_any(self, devices: NDArray[np.intp]) -> Array:
        """[stage, boundary] the same to stages of any devices, of stages of so many in the cluster [stage].

        Where nodes have one device each, all rows go over as many cards as a stage has devices. What leaves a card at once
        shares it: the average byte leaves after half of them, at least; what arrives at one, alike.
        """
        problem, reach = self.shares.problem, self.shares.terms.options.reach
        best, _, late = self._links
        every = sum(one.devices for one in reach)
        per_byte = np.full(len(devices), 1 / (max(every - 1, 1) * float(best.max())))
        if all(one.group == 1 for one in reach):
            per_byte = np.maximum(per_byte, 0.5 / (devices * float(card_of(self.shares.terms).max())))
        sent = self._boundary * (0.0 if problem.runtime.splits_boundaries else self.shares.fewest_rows)
        found: Array = 2 * (np.multiply.outer(per_byte, sent) + float(late.min()))
        return found

    @cached_property
    def farther(self) -> Array:
        """[stage] by how much summing shared weights takes longer where no stage behind the first has a node of it."""
        if self.alone:
            return np.zeros(len(self.shares.counts))
        found: Array = np.maximum(self._shared(apart=True) - self.shared, 0.0)
        return found

    def _shared(self, *, apart: bool) -> Array:
        """[stage] least seconds of summing weights that it holds as first of several stages, over their owners.

        Apart: where no other of those stages has a node of it. Only weights that the first and the last layer hold, so
        that several stages always have them apart.
        """
        shares, problem = self.shares, self.shares.problem
        rates = across_rates(shares.terms, shares.counts)[apart]
        found = np.zeros(len(shares.counts))
        if not shared_values(problem, 1):
            return found
        found[:] = np.inf
        for degree in shares.ways.degrees:
            size = shared_values(problem, degree) * problem.setting.gradient_dtype.num_bytes
            seconds = np.divide(size * _SAFE, rates, out=np.zeros_like(found), where=rates > 0)
            found = np.where(shares.size % degree == 0, np.minimum(found, seconds), found)
        return found

    @cached_property
    def _boundary(self) -> Array:
        return np.array([*self.shares.terms.input_bytes, 0.0])

    @cached_property
    def _links(self) -> tuple[Array, Array, Array]:
        """[stage] the largest rates of its devices' messages, to any device and to other nodes, and the least latency."""
        terms, reach = self.shares.terms, self.shares.terms.options.reach
        between = between_of(terms)
        best = np.maximum(between, inside_of(terms))
        late = np.array([min(one.between_latency, one.inside_latency if one.group > 1 else np.inf) for one in reach])
        present = self.shares.counts > 0
        rates = (np.where(present, one, 0.0).max(axis=1) for one in (best, between))
        return (*rates, np.where(present, late, np.inf).min(axis=1))
