"""Pool of processes that search and draw pages, with a limit on how many run at once."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Final

from trainwright.outside.plain_text import plain_line
from trainwright_operator.flow.actions import PageRequest, PlanningRequest
from trainwright_operator.flow.phases.planning import SEARCH_DEADLINE_SECONDS
from trainwright_operator.flow.snapshot import PlannerFacts, PlannerState
from trainwright_operator.kube.child_process import start_module
from trainwright_operator.search_process import MAX_WORDS, read_end

logger = logging.getLogger(__name__)
MODULES: Final = {
    PlanningRequest: "trainwright_operator.search_process",
    PageRequest: "trainwright_operator.page_process",
}
"""Module that answers each kind of request."""


class SearchPool:
    """At most one search for each plan, or its page, `concurrent` at a time; answers are stored until discarded.

    `on_change` is called with a plan's uid when its search or page starts to run and when it ends.
    """

    def __init__(self, concurrent: int = 1, on_change: Callable[[str], None] = lambda _: None) -> None:
        self._on_change = on_change
        self._facts: dict[str, PlannerFacts] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._concurrent = concurrent
        self._slots = asyncio.Semaphore(concurrent)

    def facts(self, uid: str) -> PlannerFacts:
        """Return the state of the plan's search or page."""
        facts = self._facts.get(uid, PlannerFacts())
        if facts.state is not PlannerState.RUNNING or facts.started_at is not None:
            return facts
        before = list(self._unanswered()).index(uid)
        return replace(facts, ahead=max(before + 1 - self._concurrent, 0))

    def running(self) -> int:
        """Return the number of running searches."""
        return sum(facts.started_at is not None for facts in self._searches())

    def waiting(self) -> int:
        """Return the number of waiting searches."""
        return sum(facts.started_at is None for facts in self._searches())

    def _searches(self) -> list[PlannerFacts]:
        return [facts for facts in self._unanswered().values() if not facts.is_page]

    def _unanswered(self) -> dict[str, PlannerFacts]:
        """Return unfinished searches by plan, oldest first; copied first, because metrics run in another thread."""
        return {uid: facts for uid, facts in dict(self._facts).items() if facts.state is PlannerState.RUNNING}

    def start(self, uid: str, request: PlanningRequest | PageRequest) -> None:
        """Start the plan's search or page, unless one with the same request is running or answered."""
        if self.facts(uid).key == request.key:
            return
        self.discard(uid)
        is_page = isinstance(request, PageRequest)
        self._facts[uid] = PlannerFacts(PlannerState.RUNNING, request.key, is_page=is_page)
        self._tasks[uid] = asyncio.create_task(self._run(uid, request))

    def discard(self, uid: str) -> None:
        """Cancel the plan's search or page and drop its answer."""
        self._facts.pop(uid, None)
        task = self._tasks.pop(uid, None)
        if task is not None:
            task.cancel()

    def discard_search(self, uid: str) -> None:
        """Cancel the plan's search and drop its answer; its page stays."""
        if not self.facts(uid).is_page:
            self.discard(uid)

    def refuse_page(self, uid: str, why: str) -> None:
        """Note why the plan's page could not be stored, and drop it."""
        self._facts[uid] = self.facts(uid).ended(PlannerState.FAILED, why)

    async def _run(self, uid: str, request: PlanningRequest | PageRequest) -> None:
        async with self._slots:
            started = replace(self._facts[uid], started_at=datetime.now(UTC))
            self._facts[uid] = started
            self._on_change(uid)
            state, text = await _run_in_time(request, self._concurrent)
        if self._facts.get(uid) is started:
            self._facts[uid] = started.ended(state, text)
            self._on_change(uid)


async def _run_in_time(request: PlanningRequest | PageRequest, concurrent: int) -> tuple[PlannerState, str]:
    """Return how the search ended, whatever ended it: nothing else would ever tell the plan, which waits for it."""
    try:
        async with asyncio.timeout(SEARCH_DEADLINE_SECONDS):
            return await _run_search(request, concurrent)
    except TimeoutError:
        return PlannerState.TIMED_OUT, ""
    except Exception as error:
        logger.exception("the search could not be run")
        return PlannerState.FAILED, plain_line(f"{type(error).__name__}: {error}")[:MAX_WORDS]


async def _run_search(request: PlanningRequest | PageRequest, concurrent: int) -> tuple[PlannerState, str]:
    """Return the state in which the search ended, with its answer or error message."""
    process = await start_module(MODULES[type(request)], str(concurrent))
    try:
        output, errors = await process.communicate(json.dumps(asdict(request)).encode())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    words = errors.decode(errors="replace")
    state, text = read_end(process.returncode, output.decode(), words)
    if state is PlannerState.FAILED:
        logger.error("%s exited with code %s:\n%s", MODULES[type(request)], process.returncode, words)
    return state, text
