"""Memory limit of the operator's child processes, as shares of the container's."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Final

CONTAINER_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")


def allowed_bytes(share: float) -> int | None:
    """Return bytes of that share of the container's memory, or None without a limit."""
    try:
        text = CONTAINER_LIMIT.read_text().strip()
    except OSError:
        return None  # no control groups of version 2: there the kernel ends the process that takes most, alone
    return int(int(text) * share) if text.isdecimal() else None


def limit_memory(allowed: int) -> None:
    """Limit this process to `allowed` bytes more than its present address space.

    With cgroup v2, running out of memory kills the whole container, and the restarted operator would start the process
    again forever. With the limit only the process ends.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + allowed
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
