"""Components of `auto`: rows by speed, batch shares, and the DP over layers and devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.cluster import Accelerator, Cluster, Node, Port
from trainwright.cost.collectives import NO_COMMUNICATION, Collectives
from trainwright.cost.estimate import estimate_with_context
from trainwright.cost.network import Network
from trainwright.cost.time_terms import TensorGroupClass
from trainwright.plan import Plan
from trainwright.search import Problem
from trainwright.search.auto.device_lines import DeviceLine, device_lines
from trainwright.search.auto.drafts import MultiPipelineDrafts, pipeline_of, set_partitions
from trainwright.search.auto.layer_device_dp import LayerDeviceDP
from trainwright.search.auto.line_tables import LineOptions
from trainwright.search.auto.replica_sets import Rings, balance_rows, rows_by_replica
from trainwright.search.auto.replica_tables import ReplicaTables
from trainwright.search.auto.stage_sites import LineInterval, StageSites

MakeCluster = Callable[..., Cluster]
MakeProblem = Callable[..., Problem]
KINDS = [TensorGroupClass((name,), 1, NO_COMMUNICATION) for name in ("fast", "middle", "slow")]


@given(
    counts=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    paces=st.lists(st.floats(0.1, 10), min_size=3, max_size=3),
    floors=st.lists(st.floats(0, 5), min_size=3, max_size=3),
    rows=st.integers(1, 24),
)
def test_rows_go_to_the_replica_that_finishes_first(
    counts: list[int], paces: list[float], floors: list[float], rows: int
) -> None:
    """All rows are assigned, each replica has one, and moving a row from the slowest replica does not help."""
    groups = [group for group, count in zip(KINDS, counts, strict=False) for _ in range(count)]

    def seconds(group: TensorGroupClass, given_rows: int) -> float:
        kind = KINDS.index(group)
        return floors[kind] + paces[kind] * given_rows

    shared = balance_rows(dict(zip(KINDS, counts, strict=False)), rows, seconds)
    if rows < len(groups):
        assert shared is None
        return
    assert shared is not None
    found = rows_by_replica(groups, shared)
    assert sum(found) == rows
    assert min(found) >= 1
    taken = [seconds(group, count) for group, count in zip(groups, found, strict=True)]
    slowest = max(range(len(groups)), key=lambda replica: taken[replica])
    others = [seconds(groups[other], found[other] + 1) for other in range(len(groups)) if other != slowest]
    assert found[slowest] == 1 or all(later >= taken[slowest] * (1 - 1e-9) for later in others)


def _chains(units: int, size: int, unit: int = 0, first: int = 0) -> Iterator[tuple[LineInterval, ...]]:
    """Every way to cut layers and units into stages; units may be left out."""
    if first == size - 1:
        yield ()
    for start in range(unit, units):
        for end_unit in range(start + 1, units + 1):
            for end in range(first + 1, size):
                for rest in _chains(units, size, end_unit, end):
                    yield (LineInterval(start, end_unit, first, end), *rest)


def _may_stand(chain: tuple[LineInterval, ...], line: DeviceLine) -> bool:
    """Return whether first and last stage stay within their ends of a node that is split over both ends of the line."""
    if line.shared_end_blocks is None:
        return True
    first, last = line.shared_end_blocks
    return chain[0].end_block <= first and chain[-1].first_block >= line.blocks - last


@pytest.mark.parametrize("hides_transfers", [True, False])
@pytest.mark.parametrize("memory", [None, 9_000_000])
@pytest.mark.parametrize("rows", [2, 4])
def test_slowest_stage_is_as_short_as_possible(
    make_cluster: MakeCluster, make_problem: MakeProblem, memory: int | None, rows: int, *, hides_transfers: bool
) -> None:
    """Compare with every chain: the first chain has the shortest slowest stage."""
    problem = make_problem(make_cluster((("fast", 1), ("slow", 2)), memory=memory), layers=3, batch=8)
    problem = replace(problem, runtime=replace(problem.runtime, hides_transfers=hides_transfers))
    looked_at = 0
    for line in device_lines(problem, 8, 4, 4):
        (tables,) = LineOptions.for_lines([StageSites(ReplicaTables(problem, 28), line)], rows, 8 // rows)
        size, units = len(tables.sites.replica_tables.cuts), line.blocks
        least = np.inf
        for chain in _chains(units, size):
            if not _may_stand(chain, line):
                continue
            paces = []
            for behind, section in enumerate(reversed(chain), start=1):
                best = tables.best(tables.in_flight_level(behind))
                number = tables.sites.site_numbers[section.first_block, section.end_block]
                where = number, section.first, section.end
                before, after = LayerDeviceDP(tables)._message_seconds[:, section.first_block, section.end_block]
                entering, leaving = before[section.first], after[section.end]
                seconds = best.seconds[where]
                paces.append(max(seconds, leaving / 2) if hides_transfers else seconds + entering + leaving)
            least = min(least, max(paces))
        found = LayerDeviceDP(tables).sequences()
        if np.isfinite(least):
            assert min(
                chain.bottleneck_seconds for chain in found if _may_stand(chain.intervals, line)
            ) == pytest.approx(least)
            looked_at += 1
        for chain in found:
            assert len(chain.intervals) == 1 or _may_stand(chain.intervals, line)
            cuts = [(section.first, section.end) for section in chain.intervals]
            assert [cut[0] for cut in cuts] == [0, *(cut[1] for cut in cuts[:-1])]
            assert cuts[-1][1] == size - 1
    assert looked_at


def test_both_ends_share_a_node_when_they_tie_a_weight(make_cluster: MakeCluster, make_problem: MakeProblem) -> None:
    problem = make_problem(make_cluster((("fast", 1), ("slow", 4), ("slow", 4))), layers=4, batch=8)
    assert problem.model.owners == (0, 5)
    found = [line for line in device_lines(problem, 8, 4, 4) if line.shared_end_blocks is not None]
    assert found
    for line in found:
        assert line.shared_end_blocks is not None
        first, last = line.shared_end_blocks
        ends = (*line.devices[: line.block_bounds[first]], *line.devices[line.block_bounds[line.blocks - last] :])
        assert set(ends) == {device for device in problem.devices if device.node == ends[0].node}
        assert sorted(line.devices) == sorted(problem.devices)


def test_drafts_are_valid_and_take_about_the_predicted_time(
    make_cluster: MakeCluster, make_problem: MakeProblem
) -> None:
    problem = make_problem(make_cluster((("fast", 2), ("fast", 2), ("slow", 2))), layers=6, batch=12)
    ratios = []
    for line, rows in product(device_lines(problem, 8, 4, 4), (2, 4, 6)):
        (tables,) = LineOptions.for_lines([StageSites(ReplicaTables(problem, 28), line)], rows, 12 // rows)
        for chain in LayerDeviceDP(tables).sequences():
            plan = Plan(8, 12, (pipeline_of(chain, tables, 12 // rows),))
            ratios.append(
                estimate_with_context(plan, problem.cost_context).iteration_seconds / chain.seconds(12 // rows)
            )
    assert len(ratios) > 10
    assert 0.7 < np.median(ratios) < 1.5


def test_several_pipelines_share_the_whole_batch(make_cluster: MakeCluster, make_problem: MakeProblem) -> None:
    problem = make_problem(make_cluster((("fast", 2), ("slow", 2))), layers=4, batch=12)
    drafts = MultiPipelineDrafts(ReplicaTables(problem, 28), device_lines(problem, 8, 4, 4)[0]).drafts()
    assert drafts
    for _, plan in drafts:
        assert [len({device.node for device in pipeline.devices}) for pipeline in plan.pipelines] == [1, 1]
        assert sum(pipeline.micro_batches * pipeline.micro_batch_size for pipeline in plan.pipelines) == 12


def test_every_distribution_of_nodes_comes_once() -> None:
    found = [frozenset(groups) for groups in set_partitions([0, 1, 2, 3])]
    assert len(found) == len(set(found)) == 15  # Bell's number
    assert all(sorted(item for group in groups for item in group) == [0, 1, 2, 3] for groups in found)


@pytest.mark.parametrize(("tensor", "members"), [(1, 8), (2, 4), (8, 1), (16, 0)])
def test_gradient_rings_of_a_stage_use_the_nics_as_hierarchical_rings_do(tensor: int, members: int) -> None:
    """Two nodes of eight devices and four NICs: a stage has a ring for each tensor rank, with equal members on each node."""
    nodes = tuple(Node(name, "x", 8, Port(0.0, 4.0, flow_bytes_per_second=1.0), Port(0.0, 1e9)) for name in "ab")
    collectives = Collectives(Network(Cluster((Accelerator("x", 1),), nodes)))
    expected = 0.0
    if members:
        expected = collectives.all_reduce((("a",) * members + ("b",) * members,) * tensor).algorithms[-1].seconds(1.0)
    found = Rings(2, 8, 1e9, 4.0, 1.0).seconds_per_byte(tensor, 16)
    assert found == pytest.approx(expected)
