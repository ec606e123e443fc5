"""Programs are started once, found again, and never mistaken for somebody else's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from local_cluster.commands import ClusterError, run, wait_until
from local_cluster.control_groups import ControlGroups
from local_cluster.processes import Processes, Program, start_ticks

SLEEP = Program("sleeper", (sys.executable, "-c", "import time; print('started', flush=True); time.sleep(60)"))


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    kept = Processes(tmp_path / "processes", tmp_path / "logs", ControlGroups("rehearsal", (), unified=False))
    yield kept
    for name in kept.names():
        kept.stop(name)


def pid_of(processes: Processes) -> int:
    identity = processes.identity("sleeper")
    assert identity is not None
    return identity.pid


def test_a_running_program_is_left_alone(processes: Processes) -> None:
    assert processes.ensure(SLEEP)
    first = pid_of(processes)
    assert not processes.ensure(SLEEP)
    assert pid_of(processes) == first


def test_changed_settings_restart_it(processes: Processes) -> None:
    processes.ensure(SLEEP)
    first = pid_of(processes)
    assert processes.ensure(Program(SLEEP.name, SLEEP.arguments, settings="another"))
    assert pid_of(processes) != first
    assert start_ticks(first) is None


def test_a_killed_program_is_started_again(processes: Processes) -> None:
    processes.ensure(SLEEP)
    first = pid_of(processes)
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: not processes.running("sleeper"), what="the program to be gone", deadline_seconds=5)
    assert processes.ensure(SLEEP)
    assert pid_of(processes) != first


def test_reused_pid_is_not_touched(processes: Processes) -> None:
    processes.ensure(SLEEP)
    file = processes.folder / "sleeper.json"
    kept = json.loads(file.read_text())
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as stranger:
        file.write_text(json.dumps({**kept, "pid": stranger.pid, "start_ticks": kept["start_ticks"] - 1}))
        assert not processes.running("sleeper")
        processes.stop("sleeper")
        assert stranger.poll() is None
        stranger.kill()
    file.write_text(json.dumps(kept))


def test_identity_is_invalid_after_a_reboot(processes: Processes) -> None:
    processes.ensure(SLEEP)
    file = processes.folder / "sleeper.json"
    kept = file.read_text()
    file.write_text(json.dumps({**json.loads(kept), "boot": "an earlier one"}))
    assert not processes.running("sleeper")
    file.write_text(kept)


def test_truncated_state_file_counts_as_empty(processes: Processes) -> None:
    processes.folder.mkdir(parents=True)
    (processes.folder / "sleeper.json").write_text('{"pid": 1')
    assert processes.identity("sleeper") is None
    processes.stop("sleeper")


def test_a_wait_that_fails_shows_its_reason_and_the_log(tmp_path: Path) -> None:
    log = tmp_path / "program.log"
    log.write_text("first\nthe port is taken\n")
    with pytest.raises(ClusterError, match="the server to be ready: timed out after 0 s") as failure:
        wait_until(lambda: False, what="the server to be ready", deadline_seconds=0, log=log)
    assert "the port is taken" in str(failure.value)


def test_failing_program_is_named_with_its_output() -> None:
    with pytest.raises(ClusterError, match="cutting the cake") as failure:
        run([sys.executable, "-c", "raise SystemExit('no knife')"], what="cutting the cake")
    assert "no knife" in str(failure.value)
    with pytest.raises(ClusterError, match="'no-such-program' is not installed"):
        run(["no-such-program"], what="cutting the cake")
