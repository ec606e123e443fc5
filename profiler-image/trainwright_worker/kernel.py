"""What the kernel did to processes here."""

from __future__ import annotations

from pathlib import Path

_EVENTS = Path("/sys/fs/cgroup/memory.events")


def out_of_memory_kills(events: Path = _EVENTS) -> int:
    """How many processes of this control group (version 2) were killed for lack of memory; 0 where nobody counts."""
    try:
        lines = events.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    counts = dict(line.split(maxsplit=1) for line in lines)
    return int(counts.get("oom_kill", "0"))
