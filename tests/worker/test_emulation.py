"""Pacing of emulated devices."""

from __future__ import annotations

import gc
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from trainwright.cluster import Device, Emulation
from trainwright.families import Gpt
from trainwright.model import Model
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.strategy import Strategy
from trainwright_worker import trial
from trainwright_worker.emulation import Pacer, backward_segments, forward_segments
from trainwright_worker.executor.emulated_pacing import EmulatedStagePace
from trainwright_worker.executor.plan_ranks import PlanRanks

EMULATION = Emulation(1e9, 0.004, 1e8)
MODEL = Model.of(Gpt(2, 32, 4, 16, 64))
EMBEDDING, BLOCK, HEAD = MODEL.kinds
BLOCKS = (1, 2)


def test_forward_follows_the_device_table_segment_by_segment() -> None:
    first, second = forward_segments(EMULATION, BLOCK, rows=3, tensor=2)
    flops = BLOCK.segments[0].forward_flops_per_row * 3 / 2
    assert first.seconds == EMULATION.compute_seconds(flops, floor_share=0.5)
    assert [(piece.sums_gradients, piece.sums_output) for piece in (first, second)] == [(True, True)] * 2


def test_backward_is_twice_the_forward_in_reverse() -> None:
    forward = forward_segments(EMULATION, BLOCK, rows=1, tensor=1)
    assert [piece.seconds for piece in backward_segments(forward)] == [2 * piece.seconds for piece in forward[::-1]]


def test_kinds_without_tensor_parallelism_take_full_time_on_every_rank() -> None:
    assert forward_segments(EMULATION, HEAD, rows=2, tensor=4) == forward_segments(EMULATION, HEAD, rows=2, tensor=1)


def stage(*runs: tuple[LayerRun, list[str]]) -> SimpleNamespace:
    """Return what emulated pacing reads of a rank's stage, on a single node; `runs` states each layer's properties."""
    devices = tuple(Device("node", slot) for slot in range(runs[0][0].strategy.tensor * runs[0][0].strategy.data))
    plan = Plan(4, 2, (Pipeline(1, 2, (Stage(devices, tuple(run for run, _ in runs)),)),))
    meshes = PlanRanks.of(plan).pipelines[0][0].runs
    made = tuple(
        tuple(
            SimpleNamespace(
                number=run.first + place,
                run=mesh,
                has_sharded_weights="gathers" in words,
                is_sequence_parallel="parts" in words and run.first + place in BLOCKS,
                scatters_boundary="parts" in words and run.first + place == BLOCKS[0],
                gathers_boundary="parts" in words and run.first + place == BLOCKS[-1],
                is_recomputed=run.strategy.recompute,
                overlaps_reduction="reduces" in words,
                without_backward=False,
            )
            for place in range(run.count)
        )
        for (run, words), mesh in zip(runs, meshes, strict=True)
    )
    return SimpleNamespace(runs=made, layers=[layer for run in made for layer in run], updated_parameters=1000)


def pace_of(*runs: tuple[LayerRun, list[str]]) -> EmulatedStagePace:
    return EmulatedStagePace.of(EMULATION, MODEL, stage(*runs), 0)


def seconds(kind, tensor: int = 1, rows: int = 2) -> list[float]:
    return [piece.seconds for piece in forward_segments(EMULATION, kind, rows=rows, tensor=tensor)]


E, B, H = (sum(seconds(kind)) for kind in (EMBEDDING, BLOCK, HEAD))
LOOKED_UP, PLACED = seconds(MODEL.divided_kind(EMBEDDING), tensor=2)
(PROJECTED,) = seconds(MODEL.divided_kind(HEAD), tensor=2)


def test_pass_without_communication_is_one_chunk() -> None:
    pace = pace_of((LayerRun(0, 4, Strategy(1, 1), (2,)), []))
    assert pace.forward == pytest.approx((E + 2 * B + H,))
    assert pace.backward == pace.last_backward == pytest.approx((2 * (E + 2 * B + H),))
    assert pace.update == (1e-5,)


def test_tensor_parallel_pass_is_split_at_collectives() -> None:
    """The embedding sums what ranks looked up; the loss ends when statistics of the logits are gathered."""
    pace = pace_of((LayerRun(0, 4, Strategy(2, 1), (2,)), []))
    a, b = seconds(BLOCK, tensor=2)
    assert pytest.approx(LOOKED_UP + PLACED) == E
    assert PROJECTED < H
    assert pace.forward == pytest.approx((LOOKED_UP, PLACED + a, b, a, b, PROJECTED, 0))
    assert pace.backward == pytest.approx((2 * PROJECTED, 2 * b, 2 * a, 2 * b, 2 * a, 2 * E))


def test_sequence_parallel_segment_has_a_collective_at_both_ends() -> None:
    """Between two segments two communications follow each other; a boundary's gradients are gathered last."""
    pace = pace_of((LayerRun(0, 4, Strategy(2, 1), (2,)), ["parts"]))
    a, b = seconds(BLOCK, tensor=2)
    block = (a, 0, b, 0)
    assert pace.forward == pytest.approx((LOOKED_UP, PLACED, *block, *block, PROJECTED, 0))
    assert pace.backward == pytest.approx((2 * PROJECTED, 0, *(2 * length for length in (b, 0, a, 0) * 2), 2 * E))


def test_sequence_parallel_recompute_repeats_collectives() -> None:
    pace = pace_of((LayerRun(0, 4, Strategy(2, 1, recompute=True), (2,)), ["parts"]))
    a, b = seconds(BLOCK, tensor=2)
    again = (a, 0, b, 0, 2 * b, 0, 2 * a)
    assert pace.forward == pytest.approx((LOOKED_UP, PLACED, a, 0, b, 0, a, 0, b, 0, PROJECTED, 0))
    head, embedding = (PROJECTED, 2 * PROJECTED, 0), (LOOKED_UP, PLACED + 2 * E)
    assert pace.backward == pytest.approx((*head, *again, 0, *again, 0, *embedding))


def test_recomputed_layers_compute_twice_in_the_backward() -> None:
    pace = pace_of((LayerRun(0, 4, Strategy(1, 1, recompute=True), (2,)), []))
    assert pace.backward == pytest.approx((3 * (E + 2 * B + H),))


def test_pass_is_split_where_rows_are_redistributed() -> None:
    pace = pace_of((LayerRun(0, 2, Strategy(1, 2), (1, 1)), []), (LayerRun(2, 2, Strategy(2, 1), (2,)), []))
    one = sum(seconds(EMBEDDING, rows=1)) + sum(seconds(BLOCK, rows=1))
    a, b = seconds(BLOCK, tensor=2)
    assert pace.forward == pytest.approx((one, a, b, PROJECTED, 0))
    assert pace.backward == pytest.approx((2 * PROJECTED, 2 * b, 2 * a, 0, 2 * one))


def test_pass_is_split_where_weights_are_gathered_and_gradients_reduced() -> None:
    pace = pace_of((LayerRun(0, 4, Strategy(1, 1), (2,)), ["gathers", "reduces"]))
    assert pace.forward == pytest.approx((0, E, B, B, H))
    assert pace.backward == pytest.approx((0, 2 * H, 2 * B, 2 * B, 2 * E))
    assert pace.last_backward == pytest.approx((0, 2 * H, 0, 2 * B, 0, 2 * B, 0, 2 * E, 0))


def test_a_real_device_has_no_pace() -> None:
    assert (
        EmulatedStagePace.of(None, MODEL, stage((LayerRun(0, 4, Strategy(1, 1), (2,)), [])), 0) == EmulatedStagePace()
    )


class Clock:
    """Clock that advances only when code sleeps or computes; every sleep lasts 1 ms too long."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds + 0.001

    def compute(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("trainwright_worker.emulation.time", clock)
    return clock


@pytest.fixture
def pacer(clock: Clock) -> Pacer:
    pacer = Pacer(active=True)
    pacer.reset_due()
    return pacer


def one_pass(pacer: Pacer, clock: Clock, *, length: float, compute: float, waited: float = 0.0) -> None:
    pacer.start([length], waited_seconds=waited)
    clock.compute(compute)
    pacer.end()


def test_late_sleeps_do_not_accumulate(pacer: Pacer, clock: Clock) -> None:
    for _ in range(20):
        one_pass(pacer, clock, length=0.005, compute=0.001)
    assert clock.now == pytest.approx(100.1, abs=0.0011)
    assert (pacer.paced, pacer.late) == (20, 0)


def test_waiting_is_not_paced(pacer: Pacer, clock: Clock) -> None:
    clock.compute(0.02)
    one_pass(pacer, clock, length=0.01, compute=0.001, waited=0.02)
    assert clock.now == pytest.approx(100.03, abs=0.0011)


def test_available_message_costs_no_time(pacer: Pacer, clock: Clock) -> None:
    clock.compute(0.0001)
    one_pass(pacer, clock, length=0.01, compute=0.001, waited=0.0001)
    assert clock.now == pytest.approx(100.01, abs=0.0011)


def test_late_pass_is_counted_once_and_compensated(pacer: Pacer, clock: Clock) -> None:
    one_pass(pacer, clock, length=0.005, compute=0.012)
    for _ in range(3):
        one_pass(pacer, clock, length=0.005, compute=0.001)
    assert (pacer.paced, pacer.late) == (4, 1)
    assert pacer.late_ratio == pytest.approx(0.007 / 0.02)
    assert clock.now == pytest.approx(100.02, abs=0.0011)


def test_all_reduce_is_between_two_chunks(pacer: Pacer, clock: Clock) -> None:
    pacer.start([0.005, 0.005], waited_seconds=0.0)
    clock.compute(0.001)
    pacer.pause()
    clock.compute(0.007)  # the all-reduce
    pacer.resume()
    clock.compute(0.001)
    pacer.end()
    assert clock.now == pytest.approx(100.017, abs=0.0021)
    assert (pacer.paced, pacer.late) == (2, 0)
    pacer.reset_counts()
    assert pacer.paced == pacer.late_ratio == 0


def test_an_empty_last_chunk_is_neither_paced_nor_counted(pacer: Pacer, clock: Clock) -> None:
    pacer.start([0.005, 0.0], waited_seconds=0.0)
    pacer.pause()
    pacer.resume()
    end = clock.now
    pacer.end()
    assert clock.now == end
    assert pacer.paced == 1


def test_a_pass_with_a_missing_all_reduce_is_an_error(pacer: Pacer) -> None:
    pacer.start([0.0, 0.0], waited_seconds=0.0)
    with pytest.raises(RuntimeError, match="2 paced chunks ended in chunk 0"):
        pacer.end()


def test_the_real_clock_is_kept_as_well() -> None:
    pacer = Pacer(active=True)
    pacer.reset_due()
    begin = time.perf_counter()
    pacer.start([0.02], waited_seconds=0.0)
    pacer.end()
    assert time.perf_counter() - begin >= 0.0195


def test_trial_collects_no_garbage_while_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection took 120 ms in a forward of 59 ms, always in the same one, so that the trial was void."""
    enabled: list[bool] = []

    class Stop(Exception):  # noqa: N818 (not an error)
        pass

    def timed(*_: object) -> None:
        enabled.append(gc.isenabled())
        raise Stop

    monkeypatch.setattr(trial, "_make_executor", lambda *_: None)
    monkeypatch.setattr(trial, "_time_iterations", timed)
    monkeypatch.setattr(trial, "format_plan_position", lambda *_: "")
    with pytest.raises(Stop):
        trial.measure_trial(Mock(checks=()), Mock(), torch.device("cpu"), Mock(), Mock())
    assert (enabled, gc.isenabled()) == ([False], True)
