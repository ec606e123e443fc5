"""Comparison of measured collectives with the cost model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rings import all_reduce_seconds

from trainwright.cluster import Accelerator, Cluster, Device, Node, Port
from trainwright.cost.network import Network
from trainwright.measurement.collective_check import check_collectives, collective_ratios
from trainwright.worker_api import CollectiveTime

CARD = Port(1e-4, 1e9)
CLUSTER = Cluster((Accelerator("t4", 2**34),), tuple(Node(name, "t4", 2, CARD, Port(1e-6, 1e10)) for name in "abc"))
OVER = tuple(Device(name, 0) for name in "abc")


def exact(kind: str = "all_reduce", size: int = 10**6, members: tuple[Device, ...] = OVER) -> CollectiveTime:
    """Return a collective with exactly the cost model's time."""
    seconds = all_reduce_seconds(members, size, Network(CLUSTER)) * (1 if kind == "all_reduce" else 0.5)
    return CollectiveTime(kind, members, size, seconds, 5)


def test_error_is_zero_when_prediction_and_measurement_agree() -> None:
    inside = (Device("a", 0), Device("a", 1))
    times = [exact(kind, size, members) for kind in ("all_reduce", "all_gather", "reduce_scatter")
             for size in (1_000, 10**8) for members in (OVER, inside, (*inside, *OVER[1:]))]  # fmt: skip
    check = check_collectives(times, CLUSTER)
    assert check.count == 18
    assert check.mean_error == pytest.approx(0)
    assert check.worst.error == pytest.approx(0)


def test_mean_error_is_absolute_and_weighted_and_the_worst_is_signed() -> None:
    slow, fast = exact(), exact("all_gather")
    slow, fast = replace(slow, seconds=2 * slow.seconds), replace(fast, seconds=0.8 * fast.seconds)
    check = check_collectives([slow, exact(), fast], CLUSTER)
    assert check.mean_error == pytest.approx((1 + 0 + 0.1) / (2 + 1 + 0.4))
    assert check.measured_ratio == pytest.approx((2 + 1 + 0.4) / (1 + 1 + 0.5))
    assert check.worst.measured is slow
    assert check.worst.error == pytest.approx(-0.5)
    assert check.worst.predicted_seconds == pytest.approx(slow.seconds / 2)


def test_check_is_empty_without_measurements_and_refuses_unknown_nodes() -> None:
    assert check_collectives([], CLUSTER) is None
    assert check_collectives([replace(exact(), seconds=0.0)], CLUSTER) is None
    with pytest.raises(ValueError, match="no node x"):
        check_collectives([replace(exact(), members=(Device("a", 0), Device("x", 0)))], CLUSTER)


def test_ratios_pool_collectives_across_nodes_and_are_at_least_one() -> None:
    long, short = exact("reduce_scatter", 10**7), exact("reduce_scatter", 10**6)
    long, short = replace(long, seconds=2 * long.seconds), replace(short, seconds=4 * short.seconds)
    inside = exact("all_gather", members=(Device("a", 0), Device("a", 1)))
    fast = replace(exact(), seconds=0.5 * exact().seconds)
    found = collective_ratios([long, short, fast, replace(inside, seconds=3 * inside.seconds)], CLUSTER)
    assert 2 < found.reduce_scatter < 3
    assert (found.all_reduce, found.all_gather) == (1, 1)
    # With these ratios the check reports the remaining error.
    check = check_collectives([replace(long, seconds=long.seconds * found.reduce_scatter / 2)], CLUSTER, found)
    assert check.mean_error == pytest.approx(0)


def test_rings_inside_a_node_have_no_ratio() -> None:
    inside = exact("all_gather", members=(Device("a", 0), Device("a", 1)))
    assert collective_ratios([replace(inside, seconds=3 * inside.seconds)], CLUSTER).all_gather == 1
    assert collective_ratios([], CLUSTER).all_gather == 1
    over = replace(exact("all_gather"), seconds=3 * exact("all_gather").seconds)
    found = collective_ratios([over], CLUSTER)
    assert found.all_gather == pytest.approx(3)
    assert check_collectives([inside, over], CLUSTER, found).mean_error == pytest.approx(0)


def test_all_to_alls_have_a_ratio_of_their_own_where_they_were_measured() -> None:
    # Three nodes of one device: a third of the bytes goes to each of the others.
    over = CollectiveTime("all_to_all", OVER, 10**7, 2 * (1e-4 + 2 / 3 * 10**7 / 1e9), 5)
    measured = collective_ratios([over], CLUSTER)
    assert measured.exchange == measured.all_to_all == pytest.approx(2)
    assert check_collectives([over], CLUSTER, measured).mean_error == pytest.approx(0)
    gathered = replace(exact("all_gather"), seconds=3 * exact("all_gather").seconds)
    unmeasured = collective_ratios([gathered], CLUSTER)
    assert (unmeasured.all_to_all, unmeasured.exchange) == (None, pytest.approx(3))
