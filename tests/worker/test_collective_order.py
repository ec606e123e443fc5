"""Order of every rank's collectives and messages, which NCCL needs to be one; without peers, rank after rank."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nccl_rules import (
    Replay,
    barriers_on_other_devices,
    collectives_that_differ,
    communicators_started_by_some,
    groups_closed_wrongly,
    groups_with_different_members,
    messages_that_differ,
    pairs_that_may_block,
)
from nightly import covering
from operator_plans import MIXED, QUERIES, given
from operator_plans import plan_of as mesh_plan
from random_plans import feature_pairs, in_sequence_parallel, random_plan
from recorded_calls import Close, Record, recording

from trainwright.cluster import Device
from trainwright.families import T5, Gpt
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.operator_shardings import WeightHeld
from trainwright.plan import LayerRun, Plan, Stage
from trainwright.strategy import Strategy
from trainwright.worker_api import Gang, GangNode, LinkTask, TrialTask
from trainwright_worker import trial
from trainwright_worker.device import barrier
from trainwright_worker.executor import gradient_reduction
from trainwright_worker.executor.process_groups import GroupKey, ProcessGroups, Purpose
from trainwright_worker.gang import report_writer
from trainwright_worker.gang.rank_assignment import RankAssignment
from trainwright_worker.measure import link_bench, pair_channel, slot_streams
from trainwright_worker.measure.pair_channel import PairChannel

WORLD = 8
GANG = Gang(tuple(GangNode(f"node-{number}", (0, 1), "gpu") for number in range(WORLD // 2)))
DEVICES = tuple(Device(f"node-{rank // 2}", rank % 2) for rank in range(WORLD))
GPT = Model.of(Gpt(layers=4, hidden_size=16, heads=8, sequence_length=8, vocabulary_size=16))
TWO_BOUNDARIES = Model.of(
    T5(layers=2, hidden_size=16, heads=4, sequence_length=8, decoder_sequence_length=6, vocabulary_size=16,
       position_buckets=8)
)  # fmt: skip
TIMEOUT = timedelta(seconds=5)


class Watchdog:
    """Watchdog that does not watch."""

    plan_position = ""

    def beat(self, doing: str) -> None:
        """Do nothing."""


def device_of(rank: int) -> torch.device:
    """Return a CPU with the number that the rank's GPU would have."""
    return torch.device("cpu", rank % 2)


def plan_of(seed: int, model: Model) -> Plan:
    degrees = tuple(degree for degree in (1, 2, 4, 8) if model.max_tensor_degree % degree == 0)
    return random_plan(seed, layers=len(model.layers), tensor_degrees=degrees, devices=WORLD)


@dataclass(frozen=True)
class Series:
    """Trials in the same processes, one after another."""

    trials: tuple[TrialTask, ...]

    @classmethod
    def of(cls, plans: Sequence[tuple[Model, Plan]]) -> Series:
        """Vary number format, sequence parallelism and tracking of memory from plan to plan."""
        return cls(
            tuple(
                TrialTask(
                    GANG,
                    replace(model, dtype=(Dtype.FLOAT32, Dtype.FLOAT16)[number % 3 == 0]),
                    in_sequence_parallel(plan) if number % 2 == 0 else plan,
                    warmup_iterations=1,
                    iterations=1,
                    track_memory=number % 8 == 0,
                )
                for number, (model, plan) in enumerate(plans)
            )
        )

    def run(self, assignment: RankAssignment, record: Record) -> None:
        groups = ProcessGroups(TIMEOUT)
        for number, task in enumerate(self.trials):
            record.scope = f"trial {number}"
            trial.measure_trial(task, assignment, device_of(assignment.rank), Watchdog(), groups)
        groups.close()


def walked(run: Callable[[RankAssignment, Record], None]) -> list[Record]:
    """Return the records of all ranks."""
    records = []
    for rank, device in enumerate(DEVICES):
        with recording(rank, WORLD) as record:
            run(RankAssignment(device, rank, rank, rank % 2, WORLD, DEVICES), record)
        records.append(record)
    return records


@cache
def candidates() -> list[Plan]:
    """Return the plans of GPT that the quick ones are chosen from."""
    return [plan_of(seed, GPT) for seed in range(3000)]


@cache
def quick() -> Series:
    by_degrees = Series.of(
        [
            *((GPT, plan) for plan in covering(candidates(), feature_pairs)),
            *((TWO_BOUNDARIES, plan_of(seed, TWO_BOUNDARIES)) for seed in range(8)),
        ]
    )
    return Series((*by_degrees.trials, *on_meshes()))


def on_meshes() -> list[TrialTask]:
    """Return trials of stages with shardings of operators: on all devices, and before a stage with degrees."""
    gathered = {"weight_held": WeightHeld.GATHERED, "update_sharded": True}
    alone = given(GPT, (2, 4), 4, MIXED, (0, 6))
    front = given(GPT, (2, 2), 4, QUERIES, (0, 3), **gathered)
    behind = Stage(DEVICES[4:], (LayerRun(3, 3, Strategy(2, 2), (3, 1)),))
    plans = [mesh_plan(stages, 4) for stages in ([alone], [front, behind])]
    return [TrialTask(GANG, GPT, plan, warmup_iterations=1, iterations=1) for plan in plans]


def many() -> Series:
    return Series.of([(GPT, plan_of(seed, GPT)) for seed in range(1000, 1200)])


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(quick, marks=pytest.mark.timeout(600)),
        pytest.param(many, marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
    ],
)
def records(request: pytest.FixtureRequest) -> list[Record]:
    torch.manual_seed(0)
    gc.freeze()  # a trial collects garbage before it measures: what the tests hold would take most of the time
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gradient_reduction, "MAX_MESSAGE_BYTES", 1024)  # several messages of a tiny model
            return walked(request.param().run)
    finally:
        gc.unfreeze()


@pytest.fixture(autouse=True)
def _silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_writer, "write_progress", lambda *_: None)


def test_quick_plans_cover_every_pair_of_features() -> None:
    plans = [task.plan for task in quick().trials if len(task.model.layers) == len(GPT.layers)]
    every = set().union(*map(feature_pairs, candidates()))
    assert set().union(*map(feature_pairs, plans)) == every
    assert len(quick().trials) <= 45


def test_all_members_make_the_first_call_of_a_communicator(records: list[Record]) -> None:
    assert groups_with_different_members(records) == []
    assert communicators_started_by_some(records) == []


def test_members_of_a_group_make_the_same_collectives(records: list[Record]) -> None:
    assert collectives_that_differ(records) == []


def test_both_ends_of_messages_agree_in_order_and_size(records: list[Record]) -> None:
    assert messages_that_differ(records) == []


def test_first_messages_of_a_pair_go_both_ways_at_once(records: list[Record]) -> None:
    assert pairs_that_may_block(records)[:3] == []  # a difference of thousands takes minutes to show


def test_barriers_name_the_device_of_their_rank(records: list[Record]) -> None:
    assert any(call.kind == "barrier" for call in records[0].calls)
    assert barriers_on_other_devices(records, lambda rank: rank % 2) == []


@pytest.mark.parametrize("one_queue", [False, True])
def test_no_schedule_deadlocks(records: list[Record], one_queue: bool) -> None:
    assert Replay(records, one_queue=one_queue).stuck() == []


def test_groups_end_in_one_order_on_all_ranks(records: list[Record]) -> None:
    assert groups_closed_wrongly(records) == []


def test_groups_end_when_the_next_plan_does_not_need_them() -> None:
    ended, kept, added = (GroupKey(Purpose.COLLECTIVES, ranks) for ranks in ((0, 1), (0, 2), (0, 3)))
    with recording(0, WORLD) as record:
        groups = ProcessGroups(TIMEOUT)
        groups.prepare((ended, kept))
        group = groups.group_of(kept.ranks)
        groups.prepare((kept, added))
        assert [record.groups[event.group] for event in record.events if isinstance(event, Close)] == [ended.ranks]
        assert groups.group_of(kept.ranks) is group


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch is built without NCCL")
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_pairs_get_few_thread_blocks_of_nccl_and_streams_of_their_own(
    monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    blocks: list[tuple[int, bool] | tuple[()]] = []

    def new_group(ranks: list[int], timeout: timedelta, pg_options: Any) -> None:
        del ranks, timeout
        blocks.append((pg_options.config.max_ctas, pg_options.is_high_priority_stream) if pg_options else ())

    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(dist, "new_group", new_group)
    with recording(0, WORLD):
        ProcessGroups(TIMEOUT).prepare([GroupKey(purpose, (0, 1)) for purpose in Purpose])
    few = (8, True) if backend == "nccl" else ()
    assert blocks == [(), few, few, ()]


def test_benchmarks_of_links_keep_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    task = LinkTask(GANG, repeats=1, collective_bytes=(4096, 8192), collective_seconds=1000.0, overlap=True)
    decisions = cycle([task.message_bytes[-1], 1])  # the sender's, of the next size and the repeats
    receive_number = PairChannel.receive_number

    def receive_decision(channel: PairChannel) -> int:
        receive_number(channel)
        return next(decisions)

    monkeypatch.setattr(PairChannel, "receive_number", receive_decision)
    monkeypatch.setattr(pair_channel, "grown_message_bytes", lambda size, _: size)
    monkeypatch.setattr(link_bench, "_repeats", lambda *_: 1)
    monkeypatch.setattr(slot_streams, "_SECONDS", 0.0)

    def run(assignment: RankAssignment, _record: Record) -> None:
        link_bench.measure_links(task, assignment, device_of(assignment.rank), Watchdog())

    found = walked(run)
    assert communicators_started_by_some(found) == []
    assert collectives_that_differ(found) == []
    assert messages_that_differ(found) == []
    assert barriers_on_other_devices(found, lambda rank: rank % 2) == []
    assert Replay(found).stuck() == []


def of_two_ranks(run: Callable[[int, torch.Tensor], None]) -> list[Record]:
    """Return the records of two ranks that first meet in a barrier."""
    records = []
    for rank in range(2):
        with recording(rank, 2) as record:
            barrier(device_of(rank))
            run(rank, torch.zeros(4))
        records.append(record)
    return records


def test_rules_find_opposite_sends() -> None:
    def run(rank: int, tensor: torch.Tensor) -> None:
        dist.send(tensor, 1 - rank)
        dist.recv(tensor, 1 - rank)

    found = of_two_ranks(run)
    assert messages_that_differ(found)
    assert Replay(found).stuck()


def test_rules_accept_opposite_messages_in_one_batch() -> None:
    def run(rank: int, tensor: torch.Tensor) -> None:
        operations = [dist.P2POp(dist.isend, tensor, 1 - rank), dist.P2POp(dist.irecv, tensor.clone(), 1 - rank)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    found = of_two_ranks(run)
    assert messages_that_differ(found) == []
    assert Replay(found).stuck() == []


def test_rules_find_collectives_of_two_groups_in_opposite_orders() -> None:
    def run(rank: int, tensor: torch.Tensor) -> None:
        groups = [dist.new_group([0, 1]) for _ in range(2)]
        for group in groups if rank == 0 else groups[::-1]:
            dist.all_reduce(tensor, group=group)

    found = of_two_ranks(run)
    assert collectives_that_differ(found) == []
    assert Replay(found).stuck()
