"""Commands: runs of other programs, with clear failures."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_TAIL_LINES = 15


class ClusterError(RuntimeError):
    """Failure of the cluster; the message says what failed, where, and what helps."""


def run(  # noqa: PLR0913 - the parameters of a program's run
    arguments: Sequence[str | Path],
    *,
    what: str,
    deadline_seconds: float = 120,
    text_input: str | None = None,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> str:
    """Run a program to its end and return its standard output.

    `what` names the step. Raises ClusterError with the end of the program's output when it fails or exceeds its
    deadline.
    """
    try:
        done = subprocess.run(
            [str(argument) for argument in arguments],
            capture_output=True,
            text=True,
            input=text_input,
            stdin=subprocess.DEVNULL if text_input is None else None,
            env=environment,
            cwd=folder,
            timeout=deadline_seconds,
            check=False,
        )
    except FileNotFoundError:
        raise ClusterError(f"{what}: the program '{arguments[0]}' is not installed") from None
    except subprocess.TimeoutExpired:
        raise ClusterError(f"{what}: '{arguments[0]}' was not done within {deadline_seconds:.0f} s") from None
    if done.returncode != 0:
        raise ClusterError(f"{what}: '{arguments[0]}' failed:\n{tail(done.stderr or done.stdout)}")
    return done.stdout


def succeeds(arguments: Sequence[str | Path], *, deadline_seconds: float = 20) -> bool:
    """Return whether a program exits with status 0."""
    try:
        done = subprocess.run(
            [str(argument) for argument in arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=deadline_seconds,
            check=False,
        )
    except (subprocess.TimeoutExpired, FileNotFoundError):
        return False
    return done.returncode == 0


def tail(text: str, lines: int = _TAIL_LINES) -> str:
    """Return the last lines of an output, indented."""
    return "\n".join(f"    {line[:300]}" for line in text.rstrip().splitlines()[-lines:])


def wait_until(
    ready: Callable[[], bool],
    *,
    what: str,
    deadline_seconds: float,
    log: Path | None = None,
    pause_seconds: float = 0.25,
) -> None:
    """Wait for a condition.

    Raises ClusterError with the condition and the end of the responsible component's log.
    """
    end = time.monotonic() + deadline_seconds
    while not ready():
        if time.monotonic() > end:
            shown = f"; the end of {log}:\n{tail(_end_of(log))}" if log is not None and log.exists() else ""
            raise ClusterError(f"{what}: timed out after {deadline_seconds:.0f} s{shown}")
        time.sleep(pause_seconds)


def _end_of(log: Path) -> str:
    with log.open("rb") as stream:
        stream.seek(0, 2)
        stream.seek(max(0, stream.tell() - 16 * 1024))
        return stream.read().decode(errors="replace")
