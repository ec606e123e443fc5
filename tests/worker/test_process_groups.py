"""Process groups of a plan, and the weights that are reduced together."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from random_plans import random_plan

from trainwright.cluster import Device
from trainwright.families import T5, Gpt
from trainwright.model import Model
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.rank_layout import slices_of
from trainwright.strategy import Sharding, Strategy
from trainwright_worker.executor.message_batches import all_to_all
from trainwright_worker.executor.parameter_groups import parameter_groups, tied_parameter_groups
from trainwright_worker.executor.plan_ranks import PlanRanks
from trainwright_worker.executor.process_groups import required_groups

LAYERS = 6
MODEL = Model.of(Gpt(4, 32, 8, 16, 64))
plans = st.integers(0, 10**6).map(
    lambda seed: random_plan(seed, layers=LAYERS, tensor_degrees=(1, 2, 4, 8), devices=16)
)


def stage(count: int, first: int, *runs: LayerRun) -> Stage:
    return Stage(tuple(Device("node", first + index) for index in range(count)), runs)


def mesh_of(*stages: Stage) -> PlanRanks:
    rows = sum(stages[0].layers[0].rows)
    return PlanRanks.of(Plan(stages[-1].end, rows, (Pipeline(1, rows, stages),)))


def run(first: int, count: int, sharding: Sharding) -> LayerRun:
    return LayerRun(first, count, Strategy(2, 2, sharding=sharding), (3, 2))


def pipelines_of(*stages: tuple[Stage, ...]) -> PlanRanks:
    return PlanRanks.of(Plan(LAYERS, 5 * len(stages), tuple(Pipeline(1, 5, one) for one in stages)))


@given(plans)
def test_every_group_is_ascending_and_unique(plan: Plan) -> None:
    found = required_groups(PlanRanks.of(plan), MODEL)
    assert len(set(found)) == len(found)
    assert all(list(group.ranks) == sorted(set(group.ranks)) for group in found)


@given(plans)
def test_spans_cover_all_layers_and_slices_cover_all_their_ranks(plan: Plan) -> None:
    mesh = PlanRanks.of(plan)
    found = parameter_groups(mesh)
    assert [span.first for span in found] == [0, *[span.end for span in found[:-1]]]
    assert found[-1].end == LAYERS
    for span in found:
        assert len(span.runs) == len(plan.pipelines)
        slices = [set(span.slice_ranks(number)) for number in range(span.slice_count)]
        assert set().union(*slices) == {rank for run in span.runs for rank in run.ranks}


@given(plans)
def test_every_slice_of_a_shared_weight_sums_each_row_once(plan: Plan) -> None:
    mesh = PlanRanks.of(plan)
    (shared,) = tied_parameter_groups(mesh, MODEL)
    groups = shared.reduction_groups()
    owners = {rank for run in shared.runs for rank in run.ranks}
    assert {rank for group in groups for rank in group} == owners
    if not shared.reduces_by_slice:
        assert sum(map(len, groups)) == len(owners)
        assert len(groups) == shared.runs[0].arrangement.tensor
    for number, group in enumerate(groups):
        for run in shared.runs:
            held = {rank: slices_of(run, rank, shared.slice_count) for rank in run.ranks}
            counted = [run.row_interval_of(rank) for rank, slices in held.items() if number in slices]
            assert sorted(counted) == sorted(run.row_intervals)
            assert {rank for rank, slices in held.items() if number in slices} <= set(group)


@pytest.mark.parametrize(
    ("second", "groups"),
    [((2, (6,)), ((0, 2, 4), (1, 3, 5))), ((1, (6,)), ((0, 2, 4), (1, 3, 4)))],
    ids=["one degree", "several degrees"],
)
def test_shared_weight_groups_are_by_tensor_index_or_slice(second, groups) -> None:
    tensor, rows = second
    last = stage(tensor, 4, LayerRun(1, 5, Strategy(tensor, 1), rows))
    mesh = mesh_of(stage(4, 0, LayerRun(0, 1, Strategy(2, 2), (3, 3))), last)
    assert tied_parameter_groups(mesh, MODEL)[0].reduction_groups() == groups


@pytest.mark.parametrize(
    ("shardings", "twins"),
    [
        ((Sharding.ZERO1, Sharding.ZERO3), [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ((Sharding.ZERO2, Sharding.NONE), []),
        ((Sharding.NONE, Sharding.NONE), []),
    ],
    ids=["all", "one keeps it whole", "none"],
)
def test_shared_weight_is_reduced_in_shards_when_all_owners_shard_it(shardings, twins) -> None:
    mesh = pipelines_of(*((stage(4, 4 * number, run(0, 6, one)),) for number, one in enumerate(shardings)))
    (shared,) = tied_parameter_groups(mesh, MODEL)
    assert [shared.peer_ranks(shared.sharding_runs[0], rank) for rank in range(4) if shared.sharding_runs] == twins
    assert set(twins) <= {group.ranks for group in required_groups(mesh, MODEL)}


def test_shared_weight_of_several_stages_is_reduced_whole() -> None:
    ends = (stage(4, 0, run(0, 3, Sharding.ZERO1)), stage(4, 4, run(3, 3, Sharding.ZERO1)))
    assert tied_parameter_groups(pipelines_of(ends), MODEL)[0].sharding_runs == ()
    arranged_anew = (stage(4, 0, run(0, 3, Sharding.ZERO1), LayerRun(3, 3, Strategy(1, 4), (2, 1, 1, 1))),)
    assert tied_parameter_groups(pipelines_of(arranged_anew), MODEL)[0].sharding_runs == ()


def test_replicated_weight_in_divided_layers_is_reduced_over_all_ranks() -> None:
    model = Model.of(T5(1, 32, 4, 16, 64))
    mesh = mesh_of(stage(2, 0, LayerRun(0, len(model.layers), Strategy(2, 1), (4,))))
    found = {shared.name: shared for shared in tied_parameter_groups(mesh, model)}
    assert found["encoder_position_biases"].reduction_groups() == ((0, 1),)
    assert found["token_embedding"].reduction_groups() == ((0,), (1,))


def test_layers_are_reduced_one_by_one_when_a_pipeline_shards_their_gradients() -> None:
    plain = LayerRun(0, 6, Strategy(1, 2), (2, 2))
    sharded = LayerRun(0, 6, Strategy(1, 2, sharding=Sharding.ZERO2), (2, 2))
    pipelines = tuple(Pipeline(1, 4, (stage(2, 2 * place, run),)) for place, run in enumerate((plain, sharded)))
    assert len(parameter_groups(PlanRanks.of(Plan(6, 8, pipelines)))) == 6
    assert len(parameter_groups(PlanRanks.of(Plan(6, 8, (pipelines[0], Pipeline(1, 4, (stage(2, 2, plain),))))))) == 1


@pytest.mark.parametrize(("sent", "messages"), [(None, 4), ([2, 1, 0], 3)])
def test_all_to_all_of_gloo_posts_every_receive_before_it_sends(
    monkeypatch: pytest.MonkeyPatch, sent: list[int] | None, messages: int
) -> None:
    started: list[dist.P2POp] = []
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda each: started.extend(each) or [])
    monkeypatch.setattr(dist, "get_backend", lambda _group: "gloo")
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _group: [3, 5, 8])
    monkeypatch.setattr(dist, "get_rank", lambda _group=None: 1)
    monkeypatch.setattr(dist, "P2POp", lambda operation, tensor, rank, _group: SimpleNamespace(op=operation, tensor=tensor, rank=rank))  # fmt: skip
    received = torch.zeros(3)
    all_to_all(received, torch.tensor([1.0, 2.0, 3.0]), None, None if sent is None else [1, 1, 1], sent)
    operations = [message.op for message in started]
    assert len(operations) == messages
    assert operations == sorted(operations, key=lambda operation: operation is not dist.irecv)
    assert {message.rank for message in started} == {3, 8}
    assert received.tolist() == [0.0, 3.0 if sent else 2.0, 0.0]
