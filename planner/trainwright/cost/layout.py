"""A plan as the executor sees it: units that compute in step, and who sends rows to whom."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainwright.cluster import Device
from trainwright.cost.setting import Setting
from trainwright.model import Model
from trainwright.plan import Pipeline, Plan, Sharding, Stage


@dataclass(frozen=True, slots=True)
class Unit:
    """One replica of a stage: the devices of a tensor group, which compute the same rows in step.

    Attributes:
        first_row: of its rows in every micro-batch.
    """

    stage: int
    replica: int
    devices: tuple[Device, ...]
    first_row: int
    rows: int

    @property
    def end_row(self) -> int:
        return self.first_row + self.rows


@dataclass(frozen=True, slots=True)
class SharedWeight:
    """A weight with several owners: its values, and the stages that hold it."""

    parameters: int
    stages: tuple[int, ...]


def only_pipeline(plan: Plan, setting: Setting) -> Pipeline:
    """The plan's one pipeline.

    Raises ValueError, in words, for plans that do not belong to the model or the cluster, that need a layer profile
    that is not there, or that use what the cost model does not cover.
    """
    model = setting.model
    if plan.model_layers != len(model.layers):
        raise ValueError(f"the plan is for a model of {plan.model_layers} layers, but this one has {len(model.layers)}")
    if len(plan.pipelines) > 1:
        raise ValueError(f"the cost model covers plans of one pipeline, this one has {len(plan.pipelines)}")
    for device in plan.devices:
        setting.cluster.accelerator_of(device)
    pipeline = plan.pipelines[0]
    for number, stage in enumerate(pipeline.stages):
        _check_stage(number, stage, model)
    _check_profiles(pipeline, setting)
    return pipeline


def _check_stage(number: int, stage: Stage, model: Model) -> None:
    head = stage.layers[0]
    for run in stage.layers:
        where = f"stage {number}, layers {run.first}…{run.first + run.count - 1}"
        if run.sharding is not Sharding.NONE:
            raise ValueError(f"{where}: the cost model does not cover sharding {run.sharding.value}; use none")
        if model.max_tensor_degree % run.tensor:
            raise ValueError(
                f"{where}: tensor degree {run.tensor} does not divide the model, which allows {model.max_tensor_degree}"
            )
        if (run.tensor, run.data, run.rows, run.order) != (head.tensor, head.data, head.rows, head.order):
            raise ValueError(
                f"{where}: degrees, rows or order differ from the stage's first layers; the cost model covers stages "
                "whose layers share them"
            )


def _check_profiles(pipeline: Pipeline, setting: Setting) -> None:
    for stage in pipeline.stages:
        for accelerator in dict.fromkeys(setting.cluster.accelerator_of(device).name for device in stage.devices):
            for name in dict.fromkeys(setting.model.layers[stage.first : stage.end]):
                kind = setting.model.kind_of(setting.model.layers.index(name))
                setting.layer_cost(accelerator, kind, stage.layers[0].tensor, 1)


def units(pipeline: Pipeline) -> tuple[tuple[Unit, ...], ...]:
    """The units of every stage, in the order of their rows."""
    stages = []
    for number, stage in enumerate(pipeline.stages):
        run = stage.layers[0]
        firsts = [sum(run.rows[:replica]) for replica in range(run.data)]
        groups = run.tensor_groups(stage.devices)
        stages.append(
            tuple(Unit(number, j, groups[j], firsts[j], run.rows[j]) for j in range(run.data)),
        )
    return tuple(stages)


def overlaps(senders: tuple[Unit, ...], receivers: tuple[Unit, ...]) -> Iterator[tuple[Unit, Unit, int]]:
    """Who sends how many rows of a micro-batch to whom: the overlaps of row intervals."""
    for sender in senders:
        for receiver in receivers:
            rows = min(sender.end_row, receiver.end_row) - max(sender.first_row, receiver.first_row)
            if rows > 0:
                yield sender, receiver, rows


def device_pairs(sender: Unit, receiver: Unit) -> tuple[tuple[Device, Device], ...]:
    """Which device reads from which: the receiver with tensor index k reads from sender k % (sender's degree)."""
    return tuple((sender.devices[k % len(sender.devices)], device) for k, device in enumerate(receiver.devices))


def shared_weights(model: Model, pipeline: Pipeline) -> tuple[SharedWeight, ...]:
    """Weights whose owners sit in several stages; those inside one stage are held and summed like any other."""
    owners: dict[str, tuple[int, set[int]]] = {}
    for number, stage in enumerate(pipeline.stages):
        for layer in range(stage.first, stage.end):
            kind = model.kind_of(layer)
            if kind.shared_weight is not None:
                owners.setdefault(kind.shared_weight, (kind.shared_parameters, set()))[1].add(number)
    return tuple(
        SharedWeight(parameters, tuple(sorted(stages))) for parameters, stages in owners.values() if len(stages) > 1
    )


def repeated_parameters(model: Model, first: int, end: int) -> int:
    """Values of shared weights that the layers `first … end - 1` name more than once but hold once."""
    seen: set[str] = set()
    repeated = 0
    for layer in range(first, end):
        kind = model.kind_of(layer)
        if kind.shared_weight is not None:
            repeated += kind.shared_parameters if kind.shared_weight in seen else 0
            seen.add(kind.shared_weight)
    return repeated


def held_parameters(model: Model, first: int, end: int, tensor: int) -> int:
    """Values that one rank holds of the layers `first … end - 1`, a shared weight once."""
    return sum(model.kind_of(layer).parameters_at(tensor) for layer in range(first, end)) - repeated_parameters(
        model, first, end
    )
