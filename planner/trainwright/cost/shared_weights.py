"""Weights that several layers share, as embedding and head do: which runs of a stage hold one, and whether all alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from trainwright.cost.seats import Seats
from trainwright.cost.setting import Setting
from trainwright.plan import LayerRun, Stage


class Holding(NamedTuple):
    """A run that holds a shared weight: how its ranks are arranged, and how many values of it each has."""

    run: LayerRun
    seats: Seats
    values: int


def holdings(stage: Stage, seats: Sequence[Seats], setting: Setting) -> dict[str, list[Holding]]:
    """By shared weight: the stage's runs that hold it; none where the model shares none."""
    found: dict[str, list[Holding]] = {}
    for run, one in zip(stage.layers, seats, strict=True) if setting.first_owner else ():
        for kind, _ in setting.kind_counts(run.first, run.end):
            name = kind.shared_weight
            if name is not None and (name not in found or found[name][-1].run is not run):
                found.setdefault(name, []).append(Holding(run, one, setting.shared_at(kind, run.tensor)))
    return found


def are_summed_alike(runs: Sequence[Holding]) -> bool:
    """Whether the same ranks sum the weight's gradient, whichever of the runs it comes from."""
    return all(runs[0].seats.data_groups == other.seats.data_groups for other in runs[1:])


def are_divided_alike(runs: Sequence[Holding]) -> bool:
    """Whether they also share the weight out alike; where not, every rank of the stage keeps it whole."""
    first = runs[0]
    return all(first.seats.is_arranged_as(one.seats) and one.run.sharding is first.run.sharding for one in runs[1:])


class HeldValues(NamedTuple):
    """What a rank of a stage holds: values by run, and those besides that it holds whole, whatever the runs' sharding."""

    by_run: tuple[int, ...]
    whole: int

    @classmethod
    def of(cls, stage: Stage, found: Mapping[str, Sequence[Holding]], setting: Setting) -> HeldValues:
        """A weight that layers share is held by the first run that has one; whole, where runs divide it in different ways."""
        less: dict[int, int] = {}
        whole = 0
        for runs in found.values():
            is_whole = not are_divided_alike(runs)
            whole += is_whole * max(one.values for one in runs)
            for one in runs if is_whole else runs[1:]:
                less[one.run.first] = less.get(one.run.first, 0) + one.values
        values = (setting.parameters(run.first, run.end, run.tensor) - less.get(run.first, 0) for run in stage.layers)
        return cls(tuple(values), whole)
