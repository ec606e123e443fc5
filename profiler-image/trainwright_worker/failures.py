"""Why a worker gives up: one reason and one sentence for whatever went wrong. No torch."""

from __future__ import annotations

import os
import re
import signal

from trainwright.orders import FailureReason

TOLD_EXIT_CODE = 3
"""Of a process that has said its last words; any other, but 0, means that it could not."""

CONSEQUENCES = (FailureReason.PEER_LOST, FailureReason.TERMINATED)
"""Reasons that something else is behind."""

_PEER_LOST = (
    "connection closed by peer",
    "connection reset",
    "broken pipe",
    "failed to recv, got 0 bytes",
    "remote process exited",
    "remote worker crashing",
    "socket closed",
    "connection was likely closed",
)
_HANG = ("timed out", "timeout", "watchdog caught collective operation")
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory")

_GLOO_ASIDES = re.compile(r"\[/[^\]]*:\d+\] |This is typically caused.*")
"""Where in gloo's source it was noticed, and advice that holds for any program."""

_AMOUNT = r"(\d+(?:\.\d+)? (?:bytes|[KMGTP]iB))"
_ASKED = re.compile(rf"tried to allocate {_AMOUNT}", re.IGNORECASE)
_CAPACITY = re.compile(rf"total capacity of {_AMOUNT}", re.IGNORECASE)
_FREE = re.compile(rf"of which {_AMOUNT} is free", re.IGNORECASE)


class WorkerError(Exception):
    """A refusal or a failure with its reason; the message is one sentence."""

    def __init__(self, reason: FailureReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


def one_line(text: str, *, limit: int = 600) -> str:
    """The text with its white space joined, at most `limit` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def amount(size_bytes: float) -> str:
    """Bytes for people, in the largest unit of which there is one at least: `1.50 GiB`."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if size_bytes < 1024 or unit == "TiB":
            break
        size_bytes /= 1024
    return f"{size_bytes:.0f} bytes" if unit == "bytes" else f"{size_bytes:.2f} {unit}"


def classify(error: BaseException) -> WorkerError:
    """The reason for an exception, told by its type and, for the collectives' plain RuntimeErrors, by its words.

    Gloo and the store raise RuntimeErrors whose words are all that tells a dead peer from a silent one.
    """
    if isinstance(error, WorkerError):
        return error
    words = one_line(str(error))
    sentence = f"{type(error).__name__}: {words}" if words else type(error).__name__
    lowered = sentence.lower()
    if isinstance(error, MemoryError) or any(mark in lowered for mark in _OUT_OF_MEMORY):
        return WorkerError(FailureReason.OUT_OF_MEMORY, _out_of_memory(sentence))
    if isinstance(error, RuntimeError | OSError | EOFError):
        if any(mark in lowered for mark in _PEER_LOST):
            return WorkerError(FailureReason.PEER_LOST, _GLOO_ASIDES.sub("", sentence).strip())
        if any(mark in lowered for mark in _HANG):
            return WorkerError(FailureReason.HANG, _GLOO_ASIDES.sub("", sentence).strip())
    return WorkerError(FailureReason.CRASHED, sentence)


def _out_of_memory(sentence: str) -> str:
    """What was asked for and what there is, as far as the allocator's words tell; those words behind it.

    An allocator of the host's memory does not say what there is, so the host is asked.
    """
    asked, capacity, free = (pattern.search(sentence) for pattern in (_ASKED, _CAPACITY, _FREE))
    wish = f"asked for {_readable(asked[1])}" if asked else "asked for more than there is"
    if capacity:
        there = f"the device has {capacity[1]}" + (f", {free[1]} of it free" if free else "")
    else:
        page = os.sysconf("SC_PAGE_SIZE")
        total, left = (page * os.sysconf(name) for name in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES"))
        there = f"the host has {amount(total)}, {amount(left)} of it free"
    return f"{wish}, {there} ({one_line(sentence, limit=200)})"


def _readable(told: str) -> str:
    """An amount as it was told, but for one in bytes."""
    number, unit = told.split()
    return amount(float(number)) if unit == "bytes" else told


def unspoken(exit_code: int | None, *, what: str, out_of_memory: bool = False) -> WorkerError | None:
    """What to say for a process that ended without last words; None where it ended well or has spoken itself.

    `what` names the process; `out_of_memory` says that the kernel killed processes here for lack of memory meanwhile.
    """
    if exit_code in (0, None, TOLD_EXIT_CODE):
        return None
    if exit_code == 1:
        return WorkerError(
            FailureReason.HANG, f"{what} did not let its own watchdog speak any more; its stacks are in the log"
        )
    if exit_code > 0:
        return WorkerError(FailureReason.CRASHED, f"{what} ended with exit code {exit_code}, without a word")
    name = signal.Signals(-exit_code).name
    if name == "SIGTERM":
        return WorkerError(FailureReason.TERMINATED, f"{what} was ended by {name}")
    hint = ""
    if name == "SIGKILL":
        hint = ", as the kernel does when memory runs out" + (" and has done meanwhile" if out_of_memory else "")
    reason = FailureReason.OUT_OF_MEMORY if name == "SIGKILL" and out_of_memory else FailureReason.CRASHED
    return WorkerError(reason, f"{what} was ended by {name}{hint}")
