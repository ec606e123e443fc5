"""Limits of the search process in memory and time, also across operator restarts."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from flow_world import World

from trainwright_operator import memory_limit
from trainwright_operator.kube import child_process
from trainwright_operator.search_process import EXIT_OUT_OF_MEMORY

MEBIBYTE = 1 << 20
HUNGRY = """
import io, sys
from pathlib import Path
from trainwright_operator import memory_limit, search_process
memory_limit.CONTAINER_LIMIT = Path(sys.argv[1])
search_process.PlanningRequest = lambda **_: None
search_process.search = lambda request: str(bytearray(int(sys.argv[2])))
sys.stdin = io.StringIO("{}")
sys.exit(search_process.main(concurrent=1))
"""


def search(limit: Path, taken: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", HUNGRY, str(limit), str(taken)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_search_exits_with_a_message_when_it_exceeds_its_memory_limit(tmp_path: Path) -> None:
    limit = tmp_path / "memory.max"
    limit.write_text(f"{500 * MEBIBYTE}\n")
    ended = search(limit, 400 * MEBIBYTE)
    assert ended.returncode == EXIT_OUT_OF_MEMORY
    assert "more than its limit of 300 MiB" in ended.stderr.strip().rsplit("\n", 1)[-1]
    assert "resources.limits.memory" in ended.stderr
    assert search(limit, MEBIBYTE).returncode == 0


@pytest.mark.parametrize(("text", "allowed"), [("max\n", None), ("1000\n", 200)])
def test_processes_share_the_memory_of_their_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, allowed: int | None
) -> None:
    limit = tmp_path / "memory.max"
    limit.write_text(text)
    monkeypatch.setattr(memory_limit, "CONTAINER_LIMIT", limit)
    assert memory_limit.allowed_bytes(0.2) == allowed
    limit.unlink()
    assert memory_limit.allowed_bytes(0.2) is None


def test_search_starts_once_the_system_has_room_for_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def start(*_: str, **__: Any) -> str:
        if len(pauses) < 7:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return "process"

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    monkeypatch.setattr(asyncio, "sleep", pause)
    assert asyncio.run(child_process.start_module("module")) == "process"
    assert pauses == [1, 2, 4, 8, 16, 30, 30]


def test_the_planning_deadline_survives_restarts_of_the_operator() -> None:
    world = World(search_hangs=True)
    world.run(until=lambda: world.planner.started_at is not None)
    started = world.now
    for _ in range(40):
        world.restart()
        for _ in range(3):
            world.step(20.0)
        if world.succeeded != "Unknown":
            break
    assert world.condition("Planned").reason == "PlanningTimedOut"
    assert 1800 < (world.now - started).total_seconds() < 1900
    world.search_hangs = False
    world.change(search={"planner": "Amp", "limits": {"maxTensorDegree": 2}}, links={"deadlineSeconds": 301})
    world.run()
    assert world.succeeded == "True"
