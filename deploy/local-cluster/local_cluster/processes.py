"""The cluster's long-running programs: started once, found again after a crash, never mistaken for another's.

A process file keeps the pid with the process' start time and the boot it was started in, so a pid that the kernel has
given to somebody else since is recognised and left alone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from local_cluster.commands import ClusterError, wait_until
from local_cluster.control_groups import ControlGroups
from local_cluster.folders import fingerprint, write_if_changed

_LARGEST_LOG_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Program:
    """A program to be kept running. `settings` is whatever it reads at its start: when it changes, it is restarted."""

    name: str
    arguments: tuple[str, ...]
    settings: str = ""
    environment: Mapping[str, str] | None = None

    @property
    def fingerprint(self) -> str:
        return fingerprint(json.dumps(self.arguments), self.settings, json.dumps(dict(self.environment or {})))


@dataclass(frozen=True, slots=True)
class Identity:
    """Which process a process file speaks of."""

    pid: int
    start_ticks: int
    boot: str
    fingerprint: str

    @property
    def alive(self) -> bool:
        return self.boot == boot_id() and start_ticks(self.pid) == self.start_ticks


@dataclass(frozen=True, slots=True)
class Processes:
    """The programs of one cluster."""

    folder: Path
    logs: Path
    groups: ControlGroups

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def identity(self, name: str) -> Identity | None:
        """What was started last under this name, alive or not."""
        try:
            return Identity(**json.loads(self._file(name).read_text()))
        except FileNotFoundError:
            return None
        except (json.JSONDecodeError, TypeError):  # cut short by a crash: nothing is known of the process
            return None

    def running(self, name: str) -> bool:
        identity = self.identity(name)
        return identity is not None and identity.alive

    def current(self, program: Program) -> bool:
        """Whether it runs, and runs with just these arguments and settings."""
        identity = self.identity(program.name)
        return identity is not None and identity.alive and identity.fingerprint == program.fingerprint

    def ensure(self, program: Program) -> bool:
        """Start the program unless it already runs as wanted. Tells whether it was started."""
        if self.current(program):
            return False
        self.stop(program.name)
        self._start(program)
        return True

    def stop(self, name: str, *, patience_seconds: float = 10) -> None:
        """Ask the program to end, and end it when it does not. Nothing happens when it does not run."""
        identity = self.identity(name)
        if identity is not None and identity.alive:
            _signal(identity, signal.SIGTERM)
            try:
                wait_until(lambda: not identity.alive, what=name, deadline_seconds=patience_seconds, pause_seconds=0.05)
            except ClusterError:
                _signal(identity, signal.SIGKILL)
                wait_until(lambda: not identity.alive, what=f"{name} to end", deadline_seconds=10, pause_seconds=0.05)
        self._file(name).unlink(missing_ok=True)

    def names(self) -> list[str]:
        return sorted(file.stem for file in self.folder.glob("*.json"))

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def _start(self, program: Program) -> None:
        log = self.log(program.name)
        log.parent.mkdir(parents=True, exist_ok=True)
        if log.exists() and log.stat().st_size > _LARGEST_LOG_BYTES:
            log.rename(log.with_suffix(".log.old"))
        with log.open("ab") as output:
            try:
                process = subprocess.Popen(
                    program.arguments,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    cwd="/",
                    env={**_plain_environment(), **(program.environment or {})},
                )
            except FileNotFoundError:
                raise ClusterError(f"{program.name}: the program '{program.arguments[0]}' is not installed") from None
        ticks = start_ticks(process.pid)
        if ticks is None:
            raise ClusterError(f"{program.name} ended at once; see {log}")
        self.groups.attach(process.pid)
        identity = {"pid": process.pid, "start_ticks": ticks, "boot": boot_id(), "fingerprint": program.fingerprint}
        write_if_changed(self._file(program.name), json.dumps(identity))


def boot_id() -> str:
    """The kernel's name for this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None when it has ended (a zombie has ended too)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat[stat.rindex(")") + 2 :].split()  # the name before it may hold spaces and brackets
    return None if fields[0] in "ZX" else int(fields[19])


def in_namespace(namespace: Path, arguments: Sequence[str | Path]) -> tuple[str, ...]:
    """Run in a network namespace, and keep sight of the control groups (`ip netns exec` hides them)."""
    return ("nsenter", f"--net={namespace}", *(str(argument) for argument in arguments))


def _plain_environment() -> dict[str, str]:
    """What a daemon needs; a person's proxies and tokens are not for it."""
    kept = {name: os.environ[name] for name in ("HOME", "LANG", "TZ") if name in os.environ}
    return {**kept, "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}


def _signal(identity: Identity, number: signal.Signals) -> None:
    try:
        os.kill(identity.pid, number)
    except ProcessLookupError:
        return
