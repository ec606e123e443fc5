"""What stands beside the best plan in the answer, for the trials that come: its like at other tensor degrees."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.plan import Plan
from trainwright.search.auto.setups import setups, with_setups


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
