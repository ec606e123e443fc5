"""CLI commands with a quick planner instead of the default one."""

from __future__ import annotations

SEARCHING = ("plan", "explain", "propose")


def quickly(command: str) -> tuple[str, ...]:
    """Return the command with the fastest planner; a later `--planner` overrides it."""
    return (command, "--planner", "amp") if command in SEARCHING else (command,)
