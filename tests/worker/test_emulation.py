"""The pace of emulated devices."""

from __future__ import annotations

import time

import pytest

from trainwright import families
from trainwright.cluster import Emulation
from trainwright.model import Gpt
from trainwright_worker.emulation import Pacer, backward_pieces, chunks, forward_pieces
from trainwright_worker.executor.stage import StagePace

EMULATION = Emulation(1e9, 0.004, 1e8)
MODEL = families.build(Gpt(2, 32, 4, 16, 64))
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


def test_passes_without_waits_do_not_add_up_their_errors() -> None:
    pacer = Pacer(active=True)
    begin = time.perf_counter()
    pacer.synchronize()
    for _ in range(20):
        pacer.start([0.005], waited_seconds=0.0)
        time.sleep(0.001)
        pacer.finish()
    assert time.perf_counter() - begin == pytest.approx(0.1, abs=0.02)
    assert pacer.paced == 20


def test_a_wait_lies_outside_of_the_pace() -> None:
    pacer = Pacer(active=True)
    pacer.synchronize()
    time.sleep(0.02)
    begin = time.perf_counter()
    pacer.start([0.01], waited_seconds=0.02)
    pacer.finish()
    assert time.perf_counter() - begin >= 0.0095


def test_computation_that_lasts_too_long_is_counted() -> None:
    pacer = Pacer(active=True)
    pacer.synchronize()
    pacer.start([0.002, 0.002], waited_seconds=0.0)
    time.sleep(0.01)
    pacer.interrupt()
    pacer.resume()
    pacer.finish()
    assert (pacer.paced, pacer.late) == (2, 1)
    pacer.reset_counts()
    assert (pacer.paced, pacer.late) == (0, 0)


def test_a_pass_with_a_missing_all_reduce_is_an_error() -> None:
    pacer = Pacer(active=True)
    pacer.synchronize()
    pacer.start([0.0, 0.0], waited_seconds=0.0)
    with pytest.raises(RuntimeError, match="2 paced chunks ended in chunk 0"):
        pacer.finish()
