"""Random problems small enough for enumeration: up to four devices, four layers and three device types."""

from __future__ import annotations

import random
from dataclasses import replace

from auto_oracle import PlanSpace

from trainwright.cluster import Accelerator, Cluster, Emulation, Link, Node
from trainwright.cost.memory_terms import ValueBytes
from trainwright.families import Gpt, Llama
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.profiles import LayerProfile, Profiles
from trainwright.runtime import Runtime
from trainwright.search import Limits, Problem

ROWS = (1, 2, 3, 4, 6)
TRIES = 60
"""Problems to draw with the same numbers of layers and devices before drawing other numbers."""


def instance(seed: int, most_plans: int) -> Problem:
    """Draw a problem with at most `most_plans` plans, deterministic for a seed."""
    pick = random.Random(f"instance {seed}")
    while True:
        layers, devices = pick.choice((1, 2, 2, 2, 3, 3, 4)), pick.choice((2, 3, 3, 4, 4))
        for _ in range(TRIES):
            problem = _draw(pick, layers, devices)
            if PlanSpace(problem).size(most_plans) <= most_plans:
                return problem


def _draw(pick: random.Random, layers: int, devices: int) -> Problem:
    model = _model(pick, layers)
    cluster = _cluster(pick, model, devices)
    limits = Limits(
        max_tensor_degree=pick.choice((None, None, None, 1)),
        max_data_degree=pick.choice((None, None, None, 1, 2)),
        max_pipeline_degree=pick.choice((None, None, None, 2)),
    )
    runtime = Runtime(
        overlaps_gradients=pick.random() < 1 / 3,
        overlap_slowdown_ratio=pick.choice((1.0, 1.3)),
        keeps_gathered_weights=False,
    )
    batch = pick.choice((2, 3, 4, 4, 5, 6))
    runtime = replace(runtime, hides_transfers=batch != 4)
    return Problem(cluster, model, _profiles(pick, cluster, model), batch, limits, runtime=runtime)


def _model(pick: random.Random, count: int) -> Model:
    """Whole models of three and four layers, and parts of them."""
    hidden = pick.choice((64, 128))
    family = pick.choice(
        (
            Gpt(2, hidden, 4, sequence_length=32, vocabulary_size=200),
            Llama(2, hidden, 4, sequence_length=32, vocabulary_size=200),
        )
    )
    whole = Model.of(family, pick.choice((Dtype.FLOAT32, Dtype.FLOAT16)))
    embedding, block, _, head = whole.layers
    layers = pick.choice(
        ((block,), (block, block), (block, head), (embedding, block, head), whole.layers, whole.layers)
    )
    return Model(family, whole.dtype, tuple(kind for kind in whole.kinds if kind.name in layers), layers, 4)


def _cluster(pick: random.Random, model: Model, devices: int) -> Cluster:
    pairs = (2,) * (devices // 2) + (1,) * (devices % 2)
    sizes = pick.choice([(1,) * devices, (1,) * devices, (1,) * devices, pairs, pairs, (devices,)])
    types = min(pick.choice((1, 2, 2, 3, 3)), len(sizes))
    emulated = pick.random() < 1 / 4
    state = model.parameters * ValueBytes.of(model, "adam", Runtime().gradient_dtype).unsharded
    tight = pick.random() < 1 / 2
    prefix = "emulated-" if emulated else ""
    accelerators = tuple(
        Accelerator(
            f"{prefix}type-{number}",
            int(state * pick.uniform(0.3, 1.8) if tight else 2**40),
            Emulation(1e12, 0, 1e12) if emulated else None,
        )
        for number in range(types)
    )
    nodes = tuple(Node(f"node-{number}", accelerators[number % types].name, size) for number, size in enumerate(sizes))
    between = [10 ** pick.uniform(7, 9.5) for _ in range(3)] if pick.random() < 1 / 3 else [10 ** pick.uniform(7, 9.5)]
    within = 10 ** pick.uniform(7.5, 10)
    rates = {(a, b): pick.choice(between) for a in nodes for b in nodes if a.name < b.name}
    links = [Link(node.name, node.name, 1e-5, within) for node in nodes]
    for (a, b), rate in rates.items():
        links += [Link(a.name, b.name, 5e-5, rate), Link(b.name, a.name, 5e-5, rate)]
    return Cluster(accelerators, nodes, tuple(links))


def _profiles(pick: random.Random, cluster: Cluster, model: Model) -> Profiles:
    """Seconds that grow with the rows from a floor, and fall with the tensor degree by less than it.

    An even number of nodes divides the vocabulary, without which searches choose no sequence parallelism.
    """
    found = []
    divided = {kind.name for kind in model.kinds if model.divided_kind(kind) and len(cluster.nodes) % 2 == 0}
    for accelerator in cluster.accelerators:
        speed, floor, gain = pick.uniform(1, 4), pick.uniform(0, 2), pick.uniform(0.3, 1)
        for kind in model.kinds:
            work = pick.uniform(0.5, 2) * (1 if kind.is_tensor_parallel else 0.5) * 1e-3
            for tensor in (1, 2, 4) if kind.is_tensor_parallel or kind.name in divided else (1,):
                forward, computed = 0.0, (model.divided_kind(kind) if tensor > 1 else None) or kind
                for rows, before in zip(ROWS, (0, *ROWS), strict=False):
                    more = pick.uniform(0.8, 1.2) * work / speed / tensor**gain
                    forward += (rows - before) * more + (floor * more if not before else 0)
                    found.append(
                        LayerProfile(
                            accelerator.name,
                            kind.name,
                            tensor,
                            rows,
                            forward,
                            forward * pick.uniform(1.7, 2.3),
                            1e-9 * computed.parameters_at(tensor) / speed,
                            round(rows * computed.saved_bytes_per_row(model.dtype, tensor)),
                            computed.parameters_at(tensor) * model.dtype.num_bytes,
                        )
                    )
    return Profiles(tuple(found))
