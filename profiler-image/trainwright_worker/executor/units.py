"""Which weights are summed, updated and collected together, and over which ranks: a plan's units. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import lcm

from trainwright.model import Model
from trainwright.plan import Sharding
from trainwright_worker.executor.mesh import Mesh, Ranks, RunMesh

BY_LAYER = frozenset({Sharding.ZERO2, Sharding.ZERO3})
"""Kinds of sharding whose gradients are summed layer by layer while the last backward still runs."""


@dataclass(frozen=True)
class Span:
    """Consecutive layers that lie in one run in every pipeline: their own weights form one unit.

    Attributes:
        holders: the run that holds them, by pipeline.
    """

    first: int
    end: int
    holders: tuple[RunMesh, ...]

    @property
    def is_alike(self) -> bool:
        """Whether all pipelines divide the weights in the same way: by tensor index, and among the replicas."""
        ways = {(one.tensor, one.data, one.sharding is Sharding.NONE) for one in self.holders}
        return len(ways) == 1

    @property
    def is_sharded(self) -> bool:
        """Whether any pipeline's replicas share out gradients."""
        return any(one.sharding is not Sharding.NONE for one in self.holders)

    @property
    def slices(self) -> int:
        """Into how many equal parts the tensor degrees cut the weights together."""
        return lcm(*(one.tensor for one in self.holders))

    def slice_ranks(self, number: int) -> Ranks:
        """All ranks of all pipelines that hold a slice."""
        groups = (one.data_groups[number * one.tensor // self.slices] for one in self.holders)
        return tuple(sorted(rank for group in groups for rank in group))

    def twins(self, holder: RunMesh, rank: int) -> Ranks:
        """Where pipelines are alike: the ranks that hold the same part of the weights as `rank`, one of each pipeline."""
        return _twins(self.holders, holder, rank)


def _twins(alike: Iterable[RunMesh], holder: RunMesh, rank: int) -> Ranks:
    tensor = holder.position(rank).tensor
    part = holder.data_ranks(tensor).index(rank)
    return tuple(sorted(one.data_ranks(tensor)[part] for one in alike))


def spans(mesh: Mesh) -> tuple[Span, ...]:
    """The spans of a plan, in the order of their layers.

    One layer each where any pipeline sums their gradients layer by layer.
    """
    cuts = {stage.end for stages in mesh.pipelines for stage in stages} | {0}
    cuts |= {run.first for stages in mesh.pipelines for stage in stages for run in stage.runs}
    found = []
    for first, end in pairwise(sorted(cuts)):
        holders = mesh.runs_of(first)
        by_layer = any(one.sharding in BY_LAYER for one in holders)
        edges = range(first, end + 1) if by_layer else (first, end)
        found += [Span(a, b, holders) for a, b in pairwise(edges)]
    return tuple(found)


@dataclass(frozen=True)
class SharedSpan:
    """A weight that several layers hold, and every run with such a layer, in all pipelines.

    Attributes:
        is_partial: whether each rank of a tensor group has but a part of its gradient.
        is_apart: whether any pipeline holds it in several stages.
    """

    name: str
    holders: tuple[RunMesh, ...]
    is_partial: bool
    is_apart: bool = False

    @property
    def by_tensor_index(self) -> bool:
        """Whether ranks with one tensor index can sum among themselves, all of them contributing.

        Otherwise all owners sum together, and of each tensor group the first rank alone contributes (the others have
        the same gradient), or each its part.
        """
        one_degree = len({one.tensor for one in self.holders}) == 1
        places: dict[int, set[int]] = {}
        for one in self.holders:
            for index, group in enumerate(one.data_groups):
                for rank in group:
                    places.setdefault(rank, set()).add(index)
        return not self.is_partial and one_degree and all(len(indices) == 1 for indices in places.values())

    def contributes(self, run: RunMesh, rank: int) -> bool:
        """Whether what a layer of that run adds to the gradient on this rank counts."""
        return self.is_partial or self.by_tensor_index or run.position(rank).tensor == 0

    def groups(self) -> tuple[Ranks, ...]:
        """The groups that sum; every owner is in one of them."""
        if self.by_tensor_index:
            tensor = self.holders[0].tensor
            return tuple(
                tuple(sorted({rank for one in self.holders for rank in one.data_groups[index]}))
                for index in range(tensor)
            )
        return (tuple(sorted({rank for one in self.holders for rank in one.ranks})),)

    def group_of(self, rank: int) -> Ranks:
        return next(group for group in self.groups() if rank in group)

    def home(self, rank: int) -> RunMesh | None:
        """The run whose replicas share the weight out on this rank, or None where they keep it whole.

        A rank whose layers hold the weight in differently arranged runs keeps it whole.
        """
        mine = [one for one in self.holders if rank in one.ranks]
        alike = all(one.is_arranged_as(mine[0]) and one.sharding is mine[0].sharding for one in mine)
        return mine[0] if alike and mine[0].sharding is not Sharding.NONE else None

    @cached_property
    def homes(self) -> tuple[RunMesh, ...]:
        """Where every pipeline's one stage shares it out among its replicas, all in the same way: those runs; else none.

        Then it is summed as its layers' own weights are, part by part.
        """
        if self.is_apart or not self.by_tensor_index:
            return ()
        found = [self.home(ranks[0]) for ranks in dict.fromkeys(one.ranks for one in self.holders)]
        homes = tuple(one for one in found if one is not None)
        return homes if len(homes) == len(found) and len({one.data for one in homes}) == 1 else ()

    def twins(self, home: RunMesh, rank: int) -> Ranks:
        """The ranks that hold the same part of it as `rank`, one of each of the homes."""
        return _twins(self.homes, home, rank)


def shared_spans(mesh: Mesh, model: Model) -> tuple[SharedSpan, ...]:
    """The model's shared weights, by name.

    Where a tensor degree divides the layers that hold one, each rank has a part of its gradient; else all have it whole.
    """
    owners: dict[str, list[int]] = {}
    for layer in range(len(model.layers)):
        name = model.kind_of(layer).shared_weight
        if name is not None:
            owners.setdefault(name, []).append(layer)
    found = []
    for name, layers in sorted(owners.items()):
        holders = {id(run): run for layer in layers for run in mesh.runs_of(layer)}
        is_partial = any(model.kind_of(layer).is_tensor_parallel for layer in layers)
        is_apart = len({run.ranks for run in holders.values()}) > len(mesh.pipelines)
        found.append(SharedSpan(name, tuple(holders.values()), is_partial, is_apart))
    return tuple(found)
