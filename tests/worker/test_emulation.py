"""The pace of emulated devices."""

from __future__ import annotations

import time

import pytest

from trainwright.cluster import Emulation
from trainwright.families import Gpt
from trainwright.model import Model
from trainwright_worker.emulation import Pacer, backward_pieces, chunks, forward_pieces
from trainwright_worker.executor.stage import StagePace

EMULATION = Emulation(1e9, 0.004, 1e8)
MODEL = Model.of(Gpt(2, 32, 4, 16, 64))
EMBEDDING, BLOCK, HEAD = MODEL.kinds


def test_forward_follows_the_device_table_segment_by_segment() -> None:
    first, second = forward_pieces(EMULATION, BLOCK, rows=3, tensor=2)
    flops = BLOCK.segments[0].forward_flops_per_row * 3 / 2
    assert first.seconds == EMULATION.compute_seconds(flops, floor_share=0.5)
    assert (first.ends_in_all_reduce, second.ends_in_all_reduce) == (True, True)


def test_backward_is_twice_the_forward_in_reverse() -> None:
    forward = forward_pieces(EMULATION, BLOCK, rows=1, tensor=1)
    assert [piece.seconds for piece in backward_pieces(forward)] == [2 * piece.seconds for piece in forward[::-1]]


def test_kinds_that_are_not_tensor_parallel_take_their_whole_time_on_every_rank() -> None:
    assert forward_pieces(EMULATION, HEAD, rows=2, tensor=4) == forward_pieces(EMULATION, HEAD, rows=2, tensor=1)


def test_without_tensor_parallelism_a_pass_is_one_chunk() -> None:
    pace = StagePace.of(EMULATION, [EMBEDDING, BLOCK, HEAD], rows=2, tensor=1, values=1000)
    assert len(pace.forward) == len(pace.backward) == 1
    assert pace.backward[0] == pytest.approx(2 * pace.forward[0])
    assert pace.update == (1e-5,)


def test_with_tensor_parallelism_a_pass_is_cut_at_its_all_reduces() -> None:
    pace = StagePace.of(EMULATION, [EMBEDDING, BLOCK, BLOCK], rows=2, tensor=2, values=1)
    embedding = forward_pieces(EMULATION, EMBEDDING, rows=2, tensor=2)[0].seconds
    a, b = (piece.seconds for piece in forward_pieces(EMULATION, BLOCK, rows=2, tensor=2))
    assert pace.forward == pytest.approx((embedding + a, b, a, b, 0))
    assert pace.backward == pytest.approx((2 * b, 2 * a, 2 * b, 2 * a, 2 * embedding))


def test_a_real_device_has_no_pace() -> None:
    assert StagePace.of(None, [BLOCK], rows=1, tensor=1, values=1) == StagePace()


def test_chunks_without_all_reduces_lie_together() -> None:
    assert chunks(forward_pieces(EMULATION, BLOCK, rows=1, tensor=1)) == (
        sum(piece.seconds for piece in forward_pieces(EMULATION, BLOCK, rows=1, tensor=1)),
    )


class Clock:
    """Time that passes only when somebody sleeps or computes; every sleep lasts 1 ms too long."""

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
    pacer.synchronize()
    return pacer


def one_pass(pacer: Pacer, clock: Clock, *, length: float, compute: float, waited: float = 0.0) -> None:
    pacer.start([length], waited_seconds=waited)
    clock.compute(compute)
    pacer.finish()


def test_sleeps_that_last_too_long_do_not_add_up(pacer: Pacer, clock: Clock) -> None:
    for _ in range(20):
        one_pass(pacer, clock, length=0.005, compute=0.001)
    assert clock.now == pytest.approx(100.1, abs=0.0011)
    assert (pacer.paced, pacer.late) == (20, 0)


def test_a_wait_lies_outside_of_the_pace(pacer: Pacer, clock: Clock) -> None:
    clock.compute(0.02)
    one_pass(pacer, clock, length=0.01, compute=0.001, waited=0.02)
    assert clock.now == pytest.approx(100.03, abs=0.0011)


def test_a_message_that_was_there_costs_no_time(pacer: Pacer, clock: Clock) -> None:
    clock.compute(0.0001)
    one_pass(pacer, clock, length=0.01, compute=0.001, waited=0.0001)
    assert clock.now == pytest.approx(100.01, abs=0.0011)


def test_a_late_pass_is_counted_once_and_made_up_for(pacer: Pacer, clock: Clock) -> None:
    one_pass(pacer, clock, length=0.005, compute=0.012)
    for _ in range(3):
        one_pass(pacer, clock, length=0.005, compute=0.001)
    assert (pacer.paced, pacer.late) == (4, 1)
    assert clock.now == pytest.approx(100.02, abs=0.0011)


def test_an_all_reduce_lies_between_two_chunks(pacer: Pacer, clock: Clock) -> None:
    pacer.start([0.005, 0.005], waited_seconds=0.0)
    clock.compute(0.001)
    pacer.interrupt()
    clock.compute(0.007)  # the all-reduce
    pacer.resume()
    clock.compute(0.001)
    pacer.finish()
    assert clock.now == pytest.approx(100.017, abs=0.0021)
    assert (pacer.paced, pacer.late) == (2, 0)
    pacer.reset_counts()
    assert pacer.paced == 0


def test_an_empty_last_chunk_is_neither_paced_nor_counted(pacer: Pacer, clock: Clock) -> None:
    pacer.start([0.005, 0.0], waited_seconds=0.0)
    pacer.interrupt()
    pacer.resume()
    end = clock.now
    pacer.finish()
    assert clock.now == end
    assert pacer.paced == 1


def test_a_pass_with_a_missing_all_reduce_is_an_error(pacer: Pacer) -> None:
    pacer.start([0.0, 0.0], waited_seconds=0.0)
    with pytest.raises(RuntimeError, match="2 paced chunks ended in chunk 0"):
        pacer.finish()


def test_the_real_clock_is_kept_as_well() -> None:
    pacer = Pacer(active=True)
    pacer.synchronize()
    begin = time.perf_counter()
    pacer.start([0.02], waited_seconds=0.0)
    pacer.finish()
    assert time.perf_counter() - begin >= 0.0195
