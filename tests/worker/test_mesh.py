"""Who sends which rows to whom, and who meets in which group."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainwright.cluster import Device
from trainwright.plan import LayerRun, Order, Pipeline, Stage
from trainwright_worker.executor.mesh import Mesh, StageMesh, Transfer, transfers


@st.composite
def two_stages(draw: st.DrawFn) -> tuple[Mesh, int]:
    """Two stages with any degrees and any split of the same rows."""
    size = draw(st.integers(6, 12))
    stages, device = [], 0
    for first in (0, 1):
        data, tensor = draw(st.integers(1, 4)), draw(st.integers(1, 4))
        cuts = sorted(draw(st.sets(st.integers(1, size - 1), min_size=data - 1, max_size=data - 1)))
        rows = tuple(stop - start for start, stop in zip([0, *cuts], [*cuts, size], strict=True))
        devices = tuple(Device("node", device + i) for i in range(data * tensor))
        stages.append(Stage(devices, (LayerRun(first, 1, tensor, data, rows, draw(st.sampled_from(Order))),)))
        device += len(devices)
    return Mesh.of(Pipeline(1, size, tuple(stages))), size


@given(two_stages())
def test_every_receiver_gets_each_of_its_rows_exactly_once(case: tuple[Mesh, int]) -> None:
    mesh, _ = case
    for source, target in (mesh.stages, mesh.stages[::-1]):
        found = transfers(source, target)
        for rank in target.ranks:
            start, stop = target.interval(target.position(rank)[0])
            rows = sorted(row for t in found if t.target == rank for row in range(t.start, t.stop))
            assert rows == list(range(start, stop))


@given(two_stages())
def test_senders_send_rows_that_they_own(case: tuple[Mesh, int]) -> None:
    source, target = case[0].stages
    for transfer in transfers(source, target):
        replica, index = source.position(transfer.source)
        start, stop = source.interval(replica)
        assert start <= transfer.start < transfer.stop <= stop
        assert index == target.position(transfer.target)[1] % source.tensor


@given(two_stages())
def test_groups_partition_a_stages_ranks(case: tuple[Mesh, int]) -> None:
    for stage in case[0].stages:
        assert sorted(rank for group in stage.replicas for rank in group) == list(stage.ranks)
        assert sorted(rank for group in stage.data_groups for rank in group) == list(stage.ranks)
        assert all(len(set(replica) & set(group)) == 1 for replica in stage.replicas for group in stage.data_groups)


def test_order_tells_which_degree_runs_over_neighbours() -> None:
    devices = tuple(Device("node", slot) for slot in range(4))
    inner = Stage(devices, (LayerRun(0, 1, 2, 2, (1, 1), Order.TENSOR_INNER),))
    outer = Stage(devices, (LayerRun(0, 1, 2, 2, (1, 1), Order.DATA_INNER),))
    assert StageMesh.of(inner, 4).replicas == ((4, 5), (6, 7))
    assert StageMesh.of(outer, 4).replicas == ((4, 6), (5, 7))


def test_uneven_rows_are_cut_at_every_border() -> None:
    source = StageMesh(0, 1, (3, 3), ((0,), (1,)))
    target = StageMesh(1, 2, (4, 2), ((2,), (3,)))
    assert transfers(source, target) == (Transfer(0, 2, 0, 3), Transfer(1, 2, 3, 4), Transfer(1, 3, 4, 6))


def test_owners_of_a_shared_weight_meet_by_tensor_index_or_all_together() -> None:
    first = StageMesh(0, 1, (3, 3), ((0, 1), (2, 3)))
    same = StageMesh(1, 2, (6,), ((4, 5),))
    other = StageMesh(1, 2, (6,), ((4,),))
    assert Mesh((first, same)).shared_groups((0, 1)) == ((0, 2, 4), (1, 3, 5))
    assert Mesh((first, other)).shared_groups((0, 1)) == ((0, 1, 2, 3, 4),)
    assert Mesh((first, same)).owners((0, 1)) == (0, 1)
    assert Mesh((first, same)).owners((0,)) == (0,)
