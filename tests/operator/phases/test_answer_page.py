"""Page of an answer: drawn once, named by the status, replaced with the answer, and never in the way of it."""

from __future__ import annotations

import random
from dataclasses import asdict
from datetime import timedelta

import pytest
from flow_world import World, spec_of

from trainwright.search import NoFeasiblePlan
from trainwright_operator.flow import actions as a
from trainwright_operator.flow.answer_page import MAX_PAGE_BYTES, PAGE_KEY
from trainwright_operator.page_process import cluster_commands, draw_page, read_request

MAX_BYTES = 200_000


def pages(world: World) -> dict[str, str]:
    return {name: stored.data[PAGE_KEY] for name, stored in world.stored.items() if stored.role == a.StoredRole.PAGE}


def settle(world: World) -> list[a.Action]:
    """Run passes until one does nothing, and return what they did."""
    done: list[a.Action] = []
    for _ in range(20):
        step = world.step()
        if not step:
            return done
        done += step
    raise AssertionError("the plan with its answer comes to no rest")


def refuse(request: a.PageRequest) -> str:
    raise ValueError("no ink")


def nothing_fits(request: a.PlanningRequest) -> str:
    raise NoFeasiblePlan("nothing fits")


def test_page_is_stored_compressed_under_the_name_that_the_status_says_and_drawn_once() -> None:
    drawn: list[a.PageRequest] = []
    world = World(draw=lambda request: drawn.append(request) or "<p>page</p>")
    world.run()
    settle(world)
    assert world.status.report is not None
    assert pages(world) == {world.status.report.config_map: "<p>page</p>"}
    assert len(drawn) == 1
    world.restart()
    assert settle(world) == []
    assert len(drawn) == 1


@pytest.mark.timeout(180)
def test_page_has_trials_against_predictions_how_the_best_was_found_and_the_gain() -> None:
    pages_drawn: list[str] = []

    def draw(request: a.PageRequest) -> str:
        request = read_request(asdict(request))
        pages_drawn.append(draw_page(request, cluster_commands(request)))
        return pages_drawn[-1]

    search = {"planner": "Auto", "effort": 0.1, "limits": {"maxTensorDegree": 2}}
    world = World(spec=spec_of(trials={"topK": 2, "timeline": True}, search=search), draw=draw)
    world.run()
    settle(world)
    (page,) = pages_drawn
    succeeded = world.condition("Succeeded").message
    assert succeeded in page
    for heading in ("How the best was found", "Memory", "Candidates", "Why is it faster?", "Links between nodes"):
        assert f"<h2>{heading}</h2>" in page
    for trial in world.status.trials:
        assert f">{trial.name}</th>" in page
    assert "device times emulated" in page
    assert f"kubectl --namespace default get configmap {world.status.cluster_ref.config_map} " in page
    assert len(page.encode()) < MAX_BYTES


def test_plan_without_trials_has_a_page_that_says_it_is_predicted() -> None:
    world = World(spec=spec_of(trials={"topK": 0}), draw=lambda request: draw_page(request, ()))
    world.run()
    settle(world)
    (page,) = pages(world).values()
    assert "predicted, on " in page
    assert "How the best was found" not in page


def test_what_cannot_be_drawn_is_said_and_the_answer_stays() -> None:
    world = World(draw=refuse)
    world.run()
    settle(world)
    assert world.succeeded == "True"
    assert world.status.report is not None
    assert (world.status.report.config_map, world.status.report.problem) == (None, "no ink")
    world.draw = lambda request: "<p>page</p>"
    world.restart()
    settle(world)
    assert world.status.report.problem is None
    assert pages(world)


def test_a_page_that_is_too_large_is_not_stored() -> None:
    noise = random.Random(1).randbytes(MAX_PAGE_BYTES).hex() * 2
    world = World(draw=lambda request: noise)
    world.run()
    settle(world)
    assert not pages(world)
    assert world.status.report is not None
    assert f"at most {MAX_PAGE_BYTES} are stored" in str(world.status.report.problem)


def test_an_answer_of_long_ago_gets_no_page() -> None:
    world = World()
    world.run()
    settle(world)
    world.draw, world.now = refuse, world.now + timedelta(hours=2)
    assert settle(world) == []
    assert world.status.report is None


def test_an_edit_brings_another_page_in_the_place_of_the_first() -> None:
    world = World(draw=lambda request: request.status)
    world.run()
    settle(world)
    (first,) = pages(world)
    world.change(trials={"topK": 1})
    world.run()
    settle(world)
    (second,) = pages(world)
    assert second != first
    assert world.status.report is not None
    assert world.status.report.config_map == second


def test_a_plan_that_fails_has_no_page() -> None:
    world = World(search=nothing_fits, draw=refuse)
    world.run()
    settle(world)
    assert world.succeeded == "False"
    assert world.status.report is None


@pytest.mark.parametrize("name", ["<script>alert(1)</script>"])
def test_messages_are_escaped(name: str) -> None:
    world = World(draw=lambda request: draw_page(request, (name,)))
    world.run()
    settle(world)
    (page,) = pages(world).values()
    assert name not in page
    assert "&lt;script&gt;alert(1)" in page
