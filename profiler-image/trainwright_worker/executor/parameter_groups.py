"""Groups of parameters that are reduced, updated and gathered together, and their ranks; without torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise

from trainwright.model import Model
from trainwright.rank_layout import slice_count, slice_holders
from trainwright.strategy import Sharding
from trainwright_worker.executor.plan_ranks import PlanRanks, Ranks, RunRanks


@dataclass(frozen=True)
class ParameterGroup:
    """Consecutive layers that lie within one run in every pipeline; their untied weights form one flat parameter.

    Attributes:
        runs: the run that holds them, by pipeline.
    """

    first: int
    end: int
    runs: tuple[RunRanks, ...]

    @property
    def has_uniform_partition(self) -> bool:
        """Return whether all pipelines partition the weights alike, by tensor index and over replicas."""
        partitions = {(*run.arrangement.degrees, run.sharding is Sharding.NONE) for run in self.runs}
        return len(partitions) == 1

    @property
    def is_sharded(self) -> bool:
        """Return whether any pipeline shards over its replicas."""
        return any(run.sharding is not Sharding.NONE for run in self.runs)

    @property
    def overlaps_backward(self) -> bool:
        """Return whether gradients are reduced over the replicas during the last backward.

        They are not if pipelines partition the weights differently, nor if several pipelines, whose backwards end at
        different times, reduce unsharded gradients together.
        """
        reduces_by_pipeline = self.is_sharded or len(self.runs) == 1
        return self.has_uniform_partition and reduces_by_pipeline and self.runs[0].replicas > 1

    @property
    def slice_count(self) -> int:
        """Number of slices: the finest equal parts into which the pipelines' tensor degrees together split the weights."""
        return slice_count(self.runs)

    def slice_ranks(self, number: int) -> Ranks:
        """Return the ranks of all pipelines that hold a slice."""
        groups = (slice_holders(run, number, self.slice_count) for run in self.runs)
        return tuple(sorted(rank for group in groups for rank in group))

    def peer_ranks(self, run: RunRanks, rank: int) -> Ranks:
        """Return the ranks with the same shard of the weights as `rank`, one per pipeline; needs a uniform partition."""
        return _peer_ranks(self.runs, run, rank)


def _peer_ranks(runs: Iterable[RunRanks], run: RunRanks, rank: int) -> Ranks:
    tensor_rank = run.position_of(rank).tensor_rank
    shard_index = run.data_group_ranks(tensor_rank).index(rank)
    return tuple(sorted(pipeline_run.data_group_ranks(tensor_rank)[shard_index] for pipeline_run in runs))


def parameter_groups(plan_ranks: PlanRanks) -> tuple[ParameterGroup, ...]:
    """Return a plan's parameter groups, in layer order.

    A group is a single layer if its gradients are reduced during the backward, or if any pipeline shards them.
    """
    boundaries = {stage.end for stages in plan_ranks.pipelines for stage in stages} | {0}
    boundaries |= {run.first for stages in plan_ranks.pipelines for stage in stages for run in stage.runs}
    groups = []
    for first, end in pairwise(sorted(boundaries)):
        holders = plan_ranks.runs_of(first)
        is_by_layer = ParameterGroup(first, end, holders).overlaps_backward or any(
            run.sharding in {Sharding.ZERO2, Sharding.ZERO3} for run in holders
        )
        edges = range(first, end + 1) if is_by_layer else (first, end)
        groups += [ParameterGroup(a, b, holders) for a, b in pairwise(edges)]
    return tuple(groups)


@dataclass(frozen=True)
class TiedParameterGroup:
    """Weight that several layers share, with every run of all pipelines that holds such a layer.

    Attributes:
        is_partial: whether each rank of a tensor group computes only one summand of the gradient.
        spans_stages: whether any pipeline holds the weight in several stages.
        is_divided: whether tensor groups divide the weight (a vocabulary); else each rank has all of it.
        meets_mesh: whether a stage with a mesh holds the weight; then all owners reduce all of it together.
    """

    name: str
    runs: tuple[RunRanks, ...]
    is_partial: bool
    spans_stages: bool = False
    is_divided: bool = False
    meets_mesh: bool = False

    @property
    def reduces_by_tensor_index(self) -> bool:
        """Return whether ranks with the same tensor index reduce among themselves, each of them contributing.

        Otherwise the owners of each slice of a divided weight reduce together. Of another weight all owners do: each
        contributes its summand if gradients are partial, else only the first rank of each tensor group contributes, since the
        others have the same gradient.
        """
        if self.meets_mesh:
            return False
        one_degree = len({len(run.data_groups) for run in self.runs}) == 1
        tensor_indices = {(rank, run.position_of(rank).tensor_rank) for run in self.runs for rank in run.members}
        return not self.is_partial and one_degree and len(tensor_indices) == len({rank for rank, _ in tensor_indices})

    def contributes(self, run: RunRanks, rank: int) -> bool:
        """Return whether the gradient that a layer of that run computes on this rank counts."""
        is_own = self.is_partial or self.is_divided or self.reduces_by_tensor_index
        return is_own or run.position_of(rank).tensor_rank == 0

    @property
    def reduces_by_slice(self) -> bool:
        """Return whether the weight is divided in different ways, so that slices of it have different owners."""
        return self.is_divided and not self.reduces_by_tensor_index and not self.meets_mesh

    @property
    def slice_count(self) -> int:
        """Number of the finest slices into which the runs' tensor degrees together divide the weight."""
        return slice_count(self.runs)

    def slice_ranks(self, number: int) -> Ranks:
        """Return the ranks that hold a slice, ascending."""
        groups = (slice_holders(run, number, self.slice_count) for run in self.runs)
        return tuple(sorted({rank for group in groups for rank in group}))

    def reduction_groups(self) -> tuple[Ranks, ...]:
        """Return the groups that all-reduce; every owner is in one of them."""
        if self.reduces_by_tensor_index:
            by_tensor_rank = zip(*(run.data_groups for run in self.runs), strict=True)
            return tuple(tuple(sorted(set(chain.from_iterable(groups)))) for groups in by_tensor_rank)
        if self.reduces_by_slice:
            return tuple(map(self.slice_ranks, range(self.slice_count)))
        return (tuple(sorted({rank for run in self.runs for rank in run.ranks})),)

    def reduction_group_of(self, rank: int) -> Ranks:
        return next(group for group in self.reduction_groups() if rank in group)

    def has_same_part(self, run: RunRanks, other: RunRanks) -> bool:
        """Return whether the ranks of a stage have the same part of the weight in two of its runs."""
        return not self.is_divided or run.tensor_division == other.tensor_division

    def sharding_run(self, run: RunRanks) -> RunRanks | None:
        """Return the run whose replicas shard the part of the weight that a run has, or None if it is not sharded.

        Ranks that have the same part in runs with different layouts keep it unsharded.
        """
        own_runs = [other for other in self.runs if other.ranks == run.ranks and self.has_same_part(other, run)]
        is_uniform = all(own.is_equivalent(own_runs[0]) and own.sharding is own_runs[0].sharding for own in own_runs)
        return own_runs[0] if is_uniform and own_runs[0].sharding is not Sharding.NONE else None

    @cached_property
    def sharding_runs(self) -> tuple[RunRanks, ...]:
        """Runs that shard the weight, if every pipeline shards it uniformly within one stage; else empty.

        Such a weight is reduced shard by shard, as untied weights are.
        """
        if self.spans_stages or not self.reduces_by_tensor_index:
            return ()
        candidates = [self.sharding_run(run) for run in {run.ranks: run for run in self.runs}.values()]
        homes = tuple(candidate for candidate in candidates if candidate is not None)
        return homes if len(homes) == len(candidates) and len({home.replicas for home in homes}) == 1 else ()

    def peer_ranks(self, run: RunRanks, rank: int) -> Ranks:
        """Return the ranks with the same shard as `rank`, one per sharding run."""
        return _peer_ranks(self.sharding_runs, run, rank)


def tied_parameter_groups(plan_ranks: PlanRanks, model: Model) -> tuple[TiedParameterGroup, ...]:
    """Return the model's tied weights, by name.

    A weight's gradient is partial if a layer that holds it is tensor parallel; otherwise every rank has all of it.
    """
    owners: dict[str, list[int]] = {}
    for layer in range(len(model.layers)):
        name = model.kind_of(layer).shared_weight
        if name is not None:
            owners.setdefault(name, []).append(layer)
    tied_groups = []
    for name, layers in sorted(owners.items()):
        holders = {id(run): run for layer in layers for run in plan_ranks.runs_of(layer)}
        is_partial = any(model.kind_of(layer).is_tensor_parallel for layer in layers)
        spans_stages = len({run.ranks for run in holders.values()}) > len(plan_ranks.pipelines)
        is_divided = any(model.divided_kind(model.kind_of(layer)) for layer in layers)
        meets_mesh = any(plan_ranks.has_operators(layer) for layer in layers)
        tied_groups.append(
            TiedParameterGroup(name, tuple(holders.values()), is_partial, spans_stages, is_divided, meets_mesh)
        )
    return tuple(tied_groups)
