"""Classification of a worker's failures, their root cause, and where they are reported; no gang runs."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from trainwright import documents
from trainwright.cluster import Device, Emulation
from trainwright.worker_api import Cause, Failure, FailureReason, GangNode, RankMemory
from trainwright_worker.device import check_capacity, infiniband_problem
from trainwright_worker.gang.errors import (
    WorkerError,
    classify_error,
    classify_exit_code,
    format_bytes,
    one_line,
    out_of_memory_kills,
)
from trainwright_worker.gang.rank_status import (
    GangStatus,
    RankStatus,
    format_plan_position,
    peer_loss_message,
    root_cause,
)
from trainwright_worker.gang.report_writer import (
    MAX_TERMINATION_MESSAGE_BYTES,
    write_failure,
    write_termination_message,
)
from trainwright_worker.gang.watchdog import Watchdog, format_stacks

GLOO = (
    "[/build/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:1. This is typically caused by bugs"
)
INFINIBAND = "NCCL error: unhandled system error. Call to ibv_reg_mr failed with error Cannot allocate memory"
CUDA = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 14.58 GiB of which 1.25 GiB is free. "
    "Including non-PyTorch memory, this process has 13.3 GiB memory in use."
)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MemoryError(), FailureReason.OUT_OF_MEMORY),
        (RuntimeError("CUDA out of memory. Tried to allocate"), FailureReason.OUT_OF_MEMORY),
        (torch.OutOfMemoryError(CUDA), FailureReason.OUT_OF_MEMORY),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), FailureReason.OUT_OF_MEMORY),
        (RuntimeError(INFINIBAND), FailureReason.PLACEMENT_NOT_MET),
        (RuntimeError(GLOO), FailureReason.PEER_LOST),
        (RuntimeError("Timed out waiting 4000ms for recv operation to complete"), FailureReason.HANG),
        (ValueError("wrong\n shape"), FailureReason.CRASHED),
        (ValueError("a timeout was given"), FailureReason.CRASHED),
        (WorkerError(FailureReason.PLACEMENT_NOT_MET, "no"), FailureReason.PLACEMENT_NOT_MET),
    ],
)
def test_failures_are_named(error: Exception, reason: FailureReason) -> None:
    problem = classify_error(error)
    assert problem.reason is reason
    assert "\n" not in problem.message


def test_image_without_a_library_that_the_node_asks_for_is_named(tmp_path: Path) -> None:
    assert infiniband_problem(tmp_path / "infiniband") is None
    assert infiniband_problem(tmp_path, "libm.so.6") is None
    assert "no libabsent.so.1, so NCCL sends over TCP" in (infiniband_problem(tmp_path, "libabsent.so.1") or "")


def test_lost_connection_is_reported_without_library_details() -> None:
    assert classify_error(RuntimeError(GLOO)).message == "RuntimeError: Connection closed by peer [10.0.0.1]:1."


def test_out_of_memory_on_a_gpu_reports_requested_and_free_bytes() -> None:
    words = classify_error(torch.OutOfMemoryError(CUDA)).message
    assert words.startswith("asked for 2.50 GiB, the device has 14.58 GiB, 1.25 GiB of it free (")


def test_out_of_memory_on_the_host_reports_requested_and_free_bytes() -> None:
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**54)
    assert classify_error(refused.value).message.startswith("asked for 65536.00 TiB, the host has ")
    with pytest.raises(MemoryError) as without_words:
        bytearray(2**62)
    assert classify_error(without_words.value).message.startswith("asked for more than is free, the host has ")


@pytest.mark.parametrize(
    ("size", "words"), [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.50 KiB"), (3 * 2**30, "3.00 GiB")]
)
def test_amounts_have_the_largest_fitting_unit(size: int, words: str) -> None:
    assert format_bytes(size) == words


def test_message_is_one_line_of_bounded_length() -> None:
    assert one_line(" a\n\tb ") == "a b"
    assert one_line("x" * 50, limit=10) == "x" * 9 + "…"


@pytest.mark.parametrize(
    ("exit_code", "out_of_memory", "reason"),
    [
        (1, False, FailureReason.HANG),
        (7, False, FailureReason.CRASHED),
        (-11, True, FailureReason.CRASHED),
        (-9, False, FailureReason.CRASHED),
        (-9, True, FailureReason.OUT_OF_MEMORY),
        (-15, False, FailureReason.TERMINATED),
    ],
)
def test_killed_process_is_reported_by_its_pod(exit_code: int, out_of_memory: bool, reason: FailureReason) -> None:
    problem = classify_exit_code(exit_code, process_name="process 4", out_of_memory=out_of_memory)
    assert problem is not None
    assert problem.reason is reason
    assert problem.message.startswith("process 4 ")


@pytest.mark.parametrize("exit_code", [0, 3, None])
def test_process_with_a_report_or_success_is_not_reported_by_its_pod(exit_code: int | None) -> None:
    assert classify_exit_code(exit_code, process_name="process 4") is None


def test_out_of_memory_kills_are_read_from_the_kernel(tmp_path: Path) -> None:
    events = tmp_path / "memory.events"
    assert out_of_memory_kills(events) == 0
    events.write_text("low 0\noom 3\noom_kill 2\n", encoding="utf-8")
    assert out_of_memory_kills(events) == 2


CRASH = Failure(FailureReason.CRASHED, "boom")
HANG = Failure(FailureReason.HANG, "stuck")
LOST = Failure(FailureReason.PEER_LOST, "gone")
KNOWS = replace(LOST, cause=Cause(FailureReason.CRASHED, "boom"))
ENDED = Failure(FailureReason.TERMINATED, "told to")


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [
        (LOST, CRASH, CRASH),
        (CRASH, LOST, CRASH),
        (HANG, CRASH, HANG),
        (LOST, replace(LOST, rank=1), LOST),
        (LOST, KNOWS, KNOWS),
        (KNOWS, LOST, KNOWS),
        (ENDED, CRASH, CRASH),
        (replace(ENDED, slot=0), ENDED, ENDED),
        (ENDED, replace(ENDED, slot=0), ENDED),
        (replace(LOST, slot=1), ENDED, ENDED),
    ],
)
def test_termination_message_keeps_the_cause(tmp_path: Path, first: Failure, second: Failure, kept: Failure) -> None:
    log = tmp_path / "termination-log"
    log.touch()
    for said in (first, second):
        write_termination_message(log, said)
    assert log.read_text(encoding="utf-8") == documents.dumps(kept)


def test_termination_message_fits_its_limit(capfd) -> None:
    long = "ä" * 5_000
    write_failure(Failure(FailureReason.PEER_LOST, long, 1, "n", 0, long, Cause(FailureReason.CRASHED, long, "n", 0)))
    line = capfd.readouterr().out.partition(" ")[2].strip()
    assert len(line.encode()) <= MAX_TERMINATION_MESSAGE_BYTES
    assert documents.loads(line, Failure).cause.reason is FailureReason.CRASHED


DEVICES = (Device("a", 0), Device("a", 1), Device("b", 0))


def stand(rank: int, *, seconds: float = 5.0, waits: bool = True, told: Cause | None = None) -> RankStatus:
    return RankStatus(rank, DEVICES[rank].node, DEVICES[rank].slot, "stage 0", f"step {rank}", seconds, waits, told)


def test_hang_is_blamed_on_unresponsive_ranks_or_those_not_waiting() -> None:
    silent = GangStatus(DEVICES, (stand(0), stand(2, waits=False)))
    assert silent.likely_culprit() == "rank 1 on a:1 does not answer"
    busy = GangStatus(DEVICES, (stand(0, seconds=9), stand(1, waits=False), stand(2)))
    assert busy.likely_culprit() == "the others wait for rank 1 on a:1 (for 5.0 s: step 1)"
    ring = GangStatus(DEVICES, (stand(0), stand(1, seconds=9), stand(2)))
    assert ring.likely_culprit() == "all wait for one another, longest rank 1 on a:1 (for 9.0 s: step 1)"
    moving = GangStatus(DEVICES, tuple(stand(rank, seconds=0.1) for rank in range(3)))
    assert not moving.likely_culprit()


def test_the_summary_has_a_line_for_every_rank() -> None:
    lines = GangStatus(DEVICES, (stand(2, waits=False), stand(0))).summary().splitlines()
    assert lines == [
        "status of every rank:",
        "  rank 0 on a:0, stage 0: for 5.0 s: step 0 (waits for others)",
        "  rank 1 on a:1: no answer",
        "  rank 2 on b:0, stage 0: for 5.0 s: step 2",
    ]


CRASHED = Cause(FailureReason.CRASHED, "boom", "b", 0)
TERMINATED = Cause(FailureReason.TERMINATED, "told to", "a", 0)
PEER_LOST = Cause(FailureReason.PEER_LOST, "gone", "a", 0)


@pytest.mark.parametrize(
    ("alarm", "answers", "pods", "cause"),
    [
        (CRASHED, (), (), CRASHED),
        (TERMINATED, (), (), TERMINATED),
        (PEER_LOST, (stand(0), stand(1), stand(2, told=CRASHED)), (), CRASHED),
        (PEER_LOST, (stand(0), stand(1)), (CRASHED,), CRASHED),
        (PEER_LOST, (stand(0, told=TERMINATED), stand(1), stand(2, told=CRASHED)), (), CRASHED),
        # Torchrun terminated this process because the unresponsive one is gone.
        (PEER_LOST, (stand(0, told=TERMINATED), stand(1)), (), None),
        (None, (stand(0, told=TERMINATED), stand(1), stand(2)), (), TERMINATED),
        (None, (stand(1),), (TERMINATED,), TERMINATED),
        (None, (stand(0), stand(1)), (), None),
    ],
)
def test_root_cause_is_distinguished_from_consequences(alarm, answers, pods, cause) -> None:
    assert root_cause(alarm, GangStatus(DEVICES, answers, pods)) == cause


def test_lost_ranks_are_named_with_their_last_status() -> None:
    stands = GangStatus(DEVICES, (stand(0),))
    assert peer_loss_message(None, stands) == "rank 1 on a:1, rank 2 on b:0 do not answer any more"
    assert peer_loss_message(CRASHED, stands) == "rank 2 on b:0 ended first (Crashed: boom)"
    assert peer_loss_message(replace(CRASHED, slot=None), stands) == "the pod on b ended first (Crashed: boom)"
    assert not peer_loss_message(None, GangStatus(DEVICES, (stand(0), stand(1), stand(2))))


def test_many_lost_ranks_are_counted() -> None:
    devices = tuple(Device("n", slot) for slot in range(20))
    assert GangStatus(devices).likely_culprit().endswith("rank 7 on n:7 and 12 more do not answer")


def test_device_is_located_in_its_plan(make) -> None:
    a, b, c = (Device("node-a", 0), Device("node-b", 0), Device("node-c", 0))
    plan = make.plan((a, b))
    assert format_plan_position(plan, b) == "pipeline 0, stage 1, layers 2…3"
    assert not format_plan_position(plan, c)


def test_emulated_device_refuses_more_than_its_memory(make) -> None:
    table = Emulation(1e9, 0, 1e9, memory_bytes=2**20)
    gang = replace(make.gang(1), nodes=(GangNode("n", (0,), "emulated-x"),), emulations=(("emulated-x", table),))
    check_capacity(RankMemory("n", 0, 2**20), gang)
    with pytest.raises(WorkerError) as refused:
        check_capacity(RankMemory("n", 0, 2**20 + 512), gang)
    assert refused.value.reason is FailureReason.OUT_OF_MEMORY
    expected = "asked for 1.00 MiB at its peak, the device (emulated-x) has 1.00 MiB: 512 bytes too much"
    assert refused.value.message == expected
    unbounded = replace(gang, emulations=(("emulated-x", replace(table, memory_bytes=None)),))
    check_capacity(RankMemory("n", 0, 2**50), unbounded)
    check_capacity(RankMemory("node-a", 0, 2**50), make.gang(1))


def test_device_table_without_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="memory_bytes must be above 0, got 0; or leave it out"):
        Emulation(1e9, 0, 1e9, memory_bytes=0)


def test_watchdog_reports_activity_and_stacks() -> None:
    said = threading.Event()
    told: list[tuple[FailureReason, str]] = []

    def give_up(reason: FailureReason, complaint: str) -> None:
        told.append((reason, complaint))
        said.set()

    watchdog = Watchdog(60, 0.2, give_up)
    watchdog.beat("step 1")
    assert said.wait(30)
    assert told == [(FailureReason.HANG, "no progress for 0.2 s")]
    assert watchdog.doing == "step 1"
    assert watchdog.seconds_since_beat >= 0.2
    watchdog.stop()


def test_only_the_deadline_counts_before_the_first_heartbeat() -> None:
    said = threading.Event()
    told: list[str] = []

    def give_up(_reason: FailureReason, complaint: str) -> None:
        told.append(complaint)
        said.set()

    watchdog = Watchdog(0.5, 0.1, give_up)
    assert said.wait(30)
    assert told == ["the deadline of 0.5 s was reached"]
    watchdog.stop()


def test_stacks_show_other_threads_but_not_the_watchers() -> None:
    hold = threading.Event()
    threads = [
        threading.Thread(target=hold.wait, args=(60,), name=name, daemon=True) for name in ("busy bee", "watchdog")
    ]
    for thread in threads:
        thread.start()
    text = format_stacks()
    hold.set()
    assert "thread MainThread" in text
    assert "thread busy bee" in text
    assert "thread watchdog" not in text


def test_process_blocked_in_native_code_is_ended_with_stacks() -> None:
    program = """
        import ctypes
        from trainwright_worker.gang.watchdog import Watchdog
        watchdog = Watchdog(100, 1, print)
        watchdog.beat("a call")
        import time
        time.sleep(0.5)  # the watchdog looks after it
        ctypes.PyDLL(None).sleep(100)
    """
    begin = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60, check=False
    )
    assert time.monotonic() - begin < 50
    problem = classify_exit_code(ended.returncode, process_name="process 4")
    assert problem is not None
    assert problem.reason is FailureReason.HANG
    assert "in <module>" in ended.stderr
