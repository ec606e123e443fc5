"""Terms that the exact estimate, the papers' models and the tables of all searches share: a change in one place moves all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from trainwright.cluster import Cluster
from trainwright.cost import time_terms
from trainwright.cost.boundary_terms import SharedNics, boundary_terms
from trainwright.cost.context import CostContext
from trainwright.cost.estimate import estimate_with_context
from trainwright.layer import LayerKind
from trainwright.plan import Plan
from trainwright.profiles import LayerCost
from trainwright.search import Problem
from trainwright.search.alpa.degree_options import DegreeOptions
from trainwright.search.alpa.inter_operator_dp import boundary_costs_of
from trainwright.search.alpa.layer_clusters import cluster_spans
from trainwright.search.alpa.submeshes import RepresentativeDevices, Submesh, device_chains, node_blocks
from trainwright.search.auto.device_lines import device_lines
from trainwright.search.auto.replica_tables import ReplicaTables
from trainwright.search.auto.stage_sites import StageSites
from trainwright.search.degrees import Degrees
from trainwright.search.galvatron import galvatron_model
from trainwright.search.uniform import amp_model
from trainwright.search.uniform.placed_stages import megatron_placement
from trainwright.search.uniform.plan_space import UniformPlanSpace

MakeCluster = Callable[..., Cluster]
MakePlan = Callable[..., Plan]
MakeProblem = Callable[..., Problem]
ROWS = 4
WITHIN = 1e9
"""Bytes per second inside a node."""


@pytest.fixture
def seconds_by_user(
    make_problem: MakeProblem, make_cluster: MakeCluster, make_plan: MakePlan
) -> Callable[[], Mapping[str, float]]:
    """Return a function that works out a micro-batch through the whole model on one tensor group, by user of the terms."""

    def found() -> Mapping[str, float]:
        problem = make_problem(make_cluster((("fast", 2),), within=WITHIN), batch=ROWS, layers=4)
        context, count = problem.cost_context, len(problem.model.layers)
        plan = make_plan(problem, [count], tensor=2, rows=ROWS)
        replica_tables = ReplicaTables(problem, count + 1)
        space = UniformPlanSpace.of(problem)
        stages = space.tables.place_stages(megatron_placement(Degrees(1, 1, 2)))
        spans = cluster_spans(problem.model)
        (block,) = node_blocks(problem)
        alpa = DegreeOptions(problem, spans, RepresentativeDevices(problem)).options(Submesh(((block, 1),)), ROWS, 1)
        assert alpa is not None
        tensor_2 = [alpa.strategy(option, 0, -1).runs[0].strategy.tensor == 2 for option in range(len(alpa.seconds))]
        return {
            "exact": estimate_with_context(plan, context).iteration_seconds,
            "amp": amp_model.estimate_seconds(plan, context),
            "galvatron": galvatron_model.estimate_seconds(plan, context),
            "auto": replica_tables.total_seconds(replica_tables.tensor_group(("node-1",) * 2), ROWS),
            "uniform": float(space.tables.times(stages, ROWS)[0, 0, -1]),
            "bound": space.bounds.seconds(stages, ROWS, (count,)),
            "alpa": float(alpa.seconds[tensor_2, 0, -1].min()),
        }

    return found


def test_a_second_of_compute_in_each_layer_reaches_all(
    seconds_by_user: Callable[[], Mapping[str, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, cost = seconds_by_user(), CostContext.slowest_layer_cost

    def slower(self: CostContext, *what: Any) -> LayerCost:
        found = cost(self, *what)
        return replace(found, forward_seconds=found.forward_seconds + 1.0)

    monkeypatch.setattr(CostContext, "slowest_layer_cost", slower)
    after = seconds_by_user()
    assert {name: after[name] - before[name] for name in before} == pytest.approx(dict.fromkeys(before, 6.0))


def test_another_all_reduce_of_each_layer_reaches_all(
    seconds_by_user: Callable[[], Mapping[str, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, messages = seconds_by_user(), time_terms.tensor_all_reduce_bytes

    def more(kind: LayerKind, *what: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        forward, backward = messages(kind, *what)
        return (*forward, int(WITHIN)), backward

    for module in (time_terms, amp_model):
        monkeypatch.setattr(module, "tensor_all_reduce_bytes", more)
    after = seconds_by_user()
    assert {name: after[name] - before[name] for name in before} == pytest.approx(dict.fromkeys(before, 6.0), rel=1e-3)


def _boundaries(problem: Problem) -> Iterator[tuple[int, int, float, float]]:
    """Yield (node, next node, seconds per byte in both directions, their latency) of every table with boundaries."""
    context = problem.cost_context
    number = context.node_numbers
    devices = [number[device.node] for device in problem.devices]
    cut = next(index for index, (a, b) in enumerate(pairwise(devices)) if a != b)
    shared = SharedNics(context).boundaries(np.array([[[devices[cut]]], [[devices[cut + 1]]]]))
    yield devices[cut], devices[cut + 1], *(float(part.sum()) for part in shared.terms)
    upper, lower = problem.devices[cut], problem.devices[cut + 1]
    latency, per_byte = galvatron_model.boundary_alpha_beta((upper,), (lower,), context)
    yield devices[cut], devices[cut + 1], per_byte, latency
    chain = device_chains(node_blocks(problem))[0]
    ends = np.array([number[device.node] for block in chain.blocks for device in block.devices(0, len(block.nodes))])
    costs = boundary_costs_of(problem, cluster_spans(problem.model), chain, 1)
    for place in np.flatnonzero(np.diff(ends)) + 1:
        yield (
            int(ends[place - 1]),
            int(ends[place]),
            float(costs.seconds_per_byte[:, place].sum()),
            float(costs.latency_seconds[:, place].sum()),
        )


def test_tables_take_boundaries_from_the_links_of_the_exact_estimate(
    make_problem: MakeProblem, make_cluster: MakeCluster
) -> None:
    problem = make_problem(make_cluster((("fast", 2), ("fast", 2), ("slow", 1))))
    links = problem.cluster.links
    uneven = tuple(
        replace(link, latency_seconds=1e-4 * n, bandwidth_bytes_per_second=1e6 * n) for n, link in enumerate(links, 1)
    )
    problem = replace(problem, cluster=replace(problem.cluster, links=uneven))
    network, names = problem.cost_context.network, [node.name for node in problem.cluster.nodes]

    def expected(here: int, there: int) -> tuple[float, float]:
        both = [network.link((names[a], names[b])) for a, b in ((here, there), (there, here))]
        return sum(1 / bandwidth for _, bandwidth in both), sum(latency for latency, _ in both)

    for here, there, per_byte, latency in _boundaries(problem):
        assert (per_byte, latency) == pytest.approx(expected(here, there))
    for here, there in ((0, 1), (1, 2), (2, 0)):
        alone = boundary_terms(np.array([here]), np.array([there]), problem.cost_context)
        assert tuple(float(part.sum()) for part in alone) == pytest.approx(expected(here, there))
    (line, *_) = device_lines(problem, 5, 1, 0)
    sites = StageSites(ReplicaTables(problem, 5), line)
    numbers = [problem.cost_context.node_numbers[device.node] for device in line.devices]
    starts = line.block_bounds[1:-1]
    assert sites.boundary_seconds_per_byte[1:-1] == pytest.approx(
        [expected(numbers[start - 1], numbers[start])[0] for start in starts]
    )
