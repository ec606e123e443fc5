"""Links, collectives and overlap, measured by gangs on this machine."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from trainwright.cluster import Device, Emulation, Link
from trainwright.worker_api import LinkReport, LinkTask
from trainwright_worker.gang.errors import WorkerError
from trainwright_worker.measure.collective_bench import concurrent_group_sets, message_numel
from trainwright_worker.measure.link_bench import TimedMessage, fitted_bandwidth
from trainwright_worker.measure.pair_rounds import all_slot_rounds
from trainwright_worker.measure.slot_streams import SlotStream, links_with_all_slots
from trainwright_worker.validation import check_task

SIZES = (4_096, 65_536, 1_048_576, 8_388_608)


@pytest.mark.torch_processes
@pytest.mark.timed
@pytest.mark.timeout(120)
def test_collectives_are_measured_inside_nodes_and_over_them(worker, make) -> None:
    order = LinkTask(
        make.gang(2, 1), repeats=1, collective_bytes=SIZES, collective_seconds=4.0, overlap=True, all_to_all=True
    )
    outcome = worker.local(order)
    assert outcome.code == 0, outcome.errors
    (report,) = outcome.reports
    assert isinstance(report, LinkReport)
    assert len(report.links) == 3
    first, second, third = Device("node-a", 0), Device("node-a", 1), Device("node-b", 0)
    groups = [(first, second), (first, third), (first, second, third)]
    assert list(dict.fromkeys(one.members for one in report.collectives)) == groups
    assert all(
        uses == 1 for uses in Counter((x.members, x.collective, x.message_bytes) for x in report.collectives).values()
    )
    found = {(one.members, one.collective): [] for one in report.collectives}
    assert set(found) == {(members, kind) for members in groups for kind in order.collectives}
    for one in report.collectives:
        found[one.members, one.collective].append(one)
        assert one.samples >= 1
        assert 0 < one.seconds < 10
        assert one.message_bytes % (4 * len(one.members)) == 0
        # No link is faster than memory.
        assert one.message_bytes / one.seconds < 1e12
    for series in found.values():
        for few, many in pairwise(series):
            assert many.message_bytes > few.message_bytes
        if len(series) == len(SIZES):
            # 2000 times the bytes take longer than one start-up, even on a busy machine.
            assert series[-1].seconds > series[0].seconds
    assert [one.node for one in report.overlaps] == ["node-a", "node-b"]
    for one in report.overlaps:
        assert 0.2 < one.compute_slowdown_ratio < 50


@pytest.mark.torch_processes
@pytest.mark.timed
@pytest.mark.timeout(120)
def test_only_ordered_pairs_and_nodes_with_two_slots_are_measured(worker, make) -> None:
    pairs = (("node-c", "node-a"), ("node-a", "node-b"), ("node-d", "node-b"))
    outcome = worker.local(LinkTask(make.gang(1, 1, 2, 1), pairs=pairs, repeats=1))
    assert outcome.code == 0, outcome.errors
    (report,) = outcome.reports
    directed = {edge for a, b in pairs for edge in ((a, b), (b, a))}
    assert {(link.source, link.target) for link in report.links} == {*directed, ("node-c", "node-c")}
    assert len(report.links) == 7
    # Two rounds of node pairs, since node-a is in two, the first of both slots of node-c; then the link within node-c.
    told = [(one.what, one.done, one.total) for one in outcome.progress]
    rounds = ("rounds of latencies", "rounds of links")
    assert told == [(what, number, 4) for what in rounds for number in (1, 2, 3, 4)]


@pytest.mark.torch_processes
@pytest.mark.timed
@pytest.mark.timeout(120)
def test_sizes_beyond_the_time_are_left_out_and_emulated_devices_have_no_overlap(worker, make) -> None:
    gang = make.gang(1, 1)
    nodes = tuple(replace(node, accelerator="emulated-x") for node in gang.nodes)
    gang = replace(gang, nodes=nodes, emulations=(("emulated-x", Emulation(1e9, 0.01, 1e9)),))
    order = LinkTask(gang, repeats=1, collective_bytes=(1_024, 2**40), collective_seconds=0.1, overlap=True)
    outcome = worker.local(order)
    assert outcome.code == 0, outcome.errors
    (report,) = outcome.reports
    assert [(one.collective, one.message_bytes) for one in report.collectives] == [
        (kind, 1_024) for kind in order.collectives
    ]
    assert report.overlaps == ()


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ((2,), [[(0, 1)]]),
        ((1, 1), [[(0, 1)]]),
        ((2, 2), [[(0, 1), (2, 3)], [(0, 2)], [(0, 1, 2, 3)]]),
        ((1, 3, 1), [[(1, 2, 3)], [(0, 1, 4)], [(0, 1, 2, 3, 4)]]),
    ],
)
def test_groups_of_a_stage_have_no_device_in_common(make, devices, expected) -> None:
    assert concurrent_group_sets(make.gang(*devices)) == expected


def test_all_to_alls_are_measured_where_the_task_says_so(make) -> None:
    plain = LinkTask(make.gang(2))
    assert plain.collectives == ("all_reduce", "all_gather", "reduce_scatter")
    assert replace(plain, all_to_all=True).collectives == (*plain.collectives, "all_to_all")


def test_every_member_has_an_equal_part_of_a_message() -> None:
    for members in (2, 3, 7):
        for size in (1, 4_096, 1_000_001):
            values = message_numel(size, members)
            assert values % members == 0
            assert abs(4 * values - size) <= 4 * members


@pytest.mark.parametrize(
    "fields",
    [{"collective_bytes": (4, 4)}, {"collective_bytes": (8, 4)}, {"collective_bytes": (4,), "collective_seconds": 0.0}],
)
def test_collectives_that_cannot_be_measured_are_refused(make, fields: dict) -> None:
    check_task(LinkTask(make.gang(2), collective_bytes=(4, 8)))
    with pytest.raises(WorkerError, match="collective_bytes must be ascending"):
        check_task(LinkTask(make.gang(2), **fields))


@pytest.mark.torch_processes
@pytest.mark.timed
@pytest.mark.timeout(120)
def test_all_slots_of_two_nodes_send_at_once(worker, make) -> None:
    outcome = worker.local(LinkTask(make.gang(2, 2, 1), repeats=1))
    assert outcome.code == 0, outcome.errors
    (report,) = outcome.reports
    assert len(report.links) == 8
    assert [(one.done, one.total) for one in outcome.progress if one.what == "rounds of all slots"] == [(1, 1)]
    for link in report.links:
        # The third node has one slot, and inside a node nothing is measured at once.
        if {link.source, link.target} != {"node-a", "node-b"}:
            assert link.flow_bytes_per_second is None
        assert (link.flow_bytes_per_second or 0.0) < link.bandwidth_bytes_per_second


def test_all_slots_at_once_are_the_bandwidth_and_one_alone_is_the_flow() -> None:
    links = (
        Link("a", "b", 1e-5, 10.0),
        Link("b", "a", 1e-5, 10.0),
        Link("a", "c", 1e-5, 10.0),
        Link("a", "a", 1e-6, 99.0),
    )
    streams = [
        # Four NICs, one of which takes longer: all bytes count by its seconds.
        *(SlotStream("a", "b", 40, seconds) for seconds in (4.0, 4.0, 4.0, 5.0)),
        # One NIC for all slots.
        *(SlotStream("b", "a", 40, 16.0) for _ in range(4)),
    ]
    assert links_with_all_slots(links, streams) == (Link("a", "b", 1e-5, 32.0, 10.0), *links[1:])


def test_rounds_of_all_slots_pair_the_common_slots_of_nodes_that_have_several(make) -> None:
    gang = make.gang(2, 3, 1, 2)
    rounds = all_slot_rounds(gang, [[(0, 1), (2, 3)], [(0, 2)], [(0, 3), (1, 2)]])
    assert rounds == [[(0, 2), (1, 3)], [(0, 6), (1, 7)]]


MIB = 2**20


@pytest.mark.parametrize("bytes_per_second", [1e8, 7e9, 5e10])
def test_bandwidth_is_that_of_times_without_scatter(bytes_per_second: float) -> None:
    latency, large_bytes = 2e-5, round(bytes_per_second * 0.006)
    small, large = (TimedMessage(n, 2 * latency + n / bytes_per_second) for n in (large_bytes // 4, large_bytes))
    for is_emulated in (False, True):
        found = fitted_bandwidth(small, large, latency, is_emulated=is_emulated)
        assert found == pytest.approx(bytes_per_second, rel=1e-6)


def test_scatter_makes_no_link_faster_than_its_largest_message() -> None:
    # 7 GB/s; stalls bring the small messages' median within 1 ms of the large ones'.
    small, large = TimedMessage(10 * MIB, 6.3e-3), TimedMessage(40 * MIB, 7e-3)
    slope = 30 * MIB / 0.7e-3
    assert fitted_bandwidth(small, large, 2e-5, is_emulated=False) == pytest.approx(40 * MIB / 6.96e-3)
    assert fitted_bandwidth(small, large, 2e-5, is_emulated=True) == pytest.approx(slope)
    # The median may be less than the one time of 5 ms that ended the growth.
    small, large = TimedMessage(10 * MIB, 4.2e-3), TimedMessage(40 * MIB, 4.9e-3)
    assert fitted_bandwidth(small, large, 2e-5, is_emulated=False) == pytest.approx(40 * MIB / 4.86e-3)
    # A latency that fills the whole time says nothing of the bytes.
    assert fitted_bandwidth(small, large, 3.5e-3, is_emulated=False) == pytest.approx(slope)


def test_start_up_bounds_no_bandwidth_when_messages_are_short() -> None:
    # 256 MiB over NVLink: 0.6 ms, and 0.1 ms of start-up.
    small, large = (TimedMessage(n, 1e-4 + n / 4.5e11) for n in (64 * MIB, 256 * MIB))
    assert fitted_bandwidth(small, large, 1e-5, is_emulated=False) == pytest.approx(4.5e11)


def test_slope_stays_when_it_is_below_the_bound() -> None:
    small, large = TimedMessage(10 * MIB, 1.5e-3), TimedMessage(40 * MIB, 9e-3)
    assert fitted_bandwidth(small, large, 2e-5, is_emulated=False) == pytest.approx(30 * MIB / 7.5e-3)
