"""Capabilities of a trainer, and which features of a plan it does not support."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final, get_args

from trainwright.exports.uniform_shape import (
    blocks_by_stage,
    mixes_orders,
    recomputed_blocks,
)
from trainwright.families import Family
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.plan import Pipeline, Plan, Schedule, Stage, format_degrees, format_range, split_rows
from trainwright.strategy import Sharding
from trainwright.training import Optimizer

EVERY_SHARDING = frozenset(Sharding)
EVERY_OPTIMIZER: Final[frozenset[Optimizer]] = frozenset(get_args(Optimizer))
ONLY_1F1B = frozenset({Schedule.ONE_FORWARD_ONE_BACKWARD})


def has_every_field(family: Family) -> None:
    """Return that a trainer lacks none of a family's fields, or reads none of them."""
    del family


@dataclass(frozen=True)
class Capabilities:
    """Features of a plan that a trainer has.

    Attributes:
        every_plan: it reads the plan itself, so that nothing is lost.
        pipelines: it can have several stages.
        uneven_stages: stages may have any numbers of layers; else as even as possible, the first ones with the remainder.
        tensor: there may be tensor groups.
        pipelined_tensor: stages may have tensor groups.
        replicated_tensor: tensor groups may have replicas that shard nothing.
        shardings, pipelined_shardings: without stages, and with several.
        tensor_shardings: with tensor groups.
        replicated_stages: number formats in which several stages may have replicas that shard nothing.
        missing_shardings: where it lacks the others.
        sequence_parallel: tensor groups can divide activations along the sequence.
        partial_recompute: the first blocks of every stage can be recomputed, else all blocks or none.
        schedules: of several stages. With one stage the micro-batches follow one another, which is 1F1B.
        fewer_micro_batches: there may be fewer micro-batches than stages.
        tied_stages: the stages of a model may share a weight, as those with tied embeddings and every T5 do.
        unstaged_families: names of the families of models that it cannot divide into stages.
        missing_stages: why there are no stages, where there are none.
        missing_families: names of the families of models that it does not have.
        missing_field: from a family to the field, with its value, that it has no argument for; None if it has all.
        dtypes, optimizers: of which a plan says nothing: the request of training does.
        sharded_optimizers: those whose state replicas can share.
        missing_generations: of GPUs for which the PyTorch that it is tested with has no kernels.
    """

    every_plan: bool = False
    pipelines: bool = True
    uneven_stages: bool = True
    tensor: bool = True
    pipelined_tensor: bool = True
    replicated_tensor: bool = True
    shardings: frozenset[Sharding] = EVERY_SHARDING
    pipelined_shardings: frozenset[Sharding] = EVERY_SHARDING
    tensor_shardings: frozenset[Sharding] = EVERY_SHARDING
    replicated_stages: frozenset[Dtype] = frozenset(Dtype)
    missing_shardings: str = "at these degrees"
    sequence_parallel: bool = False
    partial_recompute: bool = False
    schedules: frozenset[Schedule] = ONLY_1F1B
    fewer_micro_batches: bool = True
    tied_stages: bool = True
    unstaged_families: frozenset[str] = frozenset()
    missing_stages: str = "it has none"
    missing_families: frozenset[str] = frozenset()
    missing_field: Callable[[Family], str | None] = has_every_field
    dtypes: frozenset[Dtype] = frozenset(Dtype)
    optimizers: frozenset[Optimizer] = EVERY_OPTIMIZER
    sharded_optimizers: frozenset[Optimizer] = EVERY_OPTIMIZER
    missing_generations: frozenset[str] = frozenset()

    def missing(self, model: Model, optimizer: Optimizer) -> str | None:
        """Return which part of training a model with an optimizer it lacks, as a sentence; None if it lacks none."""
        tag = model.family.family
        missing = f"{tag} models" if tag in self.missing_families else self.missing_field(model.family)
        if missing is not None:
            return f"model: the trainer has no {missing}"
        if optimizer in self.optimizers:
            return None
        names = " and ".join(sorted(self.optimizers))
        return f"optimizer: the trainer has {names} alone, got {optimizer}"

    def of(self, model: Model, optimizer: Optimizer) -> Capabilities:
        """Return the features that it has for a model and an optimizer."""
        capabilities, family = self, model.family.family
        if self.pipelines and model.owners and not self.tied_stages:
            capabilities = replace(
                capabilities,
                pipelines=False,
                missing_stages="it has none of models whose layers share a weight, such as an embedding",
            )
        if self.pipelines and family in self.unstaged_families:
            capabilities = replace(capabilities, pipelines=False, missing_stages=f"it has none of {family}")
        if model.dtype not in self.replicated_stages:
            capabilities = replace(capabilities, pipelined_shardings=self.pipelined_shardings - {Sharding.NONE})
        if optimizer not in self.sharded_optimizers:
            alone = frozenset({Sharding.NONE})
            capabilities = replace(
                capabilities, shardings=alone, pipelined_shardings=alone, missing_shardings=f"with {optimizer}"
            )
        return capabilities

    def shardings_of(self, stages: int, tensor: int, data: int) -> frozenset[Sharding]:
        """Return the shardings that it can have with these degrees; without replicas nothing is sharded."""
        shardings = self.pipelined_shardings if stages > 1 else self.shardings
        if tensor > 1:
            shardings &= self.tensor_shardings
        if data > 1 and tensor > 1 and not self.replicated_tensor:
            shardings -= {Sharding.NONE}
        return shardings if data > 1 else frozenset({Sharding.NONE})

    def schedules_of(self, stages: int) -> frozenset[Schedule]:
        return self.schedules if stages > 1 else ONLY_1F1B

    def can_split(self, stages: int, tensor: int) -> bool:
        """Return whether it can have these numbers of stages and of devices that share a layer."""
        if tensor > 1 and not self.tensor:
            return False
        return stages == 1 or (self.pipelines and (tensor == 1 or self.pipelined_tensor))

    def can_fill(self, stages: int, micro_batches: int) -> bool:
        """Return whether it can have so few micro-batches in these stages."""
        return stages == 1 or self.fewer_micro_batches or micro_batches >= stages

    def can_recompute(self, plan: Plan, blocks: int) -> bool:
        """Return whether it can recompute the first `blocks` blocks of every stage."""
        return self.partial_recompute or blocks in {0, max(map(len, blocks_by_stage(plan)))}


def is_expressible(plan: Plan, capabilities: Capabilities) -> bool:
    """Return whether a trainer supports the plan as it is."""
    return not losses(plan, capabilities)


def losses(plan: Plan, capabilities: Capabilities) -> tuple[str, ...]:
    """Return which features of the plan a trainer does not support, one phrase each; empty if it supports all."""
    if capabilities.every_plan:
        return ()
    return (*_unequal_parts(plan), *_missing_features(plan, capabilities))


def format_loss(dtype: Dtype, capabilities: Capabilities) -> str | None:
    """Return a phrase that the trainer does not support the number format; None if it does."""
    return None if dtype in capabilities.dtypes else f"{dtype}: it has {' and '.join(sorted(capabilities.dtypes))}"


def _unequal_parts(plan: Plan) -> Iterator[str]:
    """Say what makes a plan not uniform."""
    stages, runs = plan.stages, [run for stage in plan.stages for run in stage.layers]
    if len(plan.pipelines) > 1:
        yield f"{len(plan.pipelines)} pipelines: every replica goes through the same stages"
    if len({run.strategy.degrees for run in runs}) > 1:
        yield f"degrees by stage ({_named(map(format_degrees, stages))}): all stages share them"
    elif mixes_orders(plan):
        yield "tensor groups that differ between the layers of a stage: they are the same for all layers"
    if plan.has_operators:
        yield "shardings of single operators: the operators of a layer share its degrees"
    uneven = [run.rows for run in runs if len(set(run.rows)) > 1]
    if uneven:
        yield f"uneven rows ({format_range(uneven[0])} of a micro-batch by replica): every replica gets as many"
    shardings = {run.strategy.effective.sharding for run in runs}
    if len(shardings) > 1:
        yield f"sharding by layer ({_named(sorted(shardings))}): all layers share it"
    if len({run.strategy.sequence_parallel for run in runs if run.strategy.tensor > 1}) > 1:
        yield "sequence parallelism of some layers: it is for all or none"
    if recomputed_blocks(plan) is None:
        yield f"recompute of chosen layers ({_named(map(_recomputed, stages))}): all blocks alike, or the first of each stage"


def _missing_features(plan: Plan, capabilities: Capabilities) -> Iterator[str]:
    """Say which features of a plan a trainer lacks."""
    runs = [run for stage in plan.stages for run in stage.layers]
    stages = max(len(pipeline.stages) for pipeline in plan.pipelines)
    tensor = max(run.strategy.tensor for run in runs)
    yield from _missing_stages(plan, stages, tensor, capabilities)
    refused = [
        run
        for run in runs
        if run.strategy.effective.sharding not in capabilities.shardings_of(stages, *run.strategy.degrees)
    ]
    if refused:
        sharding, where = refused[0].strategy.effective.sharding, capabilities.missing_shardings
        if sharding is Sharding.NONE and stages > 1 and sharding not in capabilities.pipelined_shardings:
            where = "of several stages in this number format"
        yield f"{_sharding(sharding)} {where}"
    if not capabilities.sequence_parallel and any(run.strategy.effective.sequence_parallel for run in runs):
        yield "sequence parallelism: it has none"
    if any(run.strategy.effective.keep_gathered_weights for run in runs):
        yield "weights that stay gathered for later passes: they are gathered for every pass"
    count = recomputed_blocks(plan)
    if count is not None and not capabilities.can_recompute(plan, count):
        yield f"recompute of the first {count} blocks of each stage: it is all or none"
    if plan.schedule not in capabilities.schedules_of(stages):
        yield f"the schedule {plan.schedule}"


def _missing_stages(plan: Plan, stages: int, tensor: int, capabilities: Capabilities) -> Iterator[str]:
    if stages > 1 and not capabilities.pipelines:
        yield f"{stages} pipeline stages: {capabilities.missing_stages}"
        return
    if tensor > 1 and not capabilities.tensor:
        yield f"tensor degree {tensor}: it has none"
    elif not capabilities.can_split(stages, tensor):
        yield f"tensor degree {tensor} within {stages} pipeline stages: it has one or the other"
    elif not capabilities.uneven_stages and not _is_even(plan):
        yield f"stages of chosen sizes ({_named(map(_sizes, plan.pipelines))} layers): it splits layers evenly"
    few = min(pipeline.micro_batches for pipeline in plan.pipelines)
    if not capabilities.can_fill(stages, few):
        yield f"fewer micro-batches ({few}) than stages ({stages}): each stage needs one"


def _is_even(plan: Plan) -> bool:
    return all(
        pipeline.layer_counts == split_rows(plan.model_layers, len(pipeline.stages)) for pipeline in plan.pipelines
    )


def _sizes(pipeline: Pipeline) -> str:
    return " ".join(map(str, pipeline.layer_counts))


def _sharding(sharding: Sharding) -> str:
    return "replicas without sharding" if sharding is Sharding.NONE else f"sharding {sharding}"


def _named(parts: Iterable[str]) -> str:
    """Join different parts, at most four of them."""
    distinct = list(dict.fromkeys(parts))
    return " | ".join(distinct[:4]) + (" | …" if len(distinct) > 4 else "")


def _recomputed(stage: Stage) -> str:
    return f"{sum(run.count for run in stage.layers if run.strategy.recompute)} of {stage.end - stage.first}"
