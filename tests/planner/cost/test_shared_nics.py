"""Concurrent rings that share a NIC: of replicas, of stages, of consecutive layer runs."""

from __future__ import annotations

import pytest

from trainwright.cluster import Accelerator, Cluster, Device, Node, Port
from trainwright.cost.context import CostContext
from trainwright.cost.gradient_sync import gradient_reductions
from trainwright.cost.pipeline_replay import channels_of, replay_pipelines
from trainwright.cost.stage_times import PlanTimes
from trainwright.families import Gpt
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.profiles import LayerProfile, Profiles
from trainwright.runtime import Runtime
from trainwright.strategy import RankOrder, Sharding, Strategy

MODEL = Model.of(Gpt(4, 96, 12, 32, 500), Dtype.FLOAT32)
NETWORK, INSIDE = 1e6, 1e7
A = tuple(Device("a", slot) for slot in range(8))
B = tuple(Device("b", slot) for slot in range(8))
MESSAGE = 1e6


def setting(runtime: Runtime | None = None) -> CostContext:
    """Two real nodes of eight devices, links without latency; computation takes no time."""
    ports = Port(0.0, NETWORK), Port(0.0, INSIDE)
    cluster = Cluster((Accelerator("x", 2**40),), (Node("a", "x", 8, *ports), Node("b", "x", 8, *ports)))
    profiles = tuple(
        LayerProfile("x", kind.name, tensor, 1, 0.0, 0.0, 0.0, 0, 0)
        for kind in MODEL.kinds
        for tensor in ((1, 2, 3, 4) if kind.is_tensor_parallel else (1,))
    )
    return CostContext(MODEL, cluster, Profiles(profiles), runtime=runtime or Runtime())


def paces(*stages: Stage, micro_batches: int = 1, rows: int = 4) -> PlanTimes:
    plan = Plan(len(MODEL.layers), micro_batches * rows, (Pipeline(micro_batches, rows, stages),))
    return PlanTimes(plan, setting())


def stage(devices: tuple[Device, ...], first: int, count: int, tensor: int, **run: object) -> Stage:
    data = len(devices) // tensor
    return Stage(devices, (LayerRun(first, count, Strategy(tensor, data, **run), (4 // data,) * data),))  # type: ignore[arg-type]


def reduced(rings: int) -> float:
    """Return reduction seconds of two members on each of two nodes: in pairs inside, then as one of `rings` rings."""
    return MESSAGE / INSIDE + rings * MESSAGE / NETWORK


def test_tensor_groups_of_two_replicas_share_nics() -> None:
    halves = (*A[:4], *B[:4])
    both = paces(stage(halves, 0, 6, 4, order=RankOrder.DATA_INNER))
    group = ("a", "a", "b", "b")
    assert both.layouts[0, 0][0].tensor_groups == (group, group)
    assert both.tensor_all_reduce(group).seconds(MESSAGE) == pytest.approx(reduced(2))
    alone = paces(stage((*A[:2], *B[:2]), 0, 6, 4))
    assert alone.tensor_all_reduce(group).seconds(MESSAGE) == pytest.approx(reduced(1))


def test_tensor_groups_of_two_stages_share_nics() -> None:
    """One member on each node: there is nothing to reduce inside."""
    two = paces(stage((A[0], B[0]), 0, 3, 2), stage((A[1], B[1]), 3, 3, 2))
    assert two.tensor_all_reduce(("a", "b")).seconds(MESSAGE) == pytest.approx(2 * MESSAGE / NETWORK)


def test_tensor_groups_inside_a_node_use_no_nic() -> None:
    mixed = paces(stage((A[0], B[0]), 0, 3, 2), stage((A[1], A[2]), 3, 3, 2))
    assert mixed.tensor_all_reduce(("a", "b")).seconds(MESSAGE) == pytest.approx(MESSAGE / NETWORK)
    assert mixed.tensor_all_reduce(("a", "a")).seconds(MESSAGE) == pytest.approx(MESSAGE / INSIDE)


def test_runs_of_one_stage_use_nics_one_after_the_other() -> None:
    """The first run has one ring over the NICs at a time, the second two, and there are never three."""
    devices = (A[0], B[0], A[1], B[1])
    runs = (LayerRun(0, 3, Strategy(4, 1), (4,)), LayerRun(3, 3, Strategy(2, 2), (2, 2)))
    found = paces(Stage(devices, runs))
    assert [seats.tensor_groups for seats in found.layouts[0, 0]] == [
        (("a", "b", "a", "b"),),
        (("a", "b"), ("a", "b")),
    ]
    # The flat ring over a, b, a, b crosses each NIC twice, as the two rings do; the hierarchical one crosses once.
    assert found.tensor_rings.flat["out", "a"] == 2
    assert found.tensor_rings.inter_node["out", "a"] == 2
    assert found.tensor_all_reduce(("a", "b")).seconds(MESSAGE) == pytest.approx(2 * MESSAGE / NETWORK)


@pytest.mark.parametrize("sharing", [False, True])
def test_all_gathers_of_two_stages_share_nics(*, sharing: bool) -> None:
    """Layers without computation overlap nothing: a forward takes as long as all its all-gathers."""
    sharded = {"sharding": Sharding.ZERO3}
    found = paces(
        stage((*A[:2], *B[:2]), 0, 3, 1, **sharded),
        stage((*A[2:4], *B[2:4]), 3, 3, 1, **(sharded if sharing else {})),
    )
    held = sum(MODEL.kind_of(layer).parameters for layer in range(3)) * 4
    spent = found.stages[0, 0].workers[0].forward.sharding_seconds
    assert spent == pytest.approx(held / 2 / MESSAGE * reduced(1 + sharing))


@pytest.mark.parametrize("tensors", [(2, 3), (3, 2), (1, 2), (1, 1)])
def test_pipelines_of_any_tensor_degrees_reduce_every_slice_once(tensors: tuple[int, int]) -> None:
    """Each value crosses the NICs between two pipelines once per direction, under any sharding."""
    stages = [
        Stage(devices[:tensor], (LayerRun(0, 6, Strategy(tensor, 1), (4,)),))
        for devices, tensor in zip((A, B), tensors, strict=True)
    ]
    plan = Plan(6, 8, tuple(Pipeline(1, 4, (one,)) for one in stages))
    (across,) = gradient_reductions(PlanTimes(plan, setting()))
    values = max(tensor * setting().divided_at(tensor).resident_parameters(0, 6) for tensor in tensors)
    assert across.seconds == pytest.approx(values * 4 / NETWORK)
    assert across.nic_seconds["out", "a"] == pytest.approx(across.seconds)


def pipelines_of_replicas(*rows: tuple[int, ...], sharding: Sharding) -> Plan:
    """Return a plan of one single-stage pipeline per node, whose replicas take these rows."""
    stages = [
        Stage(devices[: len(one)], (LayerRun(0, 6, Strategy(1, len(one), sharding=sharding), one),))
        for devices, one in zip((A, B), rows, strict=True)
    ]
    return Plan(6, 2 * sum(rows[0]), tuple(Pipeline(1, sum(rows[0]), (one,)) for one in stages))


def test_pipelines_of_equal_sharding_reduce_every_shard_once() -> None:
    syncs = gradient_reductions(PlanTimes(pipelines_of_replicas((3, 3), (3, 3), sharding=Sharding.ZERO1), setting()))
    assert [one.stages for one in syncs] == [((0, 0),), ((1, 0),), ((0, 0), (1, 0))]
    assert syncs[-1].seconds == pytest.approx(setting().divided_at(1).resident_parameters(0, 6) * 4 / NETWORK)


@pytest.mark.parametrize("sharding", [Sharding.ZERO1, Sharding.ZERO3])
def test_pipelines_of_different_sharding_reduce_whole_weights(sharding: Sharding) -> None:
    """The worker also reduces over all replicas of both pipelines after the last backward."""
    shared, whole = (
        gradient_reductions(PlanTimes(pipelines_of_replicas((3, 3), (2, 2, 2), sharding=one), setting()))
        for one in (sharding, Sharding.NONE)
    )
    assert shared == whole
    assert [one.stages for one in shared] == [((0, 0), (1, 0))]


def test_no_pipeline_ends_before_the_busiest_nic() -> None:
    """Stages on a, b, a, b: three boundaries share each NIC, which the replay of one boundary ignores."""
    stages = [
        stage((device,), first, count, 1)
        for device, first, count in ((A[0], 0, 2), (B[0], 2, 1), (A[1], 3, 1), (B[1], 4, 2))
    ]
    found = paces(*stages, micro_batches=20)
    message = 4 * MODEL.output_bytes_per_row(0) / NETWORK
    # Out of a: forwards from stage 0 and 2, backwards from stage 2; out of b: forwards from 1, backwards from 1 and 3.
    assert channels_of(0, found).nic_seconds["out", "a"] == pytest.approx(3 * message)
    times = replay_pipelines(found)
    for one in times.values():
        assert one.ends == pytest.approx((20 * 3 * message,))
        assert one.replay_ends[0] < one.ends[0]
        assert one.transit_seconds[0] + one.idle_seconds[0] == pytest.approx(one.ends[0])


def test_pass_that_needs_a_boundary_in_slices_begins_with_their_gather() -> None:
    found = paces(stage(A[:2], 0, 3, 2), stage(B[:2], 3, 3, 2), micro_batches=2)
    gathered = 4 * MODEL.output_bytes_per_row(2) / 2 / INSIDE
    added = []
    for number, durations in enumerate(channels_of(0, found).durations):
        (worker,) = found.stages[0, number].workers
        added += [
            durations.forward_seconds - worker.forward.seconds,
            durations.backward_seconds - worker.backward.seconds,
            durations.last_backward_seconds - worker.last_backward_seconds,
        ]
    assert added == pytest.approx([0.0, gathered, gathered, gathered, 0.0, 0.0])


@pytest.mark.parametrize("sharding", [Sharding.NONE, Sharding.ZERO2])
def test_tied_weight_of_two_stages_occupies_the_nic_once(sharding: Sharding) -> None:
    """Its reduction follows those of both stages, during whose backward it is not reduced."""
    ends = stage((A[0], B[0]), 0, 3, 1, sharding=sharding), stage((A[1], B[1]), 3, 3, 1, sharding=sharding)
    found = gradient_reductions(paces(*ends))
    assert [one.is_tied_weight for one in found] == [False, False, True]
    share = 1 if sharding is Sharding.NONE else 0.5
    for one, (first, end) in zip(found, ((0, 3), (3, 6)), strict=False):
        untied = sum(setting().divided_at(1).untied_parameters(MODEL.kind_of(layer)) for layer in range(first, end))
        assert one.nic_seconds["out", "a"] == pytest.approx(share * untied * 4 / NETWORK)


def test_reductions_during_the_last_backward_occupy_the_nic() -> None:
    """A whole all-reduce over a pair, or the half of it that a reduce-scatter is."""
    busy = {}
    for sharding in (Sharding.NONE, Sharding.ZERO2):
        plan = Plan(6, 4, (Pipeline(1, 4, (stage((A[0], B[0]), 0, 6, 1, sharding=sharding),)),))
        (beside,) = gradient_reductions(PlanTimes(plan, setting()))
        assert beside.overlaps_backward
        busy[sharding] = beside.nic_seconds["out", "a"]
    assert busy[Sharding.NONE] == pytest.approx(setting().divided_at(1).resident_parameters(0, 6) * 4 / NETWORK)
    assert busy[Sharding.ZERO2] == pytest.approx(busy[Sharding.NONE] / 2)
