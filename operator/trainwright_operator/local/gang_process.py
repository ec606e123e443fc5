"""Gang as a process group of this machine, which its job and pods stand for."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from trainwright.outside.plain_text import plain_text
from trainwright_operator.flow.names import GANG_LABEL, PLACEMENT_GATE
from trainwright_operator.flow.snapshot import ContainerFacts, JobFacts, PodFacts

WORKER: Final = "trainwright_worker"
_CONTAINER: Final = "worker"
_GRACE_SECONDS: Final = 15.0
_PR_SET_PDEATHSIG: Final = 1
_LIBC: Final = ctypes.CDLL(None)
_MAX_WORDS: Final = 400
_MAX_LOG_BYTES: Final = 8_000_000


class GangProcess:
    """Job with a gated pod for each node; a process starts once the last of them is assigned to its node."""

    def __init__(self, manifest: Mapping[str, Any], folder: Path, now: datetime) -> None:
        metadata = manifest["metadata"]
        self.name, gang = metadata["name"], metadata["labels"][GANG_LABEL]
        self.job = JobFacts(self.name, gang, now, uid=self.name)
        self.pods = [
            PodFacts(
                f"{self.name}-{index}",
                gang,
                self.name,
                manifest["role"],
                index,
                now,
                gates=(PLACEMENT_GATE,),
                reports=not index,
                uid=f"{self.name}-{index}",
                job_uid=self.name,
                shown_as=f"gang {self.name}",
            )
            for index in range(manifest["nodes"])
        ]
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def has_started(self) -> bool:
        return self._process is not None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def process_id(self) -> int | None:
        """Return the id of its process and of the process group."""
        return self._process.pid if self._process is not None else None

    def pin(self, pod_name: str, node: str) -> bool:
        """Assign a pod to its node. Return whether all of them are assigned now."""
        self.pods = [replace(pod, gates=(), node=node) if pod.name == pod_name else pod for pod in self.pods]
        return all(pod.node for pod in self.pods)

    def start(self, task: str, devices: Mapping[str, list[str]], image: str, now: datetime) -> None:
        """Start the process with a task. `devices`: GPUs that the processes of each node see; empty on CPUs."""
        self._folder.mkdir(parents=True, exist_ok=True)
        order, cause = self._folder / "order.json", self._folder / "cause"
        order.write_text(task, encoding="utf-8")
        cause.write_text("", encoding="utf-8")
        command = [sys.executable, "-m", WORKER, "local", "--order", str(order), "--termination-log", str(cause)]
        if devices:
            command += ["--visible-devices", json.dumps(devices)]
        with (self._folder / "log").open("wb") as log, (self._folder / "errors").open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=errors,
                start_new_session=True,
                preexec_fn=end_with_parent,  # noqa: PLW1509 - one system call, which takes no lock
            )
        running = ContainerFacts(_CONTAINER, running_since=now, image_id=image)
        self.pods = [replace(pod, phase="Running", started_at=now, containers=(running,)) for pod in self.pods]

    def observe(self, now: datetime) -> None:
        """Read what the process printed, and how it ended if it has."""
        if self._process is None or self.job.succeeded or self.job.failed_at is not None:
            return
        code, log = self._process.poll(), _end_of(self._folder / "log")
        self.pods[0] = replace(self.pods[0], log=log)
        if code is None:
            return
        message = self._cause() if code else ""
        for number, pod in enumerate(self.pods):
            ended = replace(
                pod.containers[0],
                running_since=None,
                started_at=pod.started_at,
                finished_at=now,
                exit_code=code,
                termination_message=message,
            )
            phase = "Failed" if code else "Succeeded"
            self.pods[number] = replace(pod, phase=phase, containers=(ended,), log=log if not number else "")
        self.job = replace(self.job, succeeded=not code, failed_at=now if code else None)

    def _cause(self) -> str:
        cause = (self._folder / "cause").read_text(encoding="utf-8", errors="replace").strip()
        return cause or plain_text(_end_of(self._folder / "errors"))[-_MAX_WORDS:]

    def stop(self) -> None:
        """End the process: by SIGTERM, after a grace period by SIGKILL to its whole group."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()
        self._process.wait()

    def kill(self) -> None:
        """End the process group at once."""
        if self._process is not None:
            kill_group(self._process.pid)


def end_with_parent() -> None:
    """Ask Linux to send SIGTERM to this process when its parent ends, however that ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def kill_group(group: int) -> None:
    """Kill a process group; one that is gone is no error."""
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return  # deliberate: it is gone; no right to it means that the id was given to another user


def is_worker(process_id: int) -> bool:
    """Return whether a process of that id is one of a gang: ids are given again."""
    try:
        return WORKER.encode() in Path(f"/proc/{process_id}/cmdline").read_bytes()
    except OSError:
        return False


def _end_of(path: Path) -> str:
    """Return the end of a file, long enough for a report of the largest size."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - _MAX_LOG_BYTES, 0))
        return file.read().decode(errors="replace")
