"""Cells of plans in tables: which node holds which stages, and which pipeline trains which rows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from trainwright.accelerators import cluster_of
from trainwright.cluster import Cluster, Device, Node, Port
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.report.plan_summary import lines, node_names
from trainwright.report.tables import plan_headings
from trainwright.strategy import Strategy

PORT = Port(1e-5, 1e10)
CLUSTER = cluster_of({"p3.8xlarge": 3, "g4dn.12xlarge": 1})


def renamed(*names: str) -> Cluster:
    """Return a cluster of nodes of two devices."""
    (accelerator,) = cluster_of({"p3.8xlarge": 1}).accelerators
    return Cluster((accelerator,), tuple(Node(name, accelerator.name, 2, PORT, PORT) for name in names))


def devices_of(*names: str, slots: Sequence[int] = (0, 1)) -> list[Device]:
    return [Device(name, slot) for name in names for slot in slots]


@pytest.mark.parametrize(
    ("names", "slots", "written"),
    [
        (("n1", "n2", "n3"), (0, 1), "n1–3"),
        (("n9", "n10"), (0, 1), "n9–10"),
        (("n1", "n3", "n4"), (0, 1), "n1, n3–4"),
        (("n2", "n1"), (0, 1), "n2, n1"),
        (("a1", "b2"), (0, 1), "a1, b2"),
        (("n01", "n02"), (0, 1), "n01, n02"),
        (("ip-10-0-0-7.ec2", "worker"), (0, 1), "ip-10-0-0-7.ec2, worker"),
        (("1", "2"), (0, 1), "1–2"),
        (("n1",), (1,), "n1:1"),
        (("n1", "n2"), (1,), "n1:1, n2:1"),
        (("a", "b", "c", "d", "e", "f"), (0, 1), "a, b, c, d, 2 more"),
    ],
)
def test_nodes_of_consecutive_numbers_are_one_part_and_slots_say_which_devices(
    names: tuple[str, ...], slots: Sequence[int], written: str
) -> None:
    assert node_names(devices_of(*names, slots=slots), renamed(*names)) == written


def plan_of(*parts: tuple[int, Sequence[Device]]) -> Plan:
    """Return a plan of pipelines of one stage, by their micro-batches and devices."""
    pipelines = tuple(
        Pipeline(
            micro_batches,
            len(devices),
            (Stage(tuple(devices), (LayerRun(0, 4, Strategy(1, len(devices)), (1,) * len(devices)),)),),
        )
        for micro_batches, devices in parts
    )
    rows = sum(pipeline.micro_batches * pipeline.micro_batch_size for pipeline in pipelines)
    return Plan(4, rows, pipelines)


def test_every_pipeline_says_its_number_and_its_rows() -> None:
    fast, slow = CLUSTER.devices[:8], CLUSTER.devices[12:15]
    of_two, of_one = plan_of((3, fast), (1, slow)), plan_of((3, fast))
    told = lines(of_two, CLUSTER)
    assert told.pipelines.split("\n") == ["0: 24 of 27 rows", "1: 3 of 27 rows"]
    assert told.nodes.split("\n") == ["p3.8xlarge-1–2", "g4dn.12xlarge-1:0–2"]
    assert lines(of_one, CLUSTER).pipelines == "0: 24 of 24 rows"
    assert [*plan_headings([of_one, of_two], CLUSTER)] == ["pipelines", "degrees", "batches", "layers", "nodes"]
    assert "pipelines" not in plan_headings([of_one], CLUSTER)
    assert "nodes" not in plan_headings([of_one], renamed("alone"))
