"""The runtime that follows from measured links."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainwright.cluster import Accelerator, Cluster, Device, Emulation, Link, Node
from trainwright.measurement.collective_check import collective_ratios, measured_runtime, overlap_slowdown
from trainwright.runtime import Runtime
from trainwright.worker_api import CollectiveTime, Overlap

LINKS = tuple(Link(*edge, 1e-4, 1e8) for edge in (("a", "b"), ("b", "a")))


def cluster_of(accelerator: Accelerator) -> Cluster:
    return Cluster((accelerator,), tuple(Node(name, accelerator.name, 1) for name in ("a", "b")), LINKS)


CLUSTER = cluster_of(Accelerator("t4", 2**34))
EMULATED = cluster_of(Accelerator("emulated-t4", 2**34, Emulation(1e9, 0.001, 1e8)))
SLOW = (CollectiveTime("all_reduce", (Device("a", 0), Device("b", 0)), 1_000_000, 1.0, 3),)
OVERLAPS = tuple(Overlap(node, ratio) for node, ratio in (("a", 1.1), ("b", 1.2), ("c", 5.0)))


def test_runtime_is_the_default_without_measurements_and_paced_when_emulated() -> None:
    assert measured_runtime(CLUSTER) == Runtime()
    assert measured_runtime(EMULATED) == Runtime(overlap_slowdown_ratio=1.0)
    assert measured_runtime(EMULATED, overlaps=OVERLAPS).overlap_slowdown_ratio == 1.0


def test_runtime_takes_measured_collectives_and_overlap() -> None:
    found = measured_runtime(CLUSTER, SLOW, OVERLAPS)
    assert found == Runtime(collective_ratios=collective_ratios(SLOW, CLUSTER), overlap_slowdown_ratio=1.2)
    assert found.collective_ratios.all_reduce > 10
    assert measured_runtime(EMULATED, SLOW).collective_ratios == found.collective_ratios


@pytest.mark.parametrize(("half_seconds", "is_chosen"), [(0.5, True), (1.0, False)])
def test_runtime_is_sequence_parallel_unless_half_an_all_reduce_takes_longer(
    half_seconds: float, is_chosen: bool
) -> None:
    halves = (replace(SLOW[0], collective=kind, seconds=half_seconds) for kind in ("all_gather", "reduce_scatter"))
    assert measured_runtime(CLUSTER, (*SLOW, *halves)).sequence_parallel is is_chosen


def test_slowdown_below_one_counts_as_noise() -> None:
    fast = (Overlap("a", 0.9),)
    assert overlap_slowdown(fast) == 0.9
    assert measured_runtime(CLUSTER, overlaps=fast).overlap_slowdown_ratio == 1.0
    assert overlap_slowdown(()) is None


def test_unknown_devices_are_refused() -> None:
    strange = replace(SLOW[0], members=(Device("a", 0), Device("z", 0)))
    with pytest.raises(ValueError, match="z"):
        measured_runtime(CLUSTER, (strange,))
