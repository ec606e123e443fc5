"""Random plans that use everything that a plan document can state, for a few devices; without torch."""

from __future__ import annotations

import random
from collections.abc import Hashable
from dataclasses import replace
from itertools import combinations, pairwise

from trainwright.cluster import Device
from trainwright.plan import LayerRun, Pipeline, Plan, Schedule, Stage
from trainwright.strategy import RankOrder, Sharding, Strategy

MAX_ROWS = 12


def random_plan(seed: int, *, layers: int, tensor_degrees: tuple[int, ...], devices: int) -> Plan:
    """Return a plan of one to three pipelines on at most `devices` devices, with some of the given tensor degrees."""
    draw = random.Random(seed)
    used = draw.randint(1, devices)
    shares = _parts(draw, used, min(draw.choice((1, 1, 1, 2, 2, 3)), used))
    pipelines, first = [], 0
    for share in shares:
        pipelines.append(_pipeline(draw, first, share, layers, tensor_degrees))
        first += share
    batch = sum(one.micro_batches * one.micro_batch_size for one in pipelines)
    return Plan(layers, batch, tuple(pipelines), draw.choice(tuple(Schedule)))


def in_sequence_parallel(plan: Plan) -> Plan:
    """Return the plan with sequence parallelism in all of its runs."""
    return plan.map_stages(
        lambda stage: replace(stage, layers=tuple(run.with_strategy(sequence_parallel=True) for run in stage.layers))
    )


def features(plan: Plan) -> set[str]:
    """Return the features that a plan uses."""
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    runs = [run for stage in stages for run in stage.layers]
    found = {plan.schedule.value, f"{len(plan.pipelines)} pipelines"}
    found |= {f"tensor degree {run.strategy.tensor}" for run in runs}
    found |= {run.strategy.sharding.value for run in runs if run.strategy.data > 1}
    found |= {run.strategy.order.value for run in runs if run.strategy.data > 1 < run.strategy.tensor}
    present = {
        "stages": len(stages) > len(plan.pipelines),
        "different degrees in a stage": any(
            len({(run.strategy.tensor, run.strategy.data) for run in stage.layers}) > 1 for stage in stages
        ),
        "different rows of replicas": any(len(set(run.rows)) > 1 for run in runs),
        "recompute": any(run.strategy.recompute for run in runs),
        "weights that stay gathered": any(run.strategy.keep_gathered_weights and run.strategy.data > 1 for run in runs),
    }
    return found | {name for name, is_used in present.items() if is_used}


def feature_pairs(plan: Plan, *others: str) -> set[Hashable]:
    """Return every pair of a plan's features and of others, and the combinations within its runs of layers."""
    together = {
        (run.strategy.tensor > 1, run.strategy.sharding, run.strategy.order, run.strategy.recompute)
        for pipeline in plan.pipelines
        for stage in pipeline.stages
        for run in stage.layers
        if run.strategy.data > 1
    }
    return {*combinations(sorted({*features(plan), *others}), 2), *together}


def _pipeline(draw: random.Random, first: int, devices: int, layers: int, tensor_degrees: tuple[int, ...]) -> Pipeline:
    stages = draw.randint(1, min(devices, layers))
    sizes = _parts(draw, devices, stages)
    counts = _parts(draw, layers, stages)
    ways = [[_way(draw, size, tensor_degrees) for _ in range(min(draw.choice((1, 1, 2, 3)), count))]
            for size, count in zip(sizes, counts, strict=True)]  # fmt: skip
    least = max(data for stage in ways for _, data in stage)
    rows = draw.randint(least, max(least, MAX_ROWS))
    made, layer = [], 0
    for size, count, stage in zip(sizes, counts, ways, strict=True):
        places = tuple(Device(f"node-{(first + index) // 2}", (first + index) % 2) for index in range(size))
        runs = []
        for (tensor, data), length in zip(stage, _parts(draw, count, len(stage)), strict=True):
            sharding = draw.choice((Sharding.NONE, *Sharding))
            order, recompute = draw.choice(tuple(RankOrder)), draw.random() < 0.3
            share = tuple(_parts(draw, rows, data))
            run = LayerRun(layer, length, Strategy(tensor, data, order, sharding, recompute), share)
            runs.append(run.with_strategy(keep_gathered_weights=sharding is Sharding.ZERO3 and length % 2 == 0))
            layer += length
        made.append(Stage(places, tuple(runs)))
        first += size
    return Pipeline(draw.randint(1, 4), rows, tuple(made))


def _way(draw: random.Random, size: int, tensor_degrees: tuple[int, ...]) -> tuple[int, int]:
    tensor = draw.choice([degree for degree in tensor_degrees if size % degree == 0])
    return tensor, size // tensor


def _parts(draw: random.Random, total: int, count: int) -> list[int]:
    """Return `count` random positive numbers with sum `total`."""
    cuts = sorted(draw.sample(range(1, total), count - 1))
    return [end - start for start, end in pairwise((0, *cuts, total))]
