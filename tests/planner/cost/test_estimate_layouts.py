"""Plans of different rank layouts: inside a stage, between stages, and over several pipelines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import astuple, replace
from itertools import pairwise

import pytest
from bound_oracle import lower_bound_seconds
from hypothesis import assume, given
from hypothesis import strategies as st
from property_tests import examples
from rings import all_reduce_seconds

from trainwright.cluster import Accelerator, Cluster, Device, Link, Node
from trainwright.cost.boundaries import boundary_messages, redistribution_seconds
from trainwright.cost.estimate import estimate_with_context
from trainwright.cost.gradient_sync import gradient_reductions, slice_rounds
from trainwright.cost.network import Network
from trainwright.cost.stage_times import PlanTimes
from trainwright.layer import TensorSplit
from trainwright.plan import LayerRun, Pipeline, Plan, Schedule, Stage
from trainwright.rank_layout import RankLayout, relayout_transfers, row_overlaps
from trainwright.search import Problem
from trainwright.strategy import RankOrder, Sharding, Strategy

MakeCluster = Callable[..., Cluster]
MakeProblem = Callable[..., Problem]


@pytest.fixture(scope="module")
def problem(make_problem: MakeProblem) -> Problem:
    return make_problem()


@st.composite
def arrangements(draw: st.DrawFn, devices: int, rows: int) -> tuple[int, int, RankOrder, tuple[int, ...]]:
    data = draw(st.sampled_from([d for d in range(1, min(devices, rows) + 1) if devices % d == 0 and d != 3]))
    cuts = sorted(draw(st.lists(st.integers(1, rows - 1), min_size=data - 1, max_size=data - 1, unique=True)))
    return devices // data, data, draw(st.sampled_from(RankOrder)), tuple(b - a for a, b in pairwise((0, *cuts, rows)))


@st.composite
def seats_of(draw: st.DrawFn, nodes: tuple[str, ...], rows: int) -> RankLayout[str]:
    tensor, data, order, split = draw(arrangements(len(nodes), rows))
    return RankLayout(nodes, Strategy(tensor, data, order), split)


EIGHT = tuple(f"node-{1 + i // 2}" for i in range(8))


def rows_of(seats: RankLayout[str], index: int) -> set[int]:
    return set(range(*seats.row_intervals[seats.position(index).replica]))


def missing_rows(old: RankLayout[str], new: RankLayout[str]) -> Iterator[tuple[int, int, int]]:
    """Yield (device, sending device, rows) of the rows that change devices."""
    for one in relayout_transfers(old.by_index, new.by_index, old.members.__getitem__):
        if one.source != one.target:
            yield one.target, one.source, one.stop - one.start


@given(old=seats_of(EIGHT, 8), new=seats_of(EIGHT, 8))
def test_redistribution_sends_only_missing_rows(old: RankLayout[str], new: RankLayout[str]) -> None:
    got: dict[int, int] = {}
    for target, source, rows in missing_rows(old, new):
        got[target] = got.get(target, 0) + rows
        assert len(rows_of(old, source) & rows_of(new, target)) >= rows
    for index in range(8):
        assert got.get(index, 0) == len(rows_of(new, index) - rows_of(old, index))


def test_redistribution_prefers_rows_on_the_same_node(make_cluster: MakeCluster) -> None:
    """Data degree 4 becomes tensor degree 2 × data degree 2 over pairs on a node: no row crosses the network."""
    fabric = Network(make_cluster((("fast", 2), ("fast", 2)), between=1.0, within=100.0, latency=0.5))
    nodes = ("node-1", "node-1", "node-2", "node-2")
    split = RankLayout(nodes, Strategy(1, 4, RankOrder.TENSOR_INNER), (1, 1, 1, 1))
    paired = RankLayout(nodes, Strategy(2, 2, RankOrder.TENSOR_INNER), (2, 2))
    assert redistribution_seconds(split, paired, 200.0, fabric) == pytest.approx(2.5)
    across = RankLayout(nodes, Strategy(2, 2, RankOrder.DATA_INNER), (2, 2))
    # Every device lacks one row; ranks 1 and 2 get theirs over the network, one in each direction.
    assert sorted(missing_rows(split, across)) == [(0, 1, 1), (1, 2, 1), (1, 3, 1), (2, 0, 1), (2, 1, 1), (3, 2, 1)]
    assert redistribution_seconds(split, across, 200.0, fabric) == pytest.approx(400.0 + 0.5)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_messages_inside_a_node_use_the_receivers_port(make_cluster: MakeCluster, size: int) -> None:
    fabric = Network(make_cluster((("fast", size),), within=100.0, latency=0.5))
    nodes = ("node-1",) * size
    split, together = (
        RankLayout(nodes, Strategy(1, size, RankOrder.TENSOR_INNER), (1,) * size),
        RankLayout(nodes, Strategy(size, 1, RankOrder.TENSOR_INNER), (size,)),
    )
    assert redistribution_seconds(split, together, 200.0, fabric) == pytest.approx(2.0 * (size - 1) + 0.5)
    assert redistribution_seconds(together, split, 200.0, fabric) == 0.0


@pytest.mark.parametrize("nodes", [("a", "b", "c", "d"), ("a", "a", "a", "a")])
def test_rank_receives_from_its_tensor_index_modulo_the_old_degree(
    nodes: tuple[str, ...],
) -> None:
    """Tensor 2 × data 2 becomes tensor 4, if no holder is on the rank's node, and if all of them are."""
    old, new = (
        RankLayout(nodes, Strategy(2, 2, RankOrder.TENSOR_INNER), (3, 5)),
        RankLayout(nodes, Strategy(4, 1, RankOrder.TENSOR_INNER), (8,)),
    )
    assert sorted(missing_rows(old, new)) == [(0, 2, 5), (1, 3, 5), (2, 0, 3), (3, 1, 3)]


def test_receiver_reads_from_its_tensor_index_modulo_the_senders_degree(
    make_cluster: MakeCluster,
) -> None:
    """Four receivers and two senders: by this rule every receiver has its sender on its own node."""
    fabric = Network(make_cluster((("fast", 3), ("fast", 3)), between=1.0, within=8.0, latency=0.0))
    upper = RankLayout(("node-1", "node-2"), Strategy(2, 1, RankOrder.TENSOR_INNER), (1,))
    lower = RankLayout(("node-1", "node-2") * 2, Strategy(4, 1, RankOrder.TENSOR_INNER), (1,))
    found, busy, _ = boundary_messages(upper, lower, 8.0, fabric)
    assert [piece.send_seconds for piece in found] == [1.0]
    assert busy == {}
    crossed = boundary_messages(upper, replace(lower, members=("node-2", "node-1") * 2), 8.0, fabric).pieces
    assert [piece.send_seconds for piece in crossed] == [16.0]


def test_stage_of_two_layouts_synchronises_and_pays_for_redistribution(problem: Problem) -> None:
    devices = problem.cluster.devices[:2]
    runs = (LayerRun(0, 7, Strategy(2, 1), (2,)), LayerRun(7, 7, Strategy(1, 2), (1, 1)))
    plan = Plan(14, 16, (Pipeline(8, 2, (Stage(devices, runs),)),))
    found = estimate_with_context(plan, problem.cost_context)
    assert sum(astuple(found.breakdown)) == pytest.approx(found.iteration_seconds)
    # Forward: each of the two already has its row. Backward: each lacks the gradient of the other's row.
    link = problem.cluster.link("node-1", "node-1")
    row_bytes = 64 * 128 * 4
    message_seconds = link.latency_seconds + row_bytes / link.bandwidth_bytes_per_second
    assert found.breakdown.redistribution_seconds == pytest.approx(8 * message_seconds)
    first = [
        problem.cost_context.layer_cost("emulated-fast", problem.model.kind_of(i), TensorSplit(2), 2) for i in range(7)
    ]
    second = [
        problem.cost_context.layer_cost("emulated-fast", problem.model.kind_of(i), TensorSplit(1), 1)
        for i in range(7, 14)
    ]
    compute = sum(c.forward_seconds + c.backward_seconds for c in (*first, *second))
    assert found.breakdown.compute_seconds == pytest.approx(8 * compute)


def test_slowest_replica_of_each_run_counts(problem: Problem) -> None:
    """On a fast and a slow device, with the rows the other way round in the second run."""
    devices = (Device("node-1", 0), Device("node-4", 0))
    runs = (LayerRun(0, 7, Strategy(1, 2), (3, 1)), LayerRun(7, 7, Strategy(1, 2), (1, 3)))
    found = estimate_with_context(Plan(14, 16, (Pipeline(4, 4, (Stage(devices, runs),)),)), problem.cost_context)
    compute = 0.0
    for layers, rows in ((range(7), (3, 1)), (range(7, 14), (1, 3))):
        for layer in layers:
            kind = problem.model.kind_of(layer)
            costs = [
                problem.cost_context.layer_cost(name, kind, TensorSplit(1), count)
                for name, count in zip(("emulated-fast", "emulated-slow"), rows, strict=True)
            ]
            compute += max(c.forward_seconds for c in costs) + max(c.backward_seconds for c in costs)
    assert found.breakdown.compute_seconds == pytest.approx(4 * compute)


@given(upper=seats_of(EIGHT[:4], 6), lower=seats_of(EIGHT[4:], 6))
def test_every_receiver_gets_its_rows_once(upper: RankLayout[str], lower: RankLayout[str]) -> None:
    got = [0] * lower.replicas
    for sender, receiver, start, stop in row_overlaps(upper, lower):
        got[receiver] += stop - start
        mine = set(range(*upper.row_intervals[sender]))
        theirs = set(range(*lower.row_intervals[receiver]))
        assert len(mine & theirs) == stop - start
    assert got == list(lower.rows)


def test_pieces_of_a_boundary_share_the_nic() -> None:
    names = "node-1", "node-2"
    links = tuple(Link(a, b, 0.25, 1e9 if a == b else 1.0) for a in names for b in names)
    fabric = Network(Cluster((Accelerator("card", 1),), tuple(Node(name, "card", 2) for name in names), links))
    upper = RankLayout(("node-1", "node-1"), Strategy(1, 2, RankOrder.TENSOR_INNER), (1, 1))
    lower = RankLayout(("node-2", "node-2"), Strategy(1, 2, RankOrder.TENSOR_INNER), (1, 1))
    found, busy, _ = boundary_messages(upper, lower, 8.0, fabric)
    assert [(p.send_seconds, p.latency_seconds) for p in found] == [(16.0, 0.25)] * 2
    assert busy["out", "node-1"] == 16.0
    # A receiver with tensor degree 2 takes every row twice over the network.
    tensor = boundary_messages(
        upper, RankLayout(lower.members, Strategy(2, 1, RankOrder.TENSOR_INNER), (2,)), 8.0, fabric
    ).pieces
    assert [p.send_seconds for p in tensor] == [32.0] * 2


def two_pipelines(problem: Problem, tensors: tuple[int, int] = (1, 1), **run: object) -> Plan:
    """Each on two nodes, one stage; 12 and 4 rows of the batch."""
    devices = problem.cluster.devices
    pipelines = []
    for index, (tensor, share) in enumerate(zip(tensors, (12, 4), strict=True)):
        data = 4 // tensor
        one = LayerRun(0, 14, Strategy(tensor, data, **run), (4 // data,) * data)  # type: ignore[arg-type]
        pipelines.append(Pipeline(share // 4, 4, (Stage(devices[4 * index : 4 * index + 4], (one,)),)))
    return Plan(14, 16, tuple(pipelines))


def test_gradients_are_reduced_after_the_last_pipeline_ends(problem: Problem) -> None:
    found = estimate_with_context(two_pipelines(problem), problem.cost_context)
    assert found.breakdown.bubble_seconds == 0
    ring = all_reduce_seconds(problem.cluster.devices, problem.model.parameters * 4, Network(problem.cluster))
    busy = 0.0
    for name, rows, batches in (("emulated-fast", 1, 3), ("emulated-slow", 1, 1)):
        costs = [
            problem.cost_context.layer_cost(name, problem.model.kind_of(i), TensorSplit(1), rows) for i in range(14)
        ]
        busy = max(busy, batches * sum(c.forward_seconds + c.backward_seconds for c in costs))
    update = problem.model.parameters / 2.5e7
    assert found.iteration_seconds == pytest.approx(busy + ring + update)
    assert str(found.critical_device).startswith("node-4")


def test_pipelines_of_different_tensor_degrees_reduce_per_slice() -> None:
    one = RankLayout(("a", "a"), Strategy(1, 2, RankOrder.TENSOR_INNER), (1, 1))
    two = RankLayout(("b", "b"), Strategy(2, 1, RankOrder.TENSOR_INNER), (2,))
    # Rank b:0 holds the first half, b:1 the second; both ranks of a hold both and reduce them in sequence.
    assert slice_rounds([one, two], sharded=False) == [(("a", "a", "b"),), (("a", "a", "b"),)]
    assert slice_rounds([two, two], sharded=False) == [(("b", "b"), ("b", "b"))]
    # Sharded over two replicas: one ring for each shard, with the rank that holds it in each pipeline.
    assert slice_rounds([one, one], sharded=True) == [(("a", "a"), ("a", "a"))]


@pytest.mark.parametrize("sharding", [Sharding.ZERO1, Sharding.ZERO3])
def test_sharded_pipelines_reduce_their_shards(problem: Problem, sharding: Sharding) -> None:
    plan = two_pipelines(problem, sharding=sharding)
    paces = PlanTimes(plan, problem.cost_context)
    across = gradient_reductions(paces)[-1]
    assert across.stages == ((0, 0), (1, 0))
    fabric = Network(problem.cluster)
    pair = [problem.cluster.devices[0], problem.cluster.devices[4]]
    # Four rings of a quarter each, two over each pair of NICs.
    one = all_reduce_seconds(pair, problem.model.parameters * 4 / 4, fabric)
    latency = 2 * fabric.link(("node-1", "node-3"))[0]
    assert across.seconds == pytest.approx(2 * (one - latency) + latency, rel=1e-3)


def test_pipelines_of_different_sharding_hold_whole_gradients(problem: Problem) -> None:
    devices = problem.cluster.devices

    def held(*data: int) -> int:
        pipelines = tuple(
            Pipeline(1, 4, (Stage(devices[4 * i : 4 * i + one], (LayerRun(0, 14, Strategy(1, one, sharding=Sharding.ZERO2), (4 // one,) * one),)),))
            for i, one in enumerate(data)
        )  # fmt: skip
        found = estimate_with_context(Plan(14, 4 * len(data), pipelines), problem.cost_context)
        return found.memory_parts[0].gradients_bytes

    whole = problem.model.parameters * 4
    assert held(4) == held(4, 4) < whole
    assert held(4, 2) == whole


def test_layers_with_equal_owners_share_a_message(problem: Problem) -> None:
    devices = problem.cluster.devices
    pipelines = (
        Pipeline(8, 1, tuple(Stage((d,), (run,)) for d, run in zip(devices[:2], runs(7, 7), strict=True))),
        Pipeline(8, 1, tuple(Stage((d,), (run,)) for d, run in zip(devices[2:5], runs(3, 4, 7), strict=True))),
    )
    plan = Plan(14, 16, pipelines)
    syncs = gradient_reductions(PlanTimes(plan, problem.cost_context))
    owners = [sync.stages for sync in syncs]
    assert owners[:3] == [((0, 0), (1, 0)), ((0, 0), (1, 1)), ((0, 1), (1, 2))]
    # The tied embedding has owners in four stages: it is reduced over all of them, after the rest.
    assert owners[3:] == [((0, 0), (0, 1), (1, 0), (1, 2))]
    assert syncs[3].is_tied_weight
    assert syncs[3].predecessors == (0, 1, 2)


def runs(*counts: int) -> list[LayerRun]:
    found, first = [], 0
    for count in counts:
        found.append(LayerRun(first, count, Strategy(1, 1), (1,)))
        first += count
    return found


@st.composite
def plans(draw: st.DrawFn, devices: tuple[Device, ...]) -> Plan:
    """Draw one or two pipelines of one to three stages, each of one or two runs in any layout."""
    halves = [devices] if draw(st.booleans()) else [devices[:4], devices[4:]]
    pipelines = []
    batch = 0
    for part in halves:
        stages = draw(st.sampled_from([s for s in (1, 2, 4) if s <= len(part)]))
        rows = draw(st.sampled_from([4, 8]))
        ends = (
            0,
            *sorted(draw(st.lists(st.integers(1, 13), min_size=stages - 1, max_size=stages - 1, unique=True))),
            14,
        )
        size = len(part) // stages
        made = []
        for number, (first, end) in enumerate(pairwise(ends)):
            cut = draw(st.integers(first, end - 1))
            layers = []
            for low, high in ((first, cut), (cut, end)):
                if high > low:
                    tensor, data, order, split = draw(arrangements(size, rows))
                    layers.append(
                        LayerRun(
                            low,
                            high - low,
                            Strategy(tensor, data, order, draw(st.sampled_from(Sharding)), draw(st.booleans())),
                            split,
                        )
                    )
            made.append(Stage(part[number * size : (number + 1) * size], tuple(layers)))
        batches = draw(st.integers(1, 6))
        batch += batches * rows
        pipelines.append(Pipeline(batches, rows, tuple(made)))
    return Plan(14, batch, tuple(pipelines), draw(st.sampled_from(Schedule)))


@examples(300)
@given(data=st.data(), overlaps_gradients=st.booleans())
def test_estimate_is_above_its_lower_bound_and_its_parts_add_up(
    problem: Problem, data: st.DataObject, *, overlaps_gradients: bool
) -> None:
    setting = replace(problem.cost_context, runtime=replace(problem.runtime, overlaps_gradients=overlaps_gradients))
    plan = data.draw(plans(problem.cluster.devices))
    assume(all(run.strategy.tensor <= 4 for p in plan.pipelines for s in p.stages for run in s.layers))
    found = estimate_with_context(plan, setting)
    assert lower_bound_seconds(plan, setting) <= found.iteration_seconds * (1 + 1e-9)
    assert sum(astuple(found.breakdown)) == pytest.approx(found.iteration_seconds)
    assert min(astuple(found.breakdown)) >= -1e-9
    assert [part.total_bytes for part in found.memory_parts] == [held for _, held in found.memory_by_device]
