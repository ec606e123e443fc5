"""Random problems and plans that use every feature of plans."""

from __future__ import annotations

import random

from trainwright.accelerators import estimate_profiles
from trainwright.cluster import Accelerator, Cluster, Device, Node, Port
from trainwright.families import Bert, Gpt
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.runtime import Runtime
from trainwright.search import Problem
from trainwright.strategy import Sharding, Strategy

ACCELERATORS = {"NVIDIA-A100-SXM4-40GB": 40, "Tesla-T4": 15, "Tesla-V100-SXM2-16GB": 16}


def drawn_problem(pick: random.Random) -> Problem:
    """Nodes of one to three types; memory may be tight, links slow."""
    family = pick.choice(
        (
            Gpt(6, 512, 8, sequence_length=256, vocabulary_size=pick.choice((1000, 30000))),
            Bert(5, 768, 8, sequence_length=128),
        )
    )
    model = Model.of(family, pick.choice((Dtype.FLOAT32, Dtype.FLOAT16)))
    names = pick.sample(sorted(ACCELERATORS), pick.choice((1, 2, 2, 3)))
    tightness = pick.choice((1.0, 0.02, 0.01))
    accelerators = tuple(Accelerator(name, int(ACCELERATORS[name] * 2**30 * tightness)) for name in names)
    size = pick.choice((1, 2, 4))
    card = Port(2e-5, pick.choice((2e8, 1.25e9, 1.25e10)))
    inside = Port(5e-6, pick.choice((1e10, 1e11)))
    nodes = tuple(
        Node(f"node-{number}", names[number % len(names)], size, card, inside)
        for number in range(max(pick.choice((4, 8)) // size, len(names)))
    )
    profiles = estimate_profiles(model, names, tensor_degrees=(1, 2, 4), rows=(1, 2, 4, 8))
    runtime = Runtime(
        overlaps_gradients=pick.random() < 0.4,
        overlap_slowdown_ratio=pick.choice((1.0, 1.3)),
        constant_seconds=1e-4,
        hides_transfers=pick.random() < 0.5,
    )
    return Problem(Cluster(accelerators, nodes), model, profiles, pick.choice((4, 8, 12, 24)), runtime=runtime)


def drawn_plan(problem: Problem, pick: random.Random) -> Plan | None:
    """Any plan: several pipelines, uneven rows, stages of any degrees, sharding and recompute by layer."""
    devices = list(problem.devices)
    if pick.random() < 0.5:
        pick.shuffle(devices)
    devices = devices[: pick.randint(1, len(devices))] if pick.random() < 0.3 else devices
    count = pick.choice((1, 1, 1, 2, 3))
    if count > min(len(devices), problem.global_batch_size):
        return None
    cuts = sorted(pick.sample(range(1, len(devices)), count - 1))
    shares = sorted(pick.sample(range(1, problem.global_batch_size), count - 1))
    pipelines = []
    for first, end, low, high in zip(
        (0, *cuts), (*cuts, len(devices)), (0, *shares), (*shares, problem.global_batch_size), strict=True
    ):
        pipeline = _pipeline(problem, devices[first:end], high - low, pick)
        if pipeline is None:
            return None
        pipelines.append(pipeline)
    return Plan(len(problem.model.layers), problem.global_batch_size, tuple(pipelines))


def _pipeline(problem: Problem, devices: list[Device], rows: int, pick: random.Random) -> Pipeline | None:
    layers = len(problem.model.layers)
    size = pick.choice([number for number in range(1, rows + 1) if rows % number == 0])
    stages = pick.randint(1, min(len(devices), layers))
    cuts = sorted(pick.sample(range(1, len(devices)), stages - 1))
    ends = sorted(pick.sample(range(1, layers), stages - 1))
    found = []
    for low, high, first, end in zip((0, *cuts), (*cuts, len(devices)), (0, *ends), (*ends, layers), strict=True):
        tensor = pick.choice([degree for degree in (1, 2, 4) if (high - low) % degree == 0])
        data = (high - low) // tensor
        if data > size:
            return None
        parts = sorted(pick.sample(range(1, size), data - 1))
        split = tuple(b - a for a, b in zip((0, *parts), (*parts, size), strict=True))
        runs, layer, mixed = [], first, pick.random() < 0.3
        sharding, again = pick.choice(list(Sharding)), pick.random() < 0.3
        while layer < end:
            width = pick.randint(1, end - layer) if mixed else end - layer
            if mixed:
                sharding, again = pick.choice(list(Sharding)), pick.random() < 0.3
            runs.append(LayerRun(layer, width, Strategy(tensor, data, sharding=sharding, recompute=again), split))
            layer += width
        found.append(Stage(tuple(devices[low:high]), tuple(runs)))
    return Pipeline(rows // size, size, tuple(found))
