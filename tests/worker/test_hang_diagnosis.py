"""Diagnosis of a process that waits for its device, which on a GPU is slower than the process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from recorded_calls import recording

from trainwright.layer import Dtype
from trainwright.worker_api import FailureReason
from trainwright_worker import trial
from trainwright_worker.device import DeviceProgress, read_value
from trainwright_worker.executor.process_groups import ProcessGroups
from trainwright_worker.gang import report_writer, termination
from trainwright_worker.gang.rank_assignment import RankAssignment, gang_devices
from trainwright_worker.gang.termination import TerminationReporter
from trainwright_worker.gang.watchdog import Watchdog, is_waiting
from trainwright_worker.run_task import broken_connection

ACTIONS = ("forward 0", "summing within the tensor group", "backward 0", "reading the loss")


@dataclass
class Stream:
    """Device stream that has passed some of its marks."""

    passed: int
    marks: int = 0

    def mark(self) -> Mark:
        self.marks += 1
        return Mark(self, self.marks)


@dataclass
class Mark:
    stream: Stream
    number: int

    def query(self) -> bool:
        return self.number <= self.stream.passed


@pytest.mark.parametrize(
    ("passed", "text"),
    [
        (0, "its device is at: an earlier action; 4 later actions wait, first: forward 0"),
        (2, "its device is at: summing within the tensor group; 2 later actions wait, first: backward 0"),
        (4, ""),
    ],
)
def test_progress_names_the_action_that_the_device_has_reached(passed: int, text: str) -> None:
    beats: list[str] = []
    progress = DeviceProgress(beats.append, Stream(passed).mark)
    for action in ACTIONS:
        progress.beat(action)
    assert tuple(beats) == ACTIONS
    assert progress.describe() == text


def test_progress_is_empty_when_the_process_computes_itself() -> None:
    progress = DeviceProgress.of(torch.device("cpu"), lambda _doing: None)
    progress.beat("forward 0")
    assert progress.describe() == ""


@pytest.fixture
def reporter():
    made = TerminationReporter()
    made.watchdog = Watchdog(1e6, 1e6, lambda *_: None)
    made.watchdog.beat("reading the loss")
    yield made
    made.watchdog.stop()


def broken() -> str:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize(
    ("describe", "doing"),
    [
        (lambda: "its device is at: forward 0", "reading the loss (its device is at: forward 0)"),
        (lambda: "", "reading the loss"),
        (broken, "reading the loss"),
    ],
)
def test_status_of_a_rank_names_the_action_of_its_device(
    reporter: TerminationReporter, describe: Callable[[], str], doing: str
) -> None:
    reporter.watchdog.describe_device = describe
    assert reporter._rank_status(FailureReason.HANG).doing == doing


def never() -> str:
    threading.Event().wait()
    return ""


@pytest.mark.parametrize(
    ("describe", "waits"), [(lambda: "its device is at: forward 0", True), (never, True), (lambda: "", False)]
)
def test_rank_waits_when_its_device_lags_or_does_not_answer(
    reporter: TerminationReporter, monkeypatch: pytest.MonkeyPatch, describe: Callable[[], str], waits: bool
) -> None:
    """The launch of a kernel blocks the process, wherever it is, once a thousand earlier ones wait for the device."""
    monkeypatch.setattr(termination, "_DEVICE_QUERY_SECONDS", 0.01)
    reporter.watchdog.describe_device = describe
    assert reporter._rank_status(FailureReason.PEER_LOST).waits is waits


@dataclass
class Group:
    """Process group of NCCL that has come to an error, or one that keeps none, as gloo's."""

    error: str | None

    def _get_backend(self, _device: torch.device) -> object:
        found = None if self.error is None else SimpleNamespace(name=self.error)
        return object() if found is None else SimpleNamespace(get_error=lambda: found)


@pytest.mark.parametrize(
    ("errors", "is_broken"),
    [
        ((None, None), False),
        (("SUCCESS", "SUCCESS"), False),
        (("TIMEOUT",), False),  # the watchdog's own limit is below the back end's
        (("SUCCESS", "COMM_ERROR"), True),
        (("REMOTE_ERROR", "SUCCESS"), True),
    ],
)
def test_watchdog_reports_a_connection_that_nccl_gave_up_as_a_lost_peer(
    errors: tuple[str | None, ...], is_broken: bool
) -> None:
    reports: queue.Queue[tuple[FailureReason, str]] = queue.Queue()
    watchdog = Watchdog(1e6, 0.01, lambda *told: reports.put(told))
    groups = [Group(error) for error in errors]
    watchdog.find_broken_connection = lambda: broken_connection(groups, torch.device("cpu"))
    watchdog.beat("forward 0")  # so that silence ends the test where nothing is broken
    reason, message = reports.get(timeout=20)
    assert (reason is FailureReason.PEER_LOST) == is_broken, message
    assert is_broken == ("NCCL gave up a connection" in message)
    watchdog.stop()


def test_process_that_reads_a_value_waits() -> None:
    """A tensor's value is read without a Python frame, as here a lock is taken."""
    lock = threading.Lock()
    seen = threading.Event()

    class Late:
        __float__ = staticmethod(lock.acquire)

    def watch() -> None:
        while not is_waiting():
            pass
        seen.set()
        lock.release()

    lock.acquire()
    assert not is_waiting()
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    with pytest.raises(TypeError):  # a lock returns no float
        read_value(Late())
    thread.join()
    assert seen.is_set()


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.FLOAT16])
def test_iteration_says_where_it_waits_for_the_device(make, monkeypatch: pytest.MonkeyPatch, dtype: Dtype) -> None:
    monkeypatch.setattr(report_writer, "write_progress", lambda *_: None)
    gang = make.gang(1)
    task = make.trial(gang, warmup_iterations=0, iterations=2, track_memory=False)
    task = replace(task, model=replace(task.model, dtype=dtype))
    devices = gang_devices(gang)
    beats: list[str] = []

    class Listener:
        plan_position = ""
        beat = staticmethod(beats.append)

    with recording(0, 1):
        groups = ProcessGroups(timedelta(seconds=5))
        trial.measure_trial(
            task, RankAssignment(devices[0], 0, 0, 0, 1, devices), torch.device("cpu"), Listener(), groups
        )
        groups.close()
    assert [beat for beat in beats if "finish iteration 1" in beat] == [
        "waiting for the device to finish iteration 1: reading the loss",
        "waiting for the device to finish iteration 1",
    ]
    assert ("taking the norm of the gradients over all ranks" in beats) is (dtype is Dtype.FLOAT16)
    assert beats[-1] == "gathering the times of iteration 1"
