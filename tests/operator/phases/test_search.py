"""Limits of the search process in memory and time, also across operator restarts."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flow_harm import requests
from flow_world import World

from trainwright_operator import memory_limit
from trainwright_operator.flow.actions import PageRequest
from trainwright_operator.flow.phases.planning import MAX_SEARCH_STARTS
from trainwright_operator.flow.snapshot import PlannerFacts, PlannerState
from trainwright_operator.kube import child_process, search_pool
from trainwright_operator.search_process import EXIT_OUT_OF_MEMORY

MEBIBYTE = 1 << 20
HUNGRY = """
import io, sys
from pathlib import Path
from trainwright_operator import memory_limit, search_process
memory_limit.CONTAINER_LIMIT = Path(sys.argv[1])
search_process.PlanningRequest = lambda **_: None
search_process.search = lambda request, report: str(bytearray(int(sys.argv[2])))
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


def searching() -> World:
    world = World(search_hangs=True)
    world.run(until=lambda: world.planner.started_at is not None)
    world.step()
    return world


def test_search_of_a_restarted_operator_has_its_whole_time() -> None:
    world = searching()
    world.pass_time(40 * 60.0)
    world.restart()
    for _ in range(3):
        world.step(20.0)
    assert (world.condition("Planned").status, world.planner.state) == ("Unknown", PlannerState.RUNNING)
    world.planner = replace(world.planner, state=PlannerState.TIMED_OUT)
    world.step()
    assert world.condition("Planned").reason == "PlanningTimedOut"
    world.search_hangs, world.planner = (
        False,
        PlannerFacts(),
    )  # the operator discards the search of a plan that has ended
    world.change(search={"planner": "Amp", "limits": {"maxTensorDegree": 2}}, links={"deadlineSeconds": 301})
    world.run()
    assert world.succeeded == "True"


def test_plan_whose_search_ends_the_operator_each_time_fails() -> None:
    world = searching()
    restarts = 0
    while world.succeeded == "Unknown":
        world.restart()
        restarts += 1
        for _ in range(3):
            world.step(20.0)
    found = world.condition("Planned")
    assert (found.reason, restarts) == ("PlannerFailed", MAX_SEARCH_STARTS)
    assert f"the operator ended during each of {restarts} searches" in found.message


def pool_facts() -> PlannerFacts:
    """Return what a pool says of a search at its end."""

    async def story() -> PlannerFacts:
        changed = asyncio.Queue[str]()
        pool = search_pool.SearchPool(on_change=changed.put_nowait)
        pool.start("uid", next(requests(World())).request)
        for _ in ("starts", "ends"):
            await changed.get()
        return pool.facts("uid")

    return asyncio.run(story())


def test_search_that_cannot_be_started_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: str) -> asyncio.subprocess.Process:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(search_pool, "start_module", refuse)
    found = pool_facts()
    assert (found.state, found.message) == (PlannerState.FAILED, "RuntimeError: can't start new thread")


def test_search_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async def search_for_ever(*_: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            "import time; time.sleep(60)",  # deliberate: it is ended by the limit
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )

    monkeypatch.setattr(search_pool, "start_module", search_for_ever)
    monkeypatch.setattr(search_pool, "SEARCH_DEADLINE_SECONDS", 0.05)
    assert pool_facts().state is PlannerState.TIMED_OUT


def test_a_page_is_no_search_and_stays_when_that_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = asyncio.Event()

    async def draw(_request: Any, _concurrent: int) -> tuple[PlannerState, str]:
        await drawn.wait()
        return PlannerState.DONE, "<p>page</p>"

    async def scenario() -> None:
        changed = asyncio.Queue[str]()
        pool = search_pool.SearchPool(on_change=changed.put_nowait)
        question = next(requests(World())).request
        pool.start("uid", PageRequest("page-1", "demo", "default", question, "", "", ""))
        await asyncio.sleep(0)
        pool.discard_search("uid")
        assert (pool.facts("uid").state, pool.running(), pool.waiting()) == (PlannerState.RUNNING, 0, 0)
        drawn.set()
        await changed.get()
        await changed.get()
        assert pool.facts("uid").answer == "<p>page</p>"
        pool.refuse_page("uid", "no room")
        assert (pool.facts("uid").answer, pool.facts("uid").message) == ("", "no room")
        pool.start("uid", question)
        pool.discard_search("uid")
        assert pool.facts("uid").state is PlannerState.IDLE

    monkeypatch.setattr(search_pool, "_run_in_time", draw)
    asyncio.run(scenario())
