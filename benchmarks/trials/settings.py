"""Settings of the trials, and the measurements made before any prediction."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from local_cluster.config import ClusterConfig
from trainwright.cluster import Accelerator, Cluster, Emulation, Node
from trainwright.families import Gpt, Llama, Moe
from trainwright.measurement.collective_check import collective_sizes, measured_runtime
from trainwright.model import Model
from trainwright.profiles import LayerProfile, Profiles
from trainwright.runtime import Runtime
from trainwright.worker_api import Gang, GangNode, LinkReport, LinkTask, ProfilingReport, ProfilingTask
from trials.pods import Bench

CLUSTER_FILE = Path(__file__).with_name("cluster.yaml")
OPERATORS_FILE = Path(__file__).with_name("operators.yaml")
PROFILED_ROWS = (1, 2, 4, 8, 16)
"""Measured rows; trials also use 3, 5, 6, 12 … rows, which are interpolated."""
TENSOR_DEGREES = (1, 2)
MEBIBYTE = 2**20


@dataclass(frozen=True)
class TrialScenario:
    """Subset of the cluster's nodes and the model to train on them.

    Attributes:
        tensor_degrees, rows: that layers are profiled at.
    """

    name: str
    nodes: tuple[str, ...]
    model: Model
    batch: int
    tensor_degrees: tuple[int, ...] = TENSOR_DEGREES
    rows: tuple[int, ...] = PROFILED_ROWS


SETTINGS = (
    TrialScenario(
        "AMP's mixed cluster: 3 nodes of V100, one of T4",
        ("v100-1", "v100-2", "v100-3", "t4-1"),
        Model.of(Gpt(layers=8, hidden_size=64, heads=4, sequence_length=64, vocabulary_size=512)),
        48,
    ),
    TrialScenario(
        "three types: a node each of V100, T4 and A100",
        ("v100-1", "t4-1", "a100-1"),
        Model.of(
            Llama(
                layers=7, hidden_size=64, heads=4, sequence_length=64, vocabulary_size=384, intermediate_size=160,
                key_value_heads=2,
            )
        ),
        30,
    ),
)  # fmt: skip


OPERATOR_SETTINGS = (
    TrialScenario(
        "shardings of operators: 2 nodes of two V100",
        ("v100-1", "v100-2"),
        Model.of(Gpt(layers=3, hidden_size=64, heads=4, sequence_length=64, vocabulary_size=512)),
        8,
        tensor_degrees=(1, 2, 4),
        rows=(1, 2, 4, 8),
    ),
    TrialScenario(
        "shardings of operators, mixture: 2 nodes of two V100",
        ("v100-1", "v100-2"),
        Model.of(Moe(2, 64, 4, 32, 512, experts=4, intermediate_size=256)),
        8,
        tensor_degrees=(1, 2, 4),
        rows=(1, 2, 4, 8),
    ),
)


def accelerators(shape: ClusterConfig) -> tuple[Accelerator, ...]:
    return tuple(
        Accelerator(name, one.memory_mib * MEBIBYTE, Emulation(**shape.device_table(name)))
        for name, one in shape.accelerators.items()
    )


def gang(shape: ClusterConfig, nodes: tuple[str, ...], slots: int | None = None, **fields: Any) -> Gang:
    """Return a gang of these nodes with `slots` processes on each, or one for every device."""
    chosen = [node for node in shape.nodes if node.name in nodes]
    tables = {one.name: one.emulation for one in accelerators(shape) if one.emulation}
    return Gang(
        tuple(
            GangNode(one.name, tuple(range(min(slots or one.devices, one.devices))), one.accelerator) for one in chosen
        ),
        emulations=tuple((name, tables[name]) for name in dict.fromkeys(one.accelerator for one in chosen)),
        **fields,
    )


@dataclass(frozen=True)
class MeasuredCluster:
    """Measured nodes and links of a scenario, and measured collective seconds over them."""

    cluster: Cluster
    runtime: Runtime


def measure_cluster(bench: Bench, shape: ClusterConfig, setting: TrialScenario) -> MeasuredCluster:
    """Measure the scenario's links, and collectives of its model's sizes."""
    order = LinkTask(
        gang(shape, setting.nodes, deadline_seconds=600.0), repeats=7, collective_bytes=collective_sizes(setting.model),
        collective_seconds=60.0, all_to_all=True,
    )  # fmt: skip
    report = bench.run(order)
    assert isinstance(report, LinkReport)
    nodes = tuple(Node(one.name, one.accelerator, one.devices) for one in shape.nodes if one.name in setting.nodes)
    used = {node.accelerator for node in nodes}
    cluster = Cluster(tuple(one for one in accelerators(shape) if one.name in used), nodes, report.links)
    return MeasuredCluster(cluster, measured_runtime(cluster, report.collectives))


def measured_profiles(bench: Bench, shape: ClusterConfig, setting: TrialScenario) -> Profiles:
    """Profile every layer on every accelerator of the scenario, at every tensor degree."""
    layers: list[LayerProfile] = []
    by_accelerator = {node.accelerator: node.name for node in shape.nodes if node.name in setting.nodes}
    for node in by_accelerator.values():
        for tensor in setting.tensor_degrees:
            order = ProfilingTask(
                gang(shape, (node,), slots=1, deadline_seconds=600.0), setting.model, tensor, setting.rows,
                warmup_iterations=2, iterations=9,
            )  # fmt: skip
            report = bench.run(order)
            assert isinstance(report, ProfilingReport)
            layers += report.layers
    return Profiles(tuple(layers))
