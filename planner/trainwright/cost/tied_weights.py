"""Tied weights: which layer runs of a stage own one, and which parameters stay unsharded because of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from trainwright.cost.context import CostContext
from trainwright.plan import LayerRun, Stage
from trainwright.rank_layout import RankLayout


class TiedWeightOwner(NamedTuple):
    """Layer run that owns a tied weight, with its rank layout and the weight's parameters on one rank.

    Attributes:
        is_divided: whether its tensor groups divide the weight.
    """

    run: LayerRun
    layout: RankLayout[str]
    values: int
    is_divided: bool = False

    @property
    def has_slices(self) -> bool:
        """Return whether each rank has the slices of its tensor rank alone: the weight is divided, or a rank has all of it."""
        return self.is_divided or len(self.layout.data_groups) == 1

    @property
    def division(self) -> tuple[object, ...]:
        """Key that is equal for runs of a stage in which every rank has the same part of the weight."""
        return self.layout.tensor_division if self.is_divided else ()


def tied_weight_owners(
    stage: Stage, layouts: Sequence[RankLayout[str]], context: CostContext
) -> dict[str, list[TiedWeightOwner]]:
    """Return the stage's layer runs that own each tied weight."""
    owners: dict[str, list[TiedWeightOwner]] = {}
    for run, layout in zip(stage.layers, layouts, strict=True) if context.first_layer_with_tied_weight else ():
        divided = context.divided_by(run.strategy)
        for kind, _ in context.kind_counts(run.first, run.end):
            name = kind.shared_weight
            if name is not None and (name not in owners or owners[name][-1].run is not run):
                owner = TiedWeightOwner(run, layout, divided.tied_parameters(kind), divided.divides_vocabulary(kind))
                owners.setdefault(name, []).append(owner)
    return owners


def have_same_data_groups(owners: Sequence[TiedWeightOwner]) -> bool:
    """Return whether the same ranks reduce the weight's gradient in all runs."""
    return all(owners[0].layout.data_groups == other.layout.data_groups for other in owners[1:])


def are_sharded_identically(owners: Sequence[TiedWeightOwner]) -> bool:
    """Return whether all runs shard the weight identically; if not, every rank of the stage stores it unsharded."""
    first = owners[0]
    return all(
        first.layout.is_equivalent(owner.layout) and owner.run.strategy.sharding is first.run.strategy.sharding
        for owner in owners[1:]
    )


def _by_division(owners: Sequence[TiedWeightOwner]) -> list[list[TiedWeightOwner]]:
    divisions: dict[tuple[object, ...], list[TiedWeightOwner]] = {}
    for owner in owners:
        divisions.setdefault(owner.division, []).append(owner)
    return list(divisions.values())


class ResidentParameters(NamedTuple):
    """Parameters resident on one rank of a stage: by run, and those that stay unsharded whatever the runs' sharding."""

    by_run: tuple[int, ...]
    unsharded: int

    @classmethod
    def of(
        cls, stage: Stage, tied_owners: Mapping[str, Sequence[TiedWeightOwner]], context: CostContext
    ) -> ResidentParameters:
        """Assign each tied weight to its first run, or to `unsharded` if its runs shard it differently.

        Each division of the weight by a tensor degree counts: a rank holds a part of its own for it.
        """
        duplicates: dict[int, int] = {}
        whole = 0
        for owners in chain.from_iterable(map(_by_division, tied_owners.values())):
            is_whole = not are_sharded_identically(owners)
            whole += is_whole * max(owner.values for owner in owners)
            for owner in owners if is_whole else owners[1:]:
                duplicates[owner.run.first] = duplicates.get(owner.run.first, 0) + owner.values
        values = (
            context.divided_by(run.strategy).resident_parameters(run.first, run.end) - duplicates.get(run.first, 0)
            for run in stage.layers
        )
        return cls(tuple(values), whole)
