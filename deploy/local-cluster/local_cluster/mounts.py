"""Mounts below a cluster's folders."""

from __future__ import annotations

import re
from pathlib import Path

from local_cluster.commands import run

_OCTAL = re.compile(r"\\([0-7]{3})")


def mounts_below(folder: Path, table: str | None = None) -> list[Path]:
    """Return all mount points in a folder, innermost first; `table` is the text of /proc/self/mountinfo."""
    text = Path("/proc/self/mountinfo").read_text() if table is None else table
    points = [Path(_OCTAL.sub(lambda code: chr(int(code[1], 8)), line.split()[4])) for line in text.splitlines()]
    inside = [point for point in points if point.is_relative_to(folder)]
    return sorted(inside, key=lambda point: len(point.parts), reverse=True)


def unmount_below(folder: Path) -> None:
    """Unmount everything in a folder; mounts in use are detached lazily."""
    for point in mounts_below(folder):
        run(["umount", "--lazy", point], what=f"unmounting {point}")
