"""Fixtures: clusters, models and profiles. Profiles follow the emulated devices' tables, so they are exact."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from trainwright.cluster import Accelerator, Cluster, Device, Emulation, Link, Node
from trainwright.families import Gpt
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.plan import LayerRun, Pipeline, Plan, Schedule, Stage
from trainwright.profiles import LayerProfile, Profiles
from trainwright.search import Limits, Problem, RequiredProfile, required_profiles
from trainwright.strategy import Strategy
from trainwright.training import Training

FAST = Accelerator("emulated-fast", 16 * 2**30, Emulation(1.2e9, 0.002, 5e7))
SLOW = Accelerator("emulated-slow", 15 * 2**30, Emulation(0.5e9, 0.003, 2.5e7))
ACTIVATION_BYTES_PER_OUTPUT = 32


def _cluster(
    nodes: Sequence[tuple[str, int]] = (("fast", 2), ("fast", 2), ("fast", 2), ("slow", 2)),
    *,
    between: float = 5e6,
    within: float = 1e9,
    latency: float = 1e-4,
    memory: int | None = None,
) -> Cluster:
    """Make a cluster of (speed, devices) nodes; links between nodes are equal, and so are those inside."""
    kinds = {"fast": FAST, "slow": SLOW}
    accelerators = tuple(
        Accelerator(kind.name, memory or kind.memory_bytes, kind.emulation)
        for kind in dict.fromkeys(kinds[speed] for speed, _ in nodes)
    )
    named = tuple(Node(f"node-{i}", kinds[speed].name, devices) for i, (speed, devices) in enumerate(nodes, 1))
    links = tuple(Link(a.name, b.name, latency, within if a is b else between) for a in named for b in named)
    return Cluster(accelerators, named, links)


def _profiles(cluster: Cluster, model: Model, needed: Sequence[RequiredProfile]) -> Profiles:
    found = []
    tables = {accelerator.name: accelerator.emulation for accelerator in cluster.accelerators}
    for need in needed:
        table = tables[need.accelerator]
        assert table is not None
        for kind in model.kinds:
            tensor = need.tensor_degree if kind.is_tensor_parallel else 1
            if tensor != need.tensor_degree:
                continue
            for rows in need.rows:
                forward = sum(
                    table.compute_seconds(
                        segment.forward_flops_per_row * rows / tensor, floor_share=1 / len(kind.segments)
                    )
                    for segment in kind.segments
                )
                held = kind.parameters_at(tensor)
                found.append(
                    LayerProfile(
                        accelerator=need.accelerator,
                        kind=kind.name,
                        tensor_degree=tensor,
                        rows=rows,
                        forward_seconds=forward,
                        backward_seconds=2 * forward,
                        update_seconds=table.update_seconds(held),
                        activation_bytes=ACTIVATION_BYTES_PER_OUTPUT * rows * kind.output_elements_per_row // tensor,
                        parameter_bytes=4 * held,
                    )
                )
    return Profiles(tuple(found))


def _problem(
    cluster: Cluster | None = None,
    *,
    layers: int = 12,
    heads: int = 4,
    batch: int = 16,
    max_tensor_degree: int | None = None,
    hidden: int = 128,
) -> Problem:
    cluster = cluster or _cluster()
    training = Training(batch, Gpt(layers, hidden, heads, sequence_length=64, vocabulary_size=1000)).in_format(
        Dtype.FLOAT32
    )
    needed = required_profiles(cluster.nodes, training.model, batch, max_tensor_degree)
    profiles = _profiles(cluster, training.model, needed)
    return Problem(cluster, training.model, profiles, batch, Limits(max_tensor_degree=max_tensor_degree))


def _plan(
    problem: Problem,
    layers: Sequence[int],
    *,
    data: int = 1,
    tensor: int = 1,
    rows: int = 1,
    schedule: Schedule = Schedule.ONE_FORWARD_ONE_BACKWARD,
    devices: Sequence[Device] | None = None,
) -> Plan:
    """Make a plan of stages with `layers` layers each, on the cluster's devices in order."""
    chosen = tuple(devices or problem.cluster.devices)
    size = data * tensor
    stages = []
    first = 0
    for number, count in enumerate(layers):
        run = LayerRun(first, count, Strategy(tensor, data), (rows,) * data)
        stages.append(Stage(chosen[number * size : (number + 1) * size], (run,)))
        first += count
    micro = rows * data
    pipeline = Pipeline(problem.global_batch_size // micro, micro, tuple(stages))
    return Plan(first, problem.global_batch_size, (pipeline,), schedule)


@pytest.fixture(scope="session")
def make_cluster() -> Callable[..., Cluster]:
    return _cluster


@pytest.fixture(scope="session")
def make_problem() -> Callable[..., Problem]:
    return _problem


@pytest.fixture(scope="session")
def make_plan() -> Callable[..., Plan]:
    return _plan
