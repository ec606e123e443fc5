"""AMP's own cost model (Eq. 3–5), for faithful reproduction and to preselect candidates. No bound in either direction."""

from __future__ import annotations

from collections.abc import Sequence

from trainwright.cluster import Cluster, Device
from trainwright.cost.compute import unit_seconds
from trainwright.cost.layout import Unit, device_pairs, held_parameters, only_pipeline, overlaps, units
from trainwright.cost.memory import GRADIENT_BYTES
from trainwright.cost.setting import Setting
from trainwright.plan import Pipeline, Plan


def lowest_bandwidth(members: Sequence[Device], cluster: Cluster) -> float:
    """The lowest bandwidth between any two members, in bytes per second (B prime, below Eq. 3)."""
    nodes = dict.fromkeys(device.node for device in members)
    edges = [(a, b) for a in nodes for b in nodes if a != b]
    crowded = [node for node in nodes if sum(device.node == node for device in members) > 1]
    return min(cluster.link(*edge).bandwidth_bytes_per_second for edge in (*edges, *((node, node) for node in crowded)))


def exchange_seconds(upper: tuple[Unit, ...], lower: tuple[Unit, ...], row_bytes: float, cluster: Cluster) -> float:
    """e_i: the slowest pair's activation forward and gradient backward, v / b each."""
    seconds = 0.0
    for sender, receiver, rows in overlaps(upper, lower):
        there = min(_bandwidth(a, b, cluster) for a, b in device_pairs(sender, receiver))
        back = min(_bandwidth(a, b, cluster) for a, b in device_pairs(receiver, sender))
        seconds = max(seconds, rows * row_bytes * (1 / there + 1 / back))
    return seconds


def _bandwidth(source: Device, target: Device, cluster: Cluster) -> float:
    return cluster.link(source.node, target.node).bandwidth_bytes_per_second


def estimate_seconds(plan: Plan, setting: Setting) -> float:
    """T of Eq. 4: the slowest pipeline (Eq. 5) plus the slowest device's gradient synchronisation (Eq. 3).

    A stage's time is that of its slowest replica, so that one pipeline stands for all of them.
    """
    pipeline = only_pipeline(plan, setting)
    stages = units(pipeline)
    times = []
    for stage, replicas in zip(pipeline.stages, stages, strict=True):
        seconds = [unit_seconds(unit, stage, setting) for unit in replicas]
        times.append(max(unit.forward_seconds + unit.backward_seconds for unit in seconds))
    exchanges = [
        exchange_seconds(
            stages[i],
            stages[i + 1],
            setting.model.output_bytes_per_row(pipeline.stages[i].end - 1),
            setting.cluster,
        )
        for i in range(len(stages) - 1)
    ]
    pipeline_seconds = (pipeline.micro_batches - 1) * max(times) + sum(exchanges) + sum(times)
    return pipeline_seconds + max(_sync_seconds(pipeline, number, setting) for number in range(len(stages)))


def _sync_seconds(pipeline: Pipeline, number: int, setting: Setting) -> float:
    """T_dpsync of the slowest data group of a stage: Eq. 3 with M = all parameters held at a device."""
    stage = pipeline.stages[number]
    run = stage.layers[0]
    if run.data == 1:
        return 0.0
    message = held_parameters(setting.model, stage.first, stage.end, run.tensor) * GRADIENT_BYTES
    return max(
        2 * (run.data - 1) * message / (run.data * lowest_bandwidth(group, setting.cluster))
        for group in run.data_groups(stage.devices)
    )
