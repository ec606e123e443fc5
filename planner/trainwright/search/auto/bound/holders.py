"""What plans of any number of devices send at least: sums over those that hold a layer, messages, and shared weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from trainwright.search.auto.bound.options import Array, Options
from trainwright.search.auto.bound.rays import Head
from trainwright.search.auto.bound.sums import owned_values, seen_share, shared_values
from trainwright.search.auto.bound.terms import ring_rates
from trainwright.search.auto.bound.ways import Counts
from trainwright.search.protocol import Problem

_SAFE = 1 - 1e-6


@dataclass(frozen=True)
class Holders:
    """Of devices that have prices.

    A layer is held in one node where, in every pipeline, more than half of its stage's devices are there. Where it is not,
    each pipeline has one of these to do:

    - sums over its own replicas, where its stage spans nodes. Some tensor group is in one node A, or all of them cross (which
      is a way of its own). Then of its t slices, as many as are held outside A, too, go over A's card: at least one, and of n
      devices 1 - g / n of all slices where a node has g;
    - sums with other pipelines, where its stage is in node A. Of some other pipeline's devices no more than half are there, so
      that half of all weights go over A's card, and nothing hides that.

    What is held in one node is summed inside it, at best, but by a single replica that has all rows.

    A weight that several layers share counts as the first one's of them. Where a pipeline has these in several stages, all
    ranks that hold it sum it in one ring when all else is summed: over each card then goes one slice of it, at least.
    """

    problem: Problem
    options: Options
    prices: Array

    def most_work(self, seconds: float) -> float:
        """Price times seconds of a row that layers held in one node take at most, and so those of them in a stage."""
        return seconds * self._most_price / self.problem.global_batch_size

    def most_work_alone(self, head: Head, seconds: float) -> float:
        """The same of layers that a single replica in one node holds."""
        alone = seconds * head[0] * float(self.prices.max()) / self.problem.global_batch_size
        return min(alone, self.most_work(seconds))

    def sums_between(self, head: Head, shown: float) -> Array:
        """[kind] least seconds of summing gradients where several nodes hold it; of what computing may hide, that share."""
        if self._rate == np.inf:
            return np.full(len(self.problem.model.kinds), np.inf)
        grad, each = self.problem.setting.gradient_dtype.num_bytes, self._bytes(shown)
        found: Array = self._values(head) * min(each * self._slowest(head[0]), grad / 2 / self._card)
        found += self._owned_values(head) * min(each / (head[0] * self._rate), grad / max(head[0], 2) / self._card)
        return found

    def sums_of_stages(self, head: Head, shown: float, devices: Counts) -> Array:
        """[stage, kind] the same of stages on several nodes with so many devices [stage], or more (see `all_reduce_seconds`)."""
        (degree, crosses), group = head, max(one.group for one in self.options.reach)
        replicas = np.maximum(-(-devices // degree), 1 if crosses else 2)
        spanned = np.clip(-(-replicas // group), 2, len(self._rates) - 1)
        moved = 2 * (spanned - 1) / spanned
        each = moved / (degree * self._rates[spanned])
        if crosses:
            # Each slice may be in one node.
            each = slowest = np.where(replicas <= group, 0.0, each)
        else:
            outside = degree - max(group - degree, 0) // (replicas - 1)
            slowest = np.maximum(each, np.maximum(outside, 0) / degree * moved / self._card)
        found: Array = np.multiply.outer(slowest, self._values(head)) + np.multiply.outer(
            each, self._owned_values(head)
        )
        found *= self._bytes(shown)
        return found

    def sums_inside(self, head: Head, shown: float) -> Array:
        """[kind] the same where one node does, with several replicas."""
        best = max(self._inside, self._rate if np.isfinite(self._rate) else 0.0)
        values = self._values(head) + self._owned_values(head)
        return values * (self._bytes(shown) / (head[0] * best) if best > 0 else 0.0)

    @cached_property
    def _most_price(self) -> float:
        """Of stages that have most of their devices in one node: fewer are elsewhere than there."""
        cluster, names = self.problem.cluster, self.options.accelerators
        sizes = {(node.accelerator, node.devices) for node in map(cluster.nodes.__getitem__, self.problem.node_numbers)}
        highest = float(self.prices.max())
        return max(devices * (float(self.prices[names.index(name)]) + highest) for name, devices in sizes)

    def _bytes(self, shown: float) -> float:
        """For each value: summed whole, or in parts that are collected at the end or, as far as that is seen, in two passes.

        In passes before the last backward computing hides what it can of it.
        """
        grad, weight = self.problem.setting.gradient_dtype.num_bytes, self.problem.model.dtype.num_bytes
        whole = grad * (shown if self.problem.runtime.overlaps_gradients else 1.0)
        return min(whole, grad / 2 * shown + weight / 2 * min(1.0, shown + seen_share(self.problem)))

    @cached_property
    def message_seconds(self) -> float:
        """Of one row between two stages, one way, at least."""
        model, ratio = self.problem.model, self.problem.runtime.link_ratio
        reach = self.options.reach
        rate = max(max(one.between, one.inside if one.group > 1 else 0.0) for one in reach) * ratio
        late = min(min(one.between_latency, one.inside_latency if one.group > 1 else np.inf) for one in reach)
        sizes = [model.output_bytes_per_row(layer) for layer in range(len(model.layers) - 1)]
        least = 0.0 if self.problem.runtime.splits_boundaries else min(sizes, default=0.0)
        return float(least / rate + late)

    @cached_property
    def shared_seconds(self) -> float:
        """Of summing weights that the first and the last layer share, which several stages have apart."""
        rate = max(self._inside, self._rate if np.isfinite(self._rate) else 0.0)
        values = min(shared_values(self.problem, degree) for degree in set(self.options.tensor.tolist()))
        return values * _SAFE * self.problem.setting.gradient_dtype.num_bytes / rate if rate > 0 else 0.0

    def _slowest(self, tensor: int) -> float:
        """Least seconds for each byte that a stage on several nodes sums of a layer."""
        if tensor == 1:
            return 1 / self._rate
        group = max(one.group for one in self.options.reach)
        # Fewer replicas than two have nothing to sum.
        fewest = tensor * (group // tensor + 1) if 2 * tensor > group else 0
        return max(1 / (tensor * self._rate), (1 - group / fewest) / self._card if fewest else 0.0)

    def _values(self, head: Head) -> Array:
        """[kind] values on all ranks of a group that belong to no other layer."""
        setting, degree = self.problem.setting, head[0]
        kinds = self.problem.model.kinds
        held = [setting.values_at(kind, degree) - setting.shared_at(kind, degree) for kind in kinds]
        found: Array = np.maximum(np.array(held, dtype=np.float64), 0.0) * degree * _SAFE
        return found

    def _owned_values(self, head: Head) -> Array:
        """[kind] the same of weights that layers share."""
        return owned_values(self.problem, head[0]) * head[0] * _SAFE

    @cached_property
    def _inside(self) -> float:
        """Bytes per second, at best, inside a node; 0 where none has several devices."""
        found = max((one.inside for one in self.options.reach if one.group > 1), default=0.0)
        return found * self.problem.runtime.link_ratio

    @cached_property
    def _rate(self) -> float:
        """Bytes per second, at best, between two nodes; infinite where there is but one."""
        return float(self._rates[2]) if len(self._rates) > 2 else np.inf

    @cached_property
    def _rates(self) -> Array:
        """[nodes] as in `ring_rates`."""
        return ring_rates(self.problem)

    @cached_property
    def _card(self) -> float:
        """Bytes per second of the best card."""
        return max(one.card for one in self.options.reach) * self.problem.runtime.link_ratio
