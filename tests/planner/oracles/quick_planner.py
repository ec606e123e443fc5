"""CLI commands with a quick planner instead of the default one."""

from __future__ import annotations

SEARCHING = ("plan", "explain", "propose")


def quickly(command: str) -> tuple[str, ...]:
    """The command with options that others may follow, a `--planner` that takes this one's place among them."""
    return (command, "--planner", "amp") if command in SEARCHING else (command,)
