"""Numbers written with a unit or as something else: the error says which number to write."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from trainwright import documents
from trainwright.cluster import Cluster
from trainwright.quantity import expected_quantity

CLUSTER = """
accelerators: [{name: T4, memory_bytes: 17179869184}]
nodes:
- name: one
  accelerator: T4
  devices: 2
  network: {latency_seconds: 0.00001, bandwidth_bytes_per_second: 12500000000}
  inside: {latency_seconds: 0.00001, bandwidth_bytes_per_second: 12500000000}
"""


@pytest.mark.parametrize(
    ("right", "wrong", "place"),
    [
        ("17179869184", "16GiB", "accelerators.0.memory_bytes: expected a whole number of bytes"),
        ("17179869184", "16Gi", "accelerators.0.memory_bytes: expected a whole number of bytes"),
        ("17179869184", "17.179869184e9", "accelerators.0.memory_bytes: expected a whole number of bytes"),
        (
            "12500000000",
            "100Gbit/s",
            "nodes.0.network.bandwidth_bytes_per_second: expected a number of bytes per second",
        ),
        ("0.00001", "10us", "nodes.0.network.latency_seconds: expected a number of seconds"),
    ],
)
def test_a_unit_in_a_cluster_is_refused_with_the_number_to_write(right: str, wrong: str, place: str) -> None:
    with pytest.raises(documents.DocumentError) as refusal:
        documents.loads(CLUSTER.replace(right, wrong, 1), Cluster, source="cluster.yaml")
    assert str(refusal.value) == f"cluster.yaml: {place}, got '{wrong}'; write {right}"


@pytest.mark.parametrize(
    ("field", "written", "meant"),
    [
        ("memory_bytes", "16 GB", 16e9),
        ("memory_bytes", "512MiB", 512 * 2**20),
        ("bandwidth_bytes_per_second", "100 Gbps", 12.5e9),
        ("bandwidth_bytes_per_second", "40mbit", 5e6),
        ("flow_bytes_per_second", "25GB/s", 25e9),
        ("latency_seconds", "1.5 ms", 0.0015),
        ("latency_seconds", "5µs", 0.000005),
        ("flops_per_second", "125 TFLOPS", 125e12),
        ("updated_parameters_per_second", "5e7", 5e7),
    ],
)
def test_units_are_read_by_the_field(field: str, written: str, meant: float) -> None:
    told = expected_quantity(field, written, whole=False).partition("; write ")[2]
    assert yaml.safe_load(told) == meant


@pytest.mark.parametrize(
    ("field", "written"),
    [
        ("memory_bytes", "16GB/s"),  # a rate is no size
        ("memory_bytes", "16Gb"),  # bits, or a slip
        ("bandwidth_bytes_per_second", "10G"),  # bits or bytes
        ("memory_bytes", "9e99TiB"),
        ("latency_seconds", "1 \u017f"),  # a long s
        ("devices", "eight"),
        ("devices", [8]),
        ("devices", None),
    ],
)
def test_ambiguous_quantity_is_refused_without_a_suggestion(field: str, written: object) -> None:
    told = expected_quantity(field, written, whole=True)
    assert told.startswith("expected a whole number")
    assert "write" not in told


@example(text="1E30")
@given(text=st.text() | st.from_regex(r"[0-9.eE+-]{1,9} ?[kmgtpKMGTP]?i?[bB]?(it)?(/s)?", fullmatch=True))
def test_any_text_is_refused_in_one_short_sentence(text: str) -> None:
    for field in ("memory_bytes", "bandwidth_bytes_per_second", "latency_seconds", "flops_per_second", "rows"):
        told = expected_quantity(field, text, whole=field == "rows")
        assert "\n" not in told
        assert len(told) < 500


def test_field_without_its_unit_is_corrected_to_its_full_name() -> None:
    text = CLUSTER.replace("bandwidth_bytes_per_second", "bandwidth", 1)
    with pytest.raises(documents.DocumentError, match="did you mean bandwidth_bytes_per_second"):
        documents.loads(text, Cluster)
