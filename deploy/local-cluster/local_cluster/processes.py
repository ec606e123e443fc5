"""Long-running programs of the cluster, found again after a crash.

A process file stores the pid, start time and boot id, so a pid reused by the kernel is recognised and left alone.
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
from local_cluster.paths import fingerprint, write_if_changed

_LARGEST_LOG_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Program:
    """Program to keep running; changed `settings` (its configuration) restart it."""

    name: str
    arguments: tuple[str, ...]
    settings: str = ""
    environment: Mapping[str, str] | None = None

    @property
    def fingerprint(self) -> str:
        return fingerprint(json.dumps(self.arguments), self.settings, json.dumps(dict(self.environment or {})))


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """Process recorded in a process file."""

    pid: int
    start_ticks: int
    boot: str
    fingerprint: str

    @property
    def alive(self) -> bool:
        return self.boot == boot_id() and start_ticks(self.pid) == self.start_ticks


@dataclass(frozen=True, slots=True)
class Processes:
    """Programs of one cluster."""

    folder: Path
    logs: Path
    groups: ControlGroups

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def identity(self, name: str) -> ProcessIdentity | None:
        """Return the process last started under this name, alive or not."""
        try:
            return ProcessIdentity(**json.loads(self._file(name).read_text()))
        except FileNotFoundError:
            return None
        except (json.JSONDecodeError, TypeError):  # cut short by a crash: nothing is known of the process
            return None

    def running(self, name: str) -> bool:
        identity = self.identity(name)
        return identity is not None and identity.alive

    def current(self, program: Program) -> bool:
        """Return whether the program runs with these arguments and settings."""
        identity = self.identity(program.name)
        return identity is not None and identity.alive and identity.fingerprint == program.fingerprint

    def ensure(self, program: Program) -> bool:
        """Start the program unless it runs as configured, and return whether it was started."""
        if self.current(program):
            return False
        self.stop(program.name)
        self._start(program)
        return True

    def stop(self, name: str, *, patience_seconds: float = 10) -> None:
        """Stop the program if it runs: SIGTERM, then SIGKILL."""
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
    """Return the kernel's id of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_ticks(pid: int) -> int | None:
    """Return a process's start in clock ticks since boot, or None if it has ended (zombies included)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat[stat.rindex(")") + 2 :].split()  # the name before it may hold spaces and brackets
    return None if fields[0] in "ZX" else int(fields[19])


def in_namespace(namespace: Path, arguments: Sequence[str | Path]) -> tuple[str, ...]:
    """Wrap a command to run in a network namespace; unlike `ip netns exec`, control groups stay visible."""
    return ("nsenter", f"--net={namespace}", *(str(argument) for argument in arguments))


def _plain_environment() -> dict[str, str]:
    """Return a daemon's environment, without the user's proxies and tokens."""
    kept = {name: os.environ[name] for name in ("HOME", "LANG", "TZ") if name in os.environ}
    return {**kept, "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}


def _signal(identity: ProcessIdentity, number: signal.Signals) -> None:
    try:
        os.kill(identity.pid, number)
    except ProcessLookupError:
        return
