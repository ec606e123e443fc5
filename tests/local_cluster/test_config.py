"""`cluster.yaml` is read, and each mistake in it is reported in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from local_cluster.config import ClusterConfig, burst_bytes, rate_bytes_per_second, read_config
from local_cluster.network import token_bucket
from local_cluster.paths import project_root
from trainwright.accelerators import data_sheet
from trainwright.layer import Dtype

Read = Callable[[str], ClusterConfig]


def test_committed_config_has_three_types_in_the_proportions_of_their_data_sheets() -> None:
    shape = read_config(project_root() / "deploy" / "local-cluster" / "cluster.yaml")
    assert [(node.accelerator, node.devices) for node in shape.nodes] == [
        ("emulated-v100", 2),
        ("emulated-v100", 2),
        ("emulated-t4", 4),
        ("emulated-a100", 2),
    ]
    speeds = {name: entry.flops_per_second for name, entry in shape.accelerators.items()}
    sheets = {
        "emulated-v100": "Tesla-V100-SXM2-16GB",
        "emulated-t4": "Tesla-T4",
        "emulated-a100": "NVIDIA-A100-SXM4-40GB",
    }
    stated = {name: data_sheet(sheet).flops_per_second(Dtype.FLOAT16) for name, sheet in sheets.items()}
    for name, speed in speeds.items():
        assert speed / speeds["emulated-v100"] == pytest.approx(stated[name] / stated["emulated-v100"], rel=0.05)


@pytest.mark.parametrize(
    ("right", "wrong", "told"),
    [
        ("40mbit", "40mb", "'40mb' is not a rate"),
        ("40mbit", "9kbit", "too slow"),
        ("nodes:", "slowdown: 80\nnodes:", "node 'left': 40mbit with slowdown 80 is too slow"),
        ("accelerator: emulated-fast, devices: 4", "accelerator: emulated-slow, devices: 4", "not under accelerators"),
        ("name: right", "name: left", "'left' is used twice"),
        ("name: right", "name: node-0", "the system node's name"),
        ("emulated-fast", "fast", "call it emulated-fast"),
        ("devices: 4", "devices: 0", "nodes.1.devices"),
        ("devices: 4", "devices: 4, colour: red", "nodes.1.colour"),
        ("name: rehearsal", "name: a-very-long-name", "at most 12 characters"),
        ("name: rehearsal", "name: rehearsal\nnetwork: {pods: 10.231.0.0/16}", "overlaps"),
        ("name: rehearsal", "name: rehearsal\nnetwork: {nodes: 10.1.0.0/30}", "too small"),
        ("nodes:", "nodes: [", "is not YAML"),
    ],
)
def test_mistake_in_the_config_is_named(read: Read, description: str, right: str, wrong: str, told: str) -> None:
    with pytest.raises(ValueError, match=r"cluster\.yaml") as refusal:
        read(description.replace(right, wrong))
    assert told in str(refusal.value)


def test_slowdown_divides_every_speed(read: Read, description: str) -> None:
    slowed = read(f"{description}slowdown: 2\n")
    assert [slowed.link_of(node) for node in slowed.nodes] == ["20mbit", "100mbit"]
    table = {"flops_per_second": 0.6e9, "floor_seconds": 0.004, "updated_parameters_per_second": 2.5e7}
    assert slowed.device_table("emulated-fast") == table


def test_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere\.yaml does not exist"):
        read_config(tmp_path / "nowhere.yaml")


def test_addresses_are_distinct_and_inside_their_ranges(shape: ClusterConfig) -> None:
    addresses = {shape.node_address(name) for name in shape.node_names} | {shape.host_address}
    assert len(addresses) == len(shape.node_names) + 1
    assert all(address in shape.network.nodes for address in addresses)
    ranges = [shape.pod_range(name) for name in shape.node_names]
    assert all(inside.subnet_of(shape.network.pods) for inside in ranges)
    assert not any(one.overlaps(other) for one in ranges for other in ranges if one is not other)


@pytest.mark.parametrize(
    ("link", "bytes_per_second"), [("40mbit", 5e6), ("1.5gbit", 187.5e6), ("800kbit", 1e5), ("8bit", 1)]
)
def test_rates_are_decimal_bits(link: str, bytes_per_second: float) -> None:
    assert rate_bytes_per_second(link) == bytes_per_second


@pytest.mark.parametrize("link", ["40mbit", "200mbit"])
def test_the_bucket_is_small_enough_to_shape_a_message_of_16_to_32_kib(link: str) -> None:
    assert 2 * 1514 < burst_bytes(link) <= {"40mbit": 16, "200mbit": 32}[link] * 1024 / 4
    assert token_bucket(link)[token_bucket(link).index("burst") + 1] == str(burst_bytes(link))


def test_fast_link_gets_a_bucket_for_late_timers() -> None:
    assert burst_bytes("10gbit") == 312500
