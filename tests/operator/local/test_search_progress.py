"""Search of `tune`: how far it is while it runs, and its failure without the lines about that."""

from __future__ import annotations

import time

import pytest
from flow_harm import requests
from flow_world import World, spec_of

from trainwright.worker_api import PROGRESS_MARKER
from trainwright_operator.flow.snapshot import PlannerState
from trainwright_operator.local.search import SearchProcess
from trainwright_operator.search_process import read_end


@pytest.mark.timeout(120)
def test_running_search_tells_how_far_it_is() -> None:
    request = next(requests(World(spec=spec_of(search={"planner": "Auto"})))).request
    search, steps = SearchProcess(), set()
    search.start(request)
    while search.state is PlannerState.RUNNING:
        steps.add(search.facts.progress)
        time.sleep(0.02)
    assert search.state is PlannerState.DONE, search.facts.message
    assert search.facts.progress is None
    steps.discard(None)
    assert steps
    assert all(0 <= step.done <= step.total and step.what == "steps of the search" for step in steps)


def test_failure_is_the_last_line_that_is_no_progress() -> None:
    errors = f"ValueError: of this\n{PROGRESS_MARKER} {{}}\n\n"
    assert read_end(1, "", errors) == (PlannerState.FAILED, "exit code 1: ValueError: of this")
    assert read_end(1, "", f"{PROGRESS_MARKER} {{}}\n") == (PlannerState.FAILED, "exit code 1:")
