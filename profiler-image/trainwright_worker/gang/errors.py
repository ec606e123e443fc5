"""Classification of failures, OOM kills included, into one reason and one sentence each; without torch."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

from trainwright.worker_api import FailureReason

REPORTED_EXIT_CODE = 3
"""Exit code of a process that has reported its failure; any other nonzero code means that it could not."""

CONSEQUENTIAL_REASONS = (FailureReason.PEER_LOST, FailureReason.TERMINATED)
"""Reasons that are consequences: another failure caused them."""

_PEER_LOST_PATTERNS = (
    "connection closed by peer",
    "connection reset",
    "broken pipe",
    "failed to recv, got 0 bytes",
    "remote process exited",
    "remote worker crashing",
    "socket closed",
    "connection was likely closed",
)
_HANG_PATTERNS = ("timed out", "timeout", "watchdog caught collective operation")
_OUT_OF_MEMORY_PATTERNS = ("out of memory", "can't allocate memory", "cannot allocate memory", "status_alloc_failed")
_LOCKED_MEMORY_PATTERN = "ibv_reg_mr"
"""Call of NCCL that registers memory with InfiniBand, and fails like an allocation where a process may lock too little."""

_GLOO_NOISE = re.compile(r"\[/[^\]]*:\d+\] |This is typically caused.*")
"""Source location within gloo, and generic advice."""

_AMOUNT = r"(\d+(?:\.\d+)? (?:bytes|[KMGTP]iB))"
_REQUESTED = re.compile(rf"tried to allocate {_AMOUNT}", re.IGNORECASE)
_CAPACITY = re.compile(rf"total capacity of {_AMOUNT}", re.IGNORECASE)
_FREE = re.compile(rf"of which {_AMOUNT} is free", re.IGNORECASE)


class WorkerError(Exception):
    """Refusal or failure with its reason; the message is one sentence."""

    def __init__(self, reason: FailureReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


def one_line(text: str, *, limit: int = 600) -> str:
    """Return the text with white space collapsed, at most `limit` characters long."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def format_bytes(size_bytes: float) -> str:
    """Format bytes in the largest unit that gives at least 1: `1.50 GiB`."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if size_bytes < 1024 or unit == "TiB":
            break
        size_bytes /= 1024
    return f"{size_bytes:.0f} bytes" if unit == "bytes" else f"{size_bytes:.2f} {unit}"


def classify_error(error: BaseException) -> WorkerError:
    """Classify an exception by its type, and the collectives' plain RuntimeErrors by their message.

    Gloo and the store raise RuntimeErrors whose message alone distinguishes a dead peer from a silent one.
    """
    if isinstance(error, WorkerError):
        return error
    message = one_line(str(error))
    sentence = f"{type(error).__name__}: {message}" if message else type(error).__name__
    lowered = sentence.lower()
    if _LOCKED_MEMORY_PATTERN in lowered:
        mend = "this node lets processes lock too little memory for InfiniBand; set LimitMEMLOCK=infinity for its containers"
        return WorkerError(FailureReason.PLACEMENT_NOT_MET, f"{mend} ({one_line(sentence, limit=300)})")
    if isinstance(error, MemoryError) or any(pattern in lowered for pattern in _OUT_OF_MEMORY_PATTERNS):
        return WorkerError(FailureReason.OUT_OF_MEMORY, _out_of_memory_message(sentence))
    if isinstance(error, RuntimeError | OSError | EOFError):
        if any(pattern in lowered for pattern in _PEER_LOST_PATTERNS):
            return WorkerError(FailureReason.PEER_LOST, _GLOO_NOISE.sub("", sentence).strip())
        if any(pattern in lowered for pattern in _HANG_PATTERNS):
            return WorkerError(FailureReason.HANG, _GLOO_NOISE.sub("", sentence).strip())
    return WorkerError(FailureReason.CRASHED, sentence)


def _out_of_memory_message(sentence: str) -> str:
    """Return requested and available memory as far as the allocator's message states them, then that message.

    Host allocators do not state what is available, so the host is queried.
    """
    requested, capacity, free = (pattern.search(sentence) for pattern in (_REQUESTED, _CAPACITY, _FREE))
    demand = f"asked for {_format_allocator_bytes(requested[1])}" if requested else "asked for more than is free"
    if capacity:
        supply = f"the device has {capacity[1]}" + (f", {free[1]} of it free" if free else "")
    else:
        page = os.sysconf("SC_PAGE_SIZE")
        total, available = (page * os.sysconf(name) for name in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES"))
        supply = f"the host has {format_bytes(total)}, {format_bytes(available)} of it free"
    return f"{demand}, {supply} ({one_line(sentence, limit=200)})"


def _format_allocator_bytes(quantity: str) -> str:
    """Return the quantity, converted to a larger unit if it is in bytes."""
    number, unit = quantity.split()
    return format_bytes(float(number)) if unit == "bytes" else quantity


def classify_exit_code(exit_code: int | None, *, process_name: str, out_of_memory: bool = False) -> WorkerError | None:
    """Classify the exit of a process that reported nothing; None if it succeeded or has reported its failure.

    `out_of_memory`: the kernel has OOM-killed processes of this control group meanwhile.
    """
    if exit_code in (0, None, REPORTED_EXIT_CODE):
        return None
    if exit_code == 1:
        return WorkerError(FailureReason.HANG, f"{process_name} blocked its own watchdog; its stacks are in the log")
    if exit_code > 0:
        return WorkerError(
            FailureReason.CRASHED, f"{process_name} ended with exit code {exit_code} and reported nothing"
        )
    name = signal.Signals(-exit_code).name
    if name == "SIGTERM":
        return WorkerError(FailureReason.TERMINATED, f"{process_name} was ended by {name}")
    hint = ""
    if name == "SIGKILL":
        hint = ", as the kernel does when memory runs out" + (" and has done meanwhile" if out_of_memory else "")
    reason = FailureReason.OUT_OF_MEMORY if name == "SIGKILL" and out_of_memory else FailureReason.CRASHED
    return WorkerError(reason, f"{process_name} was ended by {name}{hint}")


_EVENTS = Path("/sys/fs/cgroup/memory.events")


def out_of_memory_kills(events: Path = _EVENTS) -> int:
    """Return the number of OOM kills in this control group (version 2); 0 if it is not counted."""
    try:
        lines = events.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    counts = dict(line.split(maxsplit=1) for line in lines)
    return int(counts.get("oom_kill", "0"))
