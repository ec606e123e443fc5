"""Other plans of one's shape: that hold less, or for the trials that come, where a cost model is least sure of what is best."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from trainwright.plan import Plan, Schedule, Sharding
from trainwright.search.auto.setups import setups, with_setups


def sharded(plan: Plan) -> Plan:
    """With everything sharded."""
    for index, pipeline in enumerate(plan.pipelines):
        stages = [stage.each(partial(replace, sharding=Sharding.ZERO3)) for stage in setups(pipeline)]
        plan = with_setups(plan, index, stages)
    return plan


def rescheduled(plan: Plan) -> Iterator[Plan]:
    """In GPipe: where memory holds every micro-batch, forwards never wait for a backward's message."""
    if any(len(pipeline.stages) > 1 < pipeline.micro_batches for pipeline in plan.pipelines):
        yield replace(plan, schedule=Schedule.GPIPE)


def regrouped(plan: Plan, most_tensor: int) -> Iterator[Plan]:
    """A plan of one pipeline with one tensor degree in all stages, each power of two up to the most.

    Micro-batches keep their rows, and where the batch allows the rows that each replica has of them. Sums inside a tensor
    group are weighed against those over replicas, on links that a plan's estimate knows least of.
    """
    if len(plan.pipelines) > 1:
        return
    (pipeline,), stages = plan.pipelines, setups(plan.pipelines[0])
    replicas = max(stage.most_data for stage in stages)
    for exponent in range(most_tensor.bit_length()):
        tensor = 2**exponent
        if any(len(stage.devices) % tensor for stage in stages):
            return
        data = max(len(stage.devices) // tensor for stage in stages)
        for rows in dict.fromkeys((pipeline.micro_batch_size, pipeline.micro_batch_size * data // replicas)):
            if rows >= data and plan.global_batch_size % rows == 0:
                made = [stage.regrouped(tensor, rows) for stage in stages]
                yield with_setups(plan, 0, made, plan.global_batch_size // rows)
