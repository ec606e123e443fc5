"""Submeshes: their shapes, coverage of the devices, and costs of a stage on one."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from trainwright.cluster import Cluster, Device
from trainwright.cost.estimate import estimate_with_context, memory_by_device
from trainwright.plan import Pipeline, Plan, Stage
from trainwright.runtime import Runtime
from trainwright.search import Limits, Problem
from trainwright.search.alpa.degree_options import DegreeOptions
from trainwright.search.alpa.layer_clusters import cluster_spans
from trainwright.search.alpa.operator_options import OperatorOptions
from trainwright.search.alpa.stage_candidates import (
    UNLIMITED_STAGES,
    StageStrategy,
    SubmeshOptions,
    concatenate_options,
)
from trainwright.search.alpa.submeshes import (
    Block,
    DeviceChain,
    RepresentativeDevices,
    Submesh,
    device_chains,
    node_blocks,
    place_submeshes,
    submeshes,
)
from trainwright.strategy import Sharding

MakeCluster = Callable[..., Cluster]
MakeProblem = Callable[..., Problem]


def block(nodes: int, width: int, name: str = "a") -> Block:
    return Block(name, tuple(f"{name}{number}" for number in range(nodes)), width)


def shape(submesh: Submesh) -> tuple[int, int]:
    return submesh.nodes, submesh.size // submesh.nodes


def test_submesh_shapes_equal_the_paper() -> None:
    assert [shape(one) for one in submeshes(block(8, 8))] == [
        *((1, width) for width in (1, 2, 4, 8)),
        *((nodes, 8) for nodes in range(2, 9)),
    ]


def test_widths_of_odd_nodes_divide_each_other() -> None:
    for width in range(1, 17):
        found = block(1, width).narrow_widths
        assert found[-1] == width
        assert all(large % small == 0 for small, large in pairwise(found))
    assert block(1, 6).narrow_widths == (1, 2, 6)


def test_submesh_shapes_stay_few_on_many_nodes() -> None:
    found = list(submeshes(block(500, 8)))
    assert len(found) < 80
    assert max(one.nodes for one in found) == 500


sizes = st.tuples(st.integers(1, 5), st.sampled_from([1, 2, 3, 4, 6, 8]))


@examples(150)
@given(kinds=st.lists(sizes, min_size=1, max_size=3), pick=st.randoms(use_true_random=False))
def test_submeshes_of_a_chain_cover_every_device_once(kinds: list[tuple[int, int]], pick: random.Random) -> None:
    """Appendix A, for blocks and seams of blocks."""
    line = DeviceChain(tuple(block(nodes, width, name) for name, (nodes, width) in zip("abc", kinds, strict=False)))
    chosen: list[Submesh] = []
    used = 0
    while used < line.size:
        open_here = [
            one
            for one in line.slots()
            if one.min_devices_before <= used <= one.max_devices_before and _may_end(line, used, one.submesh)
        ]
        berth = pick.choice(open_here)
        chosen.append(berth.submesh)
        used += berth.submesh.size
    found = place_submeshes(line, chosen)
    assert sorted(device for stage in found for device in stage) == sorted(
        Device(name, slot) for kind in line.blocks for name in kind.nodes for slot in range(kind.width)
    )
    for submesh, stage in zip(chosen, found, strict=True):
        assert len(stage) == submesh.size
        assert len({device.node for device in stage}) == submesh.nodes
        by_block = {kind: sum(device.node in kind.nodes for device in stage) for kind, _ in submesh.parts}
        assert by_block == {kind: submesh.width or kind.width * count for kind, count in submesh.parts}


def _may_end(line: DeviceChain, used: int, submesh: Submesh) -> bool:
    """Return whether a submesh may end here: one across two blocks takes whole nodes of both."""
    end = used + submesh.size
    return any(start < end <= stop for start, stop in pairwise(line.starts))


def test_adjacent_stages_are_on_adjacent_links() -> None:
    whole = block(4, 4)
    pair, node, two = Submesh(((whole, 0),), 2), Submesh(((whole, 1),)), Submesh(((whole, 2),))
    found = place_submeshes(DeviceChain((whole,)), [pair, two, pair, node])
    assert [sorted({device.node for device in stage}) for stage in found] == [["a0"], ["a1", "a2"], ["a0"], ["a3"]]


def test_all_type_orders_are_tried_when_few(make_problem: MakeProblem) -> None:
    kinds = [block(1, 2, name) for name in "abcd"]
    assert [len(device_chains(kinds[:count])) for count in (1, 2, 3, 4)] == [1, 2, 6, 2]
    assert node_blocks(make_problem()) == (
        Block("emulated-fast", ("node-1", "node-2", "node-3"), 2),
        Block("emulated-slow", ("node-4",), 2),
    )


def test_eq_5_counts_the_micro_batches_in_flight() -> None:
    ones = np.ones((1, 1, 4))
    options = SubmeshOptions(
        ones * np.array([1, 1, 1, np.inf]),
        ones,
        ones * np.array([4, 11, 3, 1]),
        2 * ones,
        ones[:, 0, 0],
        lambda *_: StageStrategy(()),
    )
    assert options.max_remaining_stages(10, 100)[0, 0].tolist() == [3, 0, 3, 0]
    assert options.max_remaining_stages(10, 3)[0, 0].tolist() == [UNLIMITED_STAGES, 0, UNLIMITED_STAGES, 0]
    assert options.amortised_seconds(4)[0, 0].tolist() == [1.25, 1.25, 1.25, np.inf]


def test_joined_options_keep_their_origin() -> None:
    def named(name: int, count: int) -> SubmeshOptions:
        values = np.full((count, 2, 2), float(name))
        return SubmeshOptions(
            values,
            values,
            values,
            values,
            values[:, 0, 0],
            lambda option, *_: StageStrategy((), operators=(name, option)),
        )  # type: ignore[arg-type]

    found = concatenate_options([named(7, 2), named(8, 1), named(9, 3)])
    assert [found.strategy(option, 0, 1).operators for option in range(6)] == [
        (7, 0),
        (7, 1),
        (8, 0),
        (9, 0),
        (9, 1),
        (9, 2),
    ]
    assert found.seconds[:, 0, 0].tolist() == [7, 7, 8, 9, 9, 9]


@pytest.fixture(scope="module")
def even(make_problem: MakeProblem, make_cluster: MakeCluster) -> Problem:
    return make_problem(make_cluster((("fast", 4), ("fast", 4))), layers=6, batch=16)


def one_stage(problem: Problem, strategy: StageStrategy, rows: int, devices: tuple[Device, ...]) -> Plan:
    pipeline = Pipeline(problem.global_batch_size // rows, rows, (Stage(devices, strategy.runs),))
    return Plan(len(problem.model.layers), problem.global_batch_size, (pipeline,))


@pytest.mark.parametrize(("nodes", "rows"), [(1, 1), (1, 4), (1, 16), (2, 4), (2, 16)])
@pytest.mark.parametrize("overlaps_gradients", [True, False])
def test_single_stage_costs_equal_the_exact_estimate(
    even: Problem, nodes: int, rows: int, *, overlaps_gradients: bool
) -> None:
    even = replace(even, runtime=Runtime(overlaps_gradients=overlaps_gradients))
    devices = RepresentativeDevices(even)
    spans = cluster_spans(even.model)
    (kind,) = node_blocks(even)
    submesh = Submesh(((kind, nodes),))
    count = even.global_batch_size // rows
    found = DegreeOptions(even, spans, devices).options(submesh, rows, count)
    assert found is not None
    last = spans.piece_count
    for option in range(len(found.seconds)):
        plan = one_stage(even, found.strategy(option, 0, last), rows, devices.devices_of(submesh))
        exact = estimate_with_context(plan, even.cost_context).iteration_seconds
        seconds = count * found.amortised_seconds(count)[option, 0, last]
        (run,) = found.strategy(option, 0, last).runs
        beside = run.strategy.data > 1 and (
            overlaps_gradients or run.strategy.sharding in {Sharding.ZERO2, Sharding.ZERO3}
        )
        assert seconds == pytest.approx(exact, rel=0.06 if beside else 0.002)
        kept = found.activation_bytes[option, 0, last] * min(1, count)
        needed = found.state_bytes[option, 0, last] + kept
        held = max(size for _, size in memory_by_device(plan, even.cost_context))
        assert held <= needed <= held + 64


def test_stage_bytes_equal_the_exact_memory(even: Problem) -> None:
    spans = cluster_spans(even.model)
    (kind,) = node_blocks(even)
    node = Submesh(((kind, 1),))
    found = DegreeOptions(even, spans, RepresentativeDevices(even)).options(node, 2, 8)
    assert found is not None
    last = spans.piece_count
    for option in range(len(found.seconds)):
        for cut in (2, last - 1):
            stages = (
                Stage(kind.devices(0, 1), found.strategy(option, 0, cut).runs),
                Stage(kind.devices(1, 1), found.strategy(option, cut, last).runs),
            )
            plan = Plan(last, even.global_batch_size, (Pipeline(8, 2, stages),))
            held = [size for _, size in memory_by_device(plan, even.cost_context)]
            first = found.state_bytes[option, 0, cut] + 2 * found.activation_bytes[option, 0, cut]
            second = found.state_bytes[option, cut, last] + found.activation_bytes[option, cut, last]
            assert held[0] <= first <= held[0] + 64
            assert held[-1] <= second <= held[-1] + 64


def test_limits_and_rows_exclude_options(even: Problem) -> None:
    (kind,) = node_blocks(even)
    submesh = Submesh(((kind, 1),))

    def degrees(problem: Problem, rows: int) -> set[tuple[int, int]]:
        spans = cluster_spans(problem.model)
        found = DegreeOptions(problem, spans, RepresentativeDevices(problem)).options(submesh, rows, 4)
        if found is None:
            return set()
        runs = [found.strategy(option, 0, 1).runs[0] for option in range(len(found.seconds))]
        return {(run.strategy.tensor, run.strategy.data) for run in runs}

    assert degrees(even, 4) == {(1, 4), (2, 2), (4, 1)}
    assert degrees(even, 2) == {(2, 2), (4, 1)}
    assert degrees(replace(even, limits=Limits(max_tensor_degree=2)), 4) == {(1, 4), (2, 2)}
    assert degrees(replace(even, limits=Limits(max_data_degree=1)), 4) == {(4, 1)}
    assert degrees(replace(even, limits=Limits(max_tensor_degree=2)), 1) == set()


def test_logical_meshes_take_their_links_from_the_cluster(even: Problem) -> None:
    (kind,) = node_blocks(even)
    spans = cluster_spans(even.model)
    options = OperatorOptions(even, spans, RepresentativeDevices(even))
    assert [mesh.shape for mesh in options.meshes(Submesh(((kind, 0),), 1))] == [(1, 1)]
    assert [mesh.shape for mesh in options.meshes(Submesh(((kind, 1),)))] == [(2, 2), (1, 4)]
    across = options.meshes(Submesh(((kind, 2),)))
    assert [mesh.shape for mesh in across] == [(8, 1), (4, 2), (2, 4)]
    for mesh in across[1:]:
        assert mesh.seconds_per_byte[1] == pytest.approx(1e-9)
        assert mesh.seconds_per_byte[0] > mesh.seconds_per_byte[1]
    assert across[-1].seconds_per_byte[0] == pytest.approx(4 / 5e6)  # four rings share the NIC


def test_operator_options_give_plans_that_run(even: Problem) -> None:
    (kind,) = node_blocks(even)
    spans = cluster_spans(even.model)
    found = OperatorOptions(even, spans, RepresentativeDevices(even)).options(Submesh(((kind, 2),)), 8, 2)
    assert found is not None
    last = spans.piece_count
    exact = 0
    for option in range(len(found.seconds)):
        strategy = found.strategy(option, 0, last)
        if not strategy.runs:
            continue
        exact += found.strategy(option, 2, last - 1).is_exact
        plan = one_stage(even, strategy, 8, RepresentativeDevices(even).devices_of(Submesh(((kind, 2),))))
        assert estimate_with_context(plan, even.cost_context).iteration_seconds > 0
        assert (strategy.operators is None) == strategy.is_exact
    assert exact > 0
