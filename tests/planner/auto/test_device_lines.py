"""Lines of devices: blocks of equal stages, stages across nodes, and tensor groups of many devices."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from trainwright.cluster import Cluster
from trainwright.search import Problem, SearchControl
from trainwright.search.auto import search
from trainwright.search.auto.device_lines import device_lines
from trainwright.search.auto.search_state import SearchState

MakeCluster = Callable[..., Cluster]
MakeProblem = Callable[..., Problem]


def test_blocks_of_several_nodes_are_equal_if_they_can_be(make_cluster: MakeCluster, make_problem: MakeProblem) -> None:
    (line,) = device_lines(make_problem(make_cluster((("fast", 2),) * 16)), 6, 1, 0)
    assert line.block_bounds == tuple(range(0, 33, 4))
    # Blocks of one node each would be too many.
    (line,) = device_lines(make_problem(make_cluster((("fast", 1),) * 11)), 4, 1, 0)
    assert line.block_bounds == (0, 3, 6, 9, 11)


def test_stages_cross_nodes_where_links_inside_them_are_slower(
    make_cluster: MakeCluster, make_problem: MakeProblem
) -> None:
    nodes = (*(("fast", 2),) * 4, *(("slow", 4),) * 4)
    problem = make_problem(make_cluster(nodes, within=1e9, between=2e9))
    others = [line.devices for line in device_lines(problem, 6, 1, 0)]
    (striped,) = (line for line in device_lines(problem, 6, 1, 0, 1) if line.devices not in others)
    assert sorted(striped.devices) == sorted(problem.devices)
    bounds = zip(striped.block_bounds, striped.block_bounds[1:], strict=False)
    assert all(len({device.node for device in striped.devices[first:end]}) == end - first for first, end in bounds)
    slow_between = make_problem(make_cluster(nodes, within=2e9, between=1e9))
    assert len(device_lines(slow_between, 6, 1, 0, 1)) == len(device_lines(slow_between, 6, 1, 0))


def test_layers_that_need_many_devices_get_drafts(
    monkeypatch: pytest.MonkeyPatch, make_cluster: MakeCluster, make_problem: MakeProblem
) -> None:
    """One layer's state fills twenty devices, and nodes have two; AMP's plan is as good as the draft."""
    monkeypatch.setattr(search, "amp_candidates", lambda *_: [])
    nodes = (("fast", 2),) * 64
    roomy = make_problem(make_cluster(nodes), layers=2, heads=32, hidden=4096, batch=4)
    largest_bytes = roomy.cost_context.value_bytes.unsharded * max(kind.parameters for kind in roomy.model.kinds)
    tight = make_cluster(nodes, memory=int(largest_bytes / 20))
    state = SearchState.of(make_problem(tight, layers=2, heads=32, hidden=4096, batch=4), SearchControl())
    search.initial_solutions(state)
    first_seconds = state.best_seconds
    search.draft_plans(state)
    assert 0 < state.best_seconds < first_seconds
