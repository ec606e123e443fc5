"""Gangs that fail: every process ends within a minute and reports why in one line.

`make test` has one test per cause of a failed trial; the nightly run has the other ways to the same cause.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from dataclasses import replace

import pytest
import torch

from trainwright.cluster import Emulation
from trainwright.families import Gpt
from trainwright.model import Model
from trainwright.worker_api import Failure, FailureReason, GangNode, TrialSeriesTask
from trainwright_worker.gang.rank_assignment import gang_devices

pytestmark = [pytest.mark.torch_processes, pytest.mark.timed, pytest.mark.timeout(170)]

MAX_SECONDS = 60.0
FOR_EVER = 1_000_000


def pids(process: subprocess.Popen[str], ranks: int) -> dict[int, int]:
    """Return the process ids of the given number of ranks, as soon as they are known."""
    found: dict[int, int] = {}
    for line in process.stderr:
        if match := re.match(r"rank (\d+) on \S+ is process (\d+)", line):
            found[int(match[1])] = int(match[2])
        if len(found) == ranks:
            return found
    raise AssertionError(f"the gang ended before all {ranks} ranks were there: {found}")


def until_it_trains(process: subprocess.Popen[str]) -> None:
    assert any("PROGRESS" in line for line in process.stdout)


def by_rank(failures: list[Failure]) -> dict[int | None, Failure]:
    return {failure.rank: failure for failure in failures}


class Pods:
    """Gang with one launcher per node, as in a cluster."""

    def __init__(self, worker, order) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        self.worker = worker
        self.nodes = {node.name: len(node.slots) for node in order.gang.nodes}
        self.processes = {
            name: worker.start(
                order,
                *("--master-addr", "127.0.0.1", "--master-port", port),
                environment={"TRAINWRIGHT_NODE_NAME": name, "GLOO_SOCKET_IFNAME": "lo"},
            )
            for name in self.nodes
        }

    def pids(self) -> dict[int, int]:
        """Return the process ids of all ranks, once the gang trains."""
        found = {}
        for name, process in self.processes.items():
            found.update(pids(process, self.nodes[name]))
        until_it_trains(next(iter(self.processes.values())))
        return found

    def end(self):
        """Return each pod's outcome, in order, and the seconds until the last one ended."""
        begin = time.monotonic()
        outcomes = [self.worker.end(process) for process in self.processes.values()]
        return outcomes, time.monotonic() - begin


def test_killed_peer_ends_the_others_with_its_name_and_cause(worker, make) -> None:
    process = worker.start(make.trial(make.gang(1, 1, 1), iterations=FOR_EVER), "local")
    victim = pids(process, 3)[1]
    until_it_trains(process)
    begin = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    outcome = worker.end(process)
    assert time.monotonic() - begin < MAX_SECONDS
    assert outcome.code != 0
    told = by_rank(outcome.failures)
    assert {rank: failure.reason for rank, failure in told.items()} == {
        0: FailureReason.PEER_LOST,
        1: FailureReason.CRASHED,
        2: FailureReason.PEER_LOST,
    }
    assert (told[1].node, told[1].slot) == ("node-b", 0)
    assert f"process {victim} was ended by SIGKILL" in told[1].message
    for rank in (0, 2):
        assert told[rank].message.startswith("rank 1 on node-b:0 ")
        assert told[rank].doing
        # Unless the launcher took more than three seconds to respond.
        if told[rank].cause is not None:
            assert told[rank].cause.reason is FailureReason.CRASHED


def test_crash_is_reported_by_its_process_and_as_cause_by_the_others(worker, make) -> None:
    outcome = worker.local(make.trial(make.gang(1, 1), fault="crash"))
    assert outcome.code != 0
    assert not outcome.reports
    told = by_rank(outcome.failures)
    assert told[0].reason is FailureReason.CRASHED
    assert "rehearsed fault" in told[0].message
    assert "pipeline 0, stage 0, layers 0…1" in told[0].message
    assert told[1].reason is FailureReason.PEER_LOST
    assert told[1].cause.reason is FailureReason.CRASHED
    assert "rehearsed fault" in told[1].cause.message


def test_hanging_rank_is_named_by_all_with_stacks(worker, make) -> None:
    begin = time.monotonic()
    outcome = worker.local(make.trial(make.gang(1, 1, 1, collective_timeout_seconds=4.0), fault="hang"))
    assert time.monotonic() - begin < MAX_SECONDS
    assert outcome.code != 0
    told = by_rank(outcome.failures)
    assert {rank: failure.reason for rank, failure in told.items()} == dict.fromkeys(range(3), FailureReason.HANG)
    assert "hanging after the first iteration" in told[0].doing
    assert "waiting for all ranks" in told[1].doing
    for rank, failure in told.items():
        assert failure.doing in failure.message
        assert "the others wait for rank 0 on node-a:0 " in failure.message
        assert f"[rank {rank} on node-{'abc'[rank]}:0] thread MainThread" in outcome.errors
    assert "threading.Event().wait()" in outcome.errors
    stood = re.findall(
        r"^\[rank 0 on node-a:0\]   (rank \d) on \S+, pipeline 0, stage \d", outcome.errors, re.MULTILINE
    )
    assert stood == ["rank 0", "rank 1", "rank 2"]


@pytest.mark.slow
def test_stopped_rank_is_named_by_the_others(worker, make) -> None:
    order = make.trial(make.gang(1, 1, 1, collective_timeout_seconds=4.0), iterations=FOR_EVER)
    process = worker.start(order, "local")
    victim = pids(process, 3)[1]
    until_it_trains(process)
    begin = time.monotonic()
    os.kill(victim, signal.SIGSTOP)
    outcome = worker.end(process)
    assert time.monotonic() - begin < MAX_SECONDS
    told = by_rank(outcome.failures)
    assert {rank: failure.reason for rank, failure in told.items()} == dict.fromkeys(range(3), FailureReason.HANG)
    for rank in (0, 2):
        assert "rank 1 on node-b:0 does not answer" in told[rank].message
        assert f"[rank {rank} on node-{'abc'[rank]}:0] thread MainThread" in outcome.errors
    assert "did not exit and was killed" in told[1].message
    assert "rank 1 on node-b:0: no answer" in outcome.errors


def test_the_deadline_ends_an_order(worker, make) -> None:
    gang = make.gang(1, deadline_seconds=9.0)
    outcome = worker.local(make.trial(gang, iterations=FOR_EVER))
    assert outcome.code != 0
    assert outcome.reasons == {"Hang"}
    assert "deadline of 9 s" in outcome.failures[0].message


def test_emulated_out_of_memory_is_a_lost_peer_elsewhere(worker, make) -> None:
    table = Emulation(1e12, 0, 1e12)
    nodes = (GangNode("node-a", (0,), "emulated-large"), GangNode("node-b", (0,), "emulated-small"))
    tables = (("emulated-large", table), ("emulated-small", replace(table, memory_bytes=100_000)))
    gang = replace(make.gang(1, 1), nodes=nodes, emulations=tables)
    outcome = worker.local(make.trial(gang))
    assert outcome.code != 0
    assert not outcome.reports
    told = by_rank(outcome.failures)
    assert told[1].reason is FailureReason.OUT_OF_MEMORY
    assert told[1].message.startswith("node-b:0, pipeline 0, stage 1, layers 2…3, ")
    assert "at its peak, the device (emulated-small) has 97.66 KiB" in told[1].message
    assert told[0].reason is FailureReason.PEER_LOST
    assert told[0].cause.reason is FailureReason.OUT_OF_MEMORY


@pytest.mark.slow
def test_series_keeps_earlier_trials_when_a_plan_does_not_fit(worker, make) -> None:
    table = Emulation(1e12, 0, 1e12)
    nodes = (GangNode("node-a", (0,), "emulated-large"), GangNode("node-b", (0,), "emulated-small"))
    tables = (("emulated-large", table), ("emulated-small", replace(table, memory_bytes=100_000)))
    gang = replace(make.gang(1, 1), nodes=nodes, emulations=tables)
    large, small = gang_devices(gang)
    plans = tuple(make.plan(devices) for devices in ((large,), (large, small), (large,)))
    outcome = worker.local(TrialSeriesTask(gang, make.model, plans, warmup_iterations=1, iterations=2))
    assert outcome.code != 0
    assert not outcome.reports
    assert [(part.number, len(part.trial.iteration_seconds)) for part in outcome.parts] == [(0, 1)]  # its first round
    assert FailureReason.OUT_OF_MEMORY in {failure.reason for failure in outcome.failures}


@pytest.mark.slow
def test_host_out_of_memory_is_reported_with_its_stage(worker, make) -> None:
    words = 10**13  # a petabyte of embeddings, more than a process can address
    order = replace(make.trial(make.gang(1, 1)), model=Model.of(Gpt(2, 32, 4, 16, words)))
    outcome = worker.local(order)
    assert outcome.code != 0
    assert "OutOfMemory" in outcome.reasons
    for failure in outcome.failures:
        if failure.reason is FailureReason.OUT_OF_MEMORY:
            stage = {0: "stage 0, layers 0…1", 1: "stage 1, layers 2…3"}[failure.rank]
            where, _, what = failure.message.partition(": ")
            place = f"{failure.node}:{failure.slot}, pipeline 0, {stage}, "
            assert where.startswith((f"{place}making the plan's process groups and layers", f"{place}drawing "))
            assert what.startswith("asked for 1164.15 TiB, the host has ")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU for the process")
def test_missing_device_is_reported_as_unmet_placement(worker, make) -> None:
    begin = time.monotonic()
    outcome = worker.local(make.trial(make.gang(1, 1, backend="nccl")))
    assert time.monotonic() - begin < MAX_SECONDS
    assert outcome.code != 0
    reasons = {failure.reason for failure in outcome.failures}
    assert FailureReason.PLACEMENT_NOT_MET in reasons
    assert reasons <= {FailureReason.PLACEMENT_NOT_MET, FailureReason.PEER_LOST}
    for failure in outcome.failures:
        refused = failure if failure.reason is FailureReason.PLACEMENT_NOT_MET else failure.cause
        assert "has no usable GPU: torch " in refused.message


def test_gang_ends_and_reports_sigterm(worker, make) -> None:
    process = worker.start(make.trial(make.gang(1, 1), iterations=FOR_EVER), "local")
    pids(process, 2)
    until_it_trains(process)
    begin = time.monotonic()
    process.terminate()
    outcome = worker.end(process)
    assert time.monotonic() - begin < MAX_SECONDS
    assert outcome.code != 0
    assert outcome.failures[0].message == "the gang was stopped by a signal (SIGTERM)"
    told = by_rank(outcome.failures)
    assert told[None].reason is FailureReason.TERMINATED
    assert {told[0].reason, told[1].reason} <= {FailureReason.TERMINATED, FailureReason.PEER_LOST}


@pytest.mark.slow
def test_gang_ends_when_its_parent_is_gone(worker, make) -> None:
    process = worker.start(make.trial(make.gang(1, 1), iterations=FOR_EVER), "local")
    pids(process, 2)
    until_it_trains(process)
    begin = time.monotonic()
    process.kill()
    outcome = worker.end(process)  # its output ends with the last of its processes
    assert time.monotonic() - begin < MAX_SECONDS
    assert outcome.reasons == {"PeerLost"}
    assert any("the gang's store, is gone" in failure.message for failure in outcome.failures)


@pytest.mark.slow
def test_pod_reports_sigterm_and_is_named_by_the_others(worker, make) -> None:
    pods = Pods(worker, make.trial(make.gang(1, 1), iterations=FOR_EVER))
    pods.pids()
    pods.processes["node-b"].terminate()
    (first, second), seconds = pods.end()
    assert seconds < MAX_SECONDS
    assert first.code != 0
    assert second.code != 0
    # A process may report it before its pod does.
    (said,) = (failure for failure in second.failures if failure.slot is None)
    assert (said.reason, said.node) == (FailureReason.TERMINATED, "node-b")
    assert "deleted, evicted or preempted" in said.message
    (lost,) = first.failures
    assert lost.reason is FailureReason.PEER_LOST
    assert (lost.cause.reason, lost.cause.node) == (FailureReason.TERMINATED, "node-b")


@pytest.mark.slow
def test_waiting_pod_ends_on_sigterm(worker, make) -> None:
    order = make.trial(make.gang(1, 1))
    environment = {"TRAINWRIGHT_NODE_NAME": "node-b", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    process = worker.start(order, environment=environment)
    time.sleep(8)  # most likely it waits for the gang's first node by now, but any moment will do
    begin = time.monotonic()
    process.terminate()
    outcome = worker.end(process)
    assert time.monotonic() - begin < MAX_SECONDS
    assert outcome.code != 0
    assert FailureReason.TERMINATED in {failure.reason for failure in outcome.failures}


@pytest.mark.parametrize(("victim", "node"), [pytest.param(0, "node-a", marks=pytest.mark.slow), (2, "node-b")])
def test_pod_reports_its_killed_process_to_the_others(worker, make, victim: int, node: str) -> None:
    """Cover the pod that hosts the store too."""
    pods = Pods(worker, make.trial(make.gang(2, 1), iterations=FOR_EVER))
    os.kill(pods.pids()[victim], signal.SIGKILL)
    outcomes, seconds = pods.end()
    assert seconds < MAX_SECONDS
    assert all(outcome.code != 0 for outcome in outcomes)
    failures = [failure for outcome in outcomes for failure in outcome.failures]
    (crash,) = (failure for failure in failures if failure.reason is FailureReason.CRASHED)
    assert (crash.node, crash.slot, crash.rank) == (node, 0, victim)
    assert "ended by SIGKILL" in crash.message
    others = [failure for failure in failures if failure is not crash]
    assert {failure.reason for failure in others} <= {FailureReason.PEER_LOST, FailureReason.TERMINATED}
    assert any(f"rank {victim} on {node}:0 " in failure.message for failure in others)


@pytest.mark.slow
def test_pod_with_a_stopped_process_exits_after_a_peer_aborts(worker, make) -> None:
    pods = Pods(worker, make.trial(make.gang(1, 1, collective_timeout_seconds=4.0), iterations=FOR_EVER))
    os.kill(pods.pids()[1], signal.SIGSTOP)
    (first, second), seconds = pods.end()
    assert seconds < MAX_SECONDS
    assert first.reasons == {"Hang"}
    assert "rank 1 on node-b:0 does not answer" in first.failures[0].message
    assert second.code != 0
    assert "a process of this pod did not exit after an abort (Hang: " in second.failures[0].message


@pytest.mark.slow
def test_processes_end_when_their_launcher_is_gone(worker, make) -> None:
    pods = Pods(worker, make.trial(make.gang(1, 1), iterations=FOR_EVER))
    pods.pids()
    pods.processes["node-a"].kill()
    (first, second), seconds = pods.end()
    assert seconds < MAX_SECONDS
    lost = [*first.failures, *second.failures]
    assert lost
    assert {failure.reason for failure in lost} == {FailureReason.PEER_LOST}
    assert any("the gang's store, is gone" in failure.message for failure in lost)
