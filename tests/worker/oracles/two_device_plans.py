"""Plans of two devices: each a replica, a stage or a pipeline."""

from __future__ import annotations

from trainwright.cluster import Device
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.strategy import Strategy

DEVICES = Device("node-0", 0), Device("node-0", 1)


def replicas(layers: int, rows: tuple[int, int], micro_batches: int, **fields) -> Plan:
    """Return a plan of one stage of two replicas, which compute these rows of each micro-batch."""
    run = LayerRun(0, layers, Strategy(1, 2, **fields), rows)
    return _plan(layers, Pipeline(micro_batches, sum(rows), (Stage(DEVICES, (run,)),)))


def stages(layers: int, cut: int, rows: int, micro_batches: int, **fields) -> Plan:
    """Return a plan of two stages of one replica each, the second of which begins with layer `cut`."""
    made = tuple(
        Stage((device,), (LayerRun(first, end - first, Strategy(1, 1, **fields), (rows,)),))
        for device, first, end in zip(DEVICES, (0, cut), (cut, layers), strict=True)
    )
    return _plan(layers, Pipeline(micro_batches, rows, made))


def pipelines(layers: int, rows: int, micro_batches: tuple[int, int]) -> Plan:
    """Return a plan of two pipelines of one device each, which compute these numbers of micro-batches."""
    run = LayerRun(0, layers, Strategy(1, 1), (rows,))
    made = (
        Pipeline(number, rows, (Stage((device,), (run,)),))
        for device, number in zip(DEVICES, micro_batches, strict=True)
    )
    return _plan(layers, *made)


def _plan(layers: int, *made: Pipeline) -> Plan:
    return Plan(layers, sum(one.micro_batches * one.micro_batch_size for one in made), made)
