"""Seeds from other searches: used as far as found, and not awaited after the budget ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from trainwright.cluster import Cluster
from trainwright.search import Candidate, NoFeasiblePlan, Problem, SearchControl, run
from trainwright.search.alpa.search import alpa_of_degrees
from trainwright.search.auto import search, seeds
from trainwright.search.galvatron.search import galvatron_bmw
from trainwright.search.plan_variants import VariantSearch, fastest_variant

BRIEF = SearchControl(effort=0.1)


def endless(problem: Problem, control: SearchControl, top: int | None) -> list[Candidate]:
    """Search for ever, finding nothing but reporting progress."""
    while True:
        control.report_progress(0, 1)


def hopeless(problem: Problem, control: SearchControl, top: int | None) -> list[Candidate]:
    raise NoFeasiblePlan("nothing fits")


def amp(problem: Problem, control: SearchControl, top: int | None) -> list[Candidate]:
    return run("amp", problem, top=top, control=control)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Use only these searches as seeds."""
    return lambda *searches: monkeypatch.setattr(
        seeds, "WARM_START_SEARCHES", tuple((search, 64) for search in searches)
    )


def over_after(calls: int) -> Callable[[], bool]:
    left = iter(range(calls))
    return lambda: next(left, None) is None


def test_seeds_are_the_best_two_of_each_search(
    asked: Callable[..., None], make_problem: Callable[..., Problem]
) -> None:
    problem = make_problem(layers=4, batch=8)
    asked(hopeless, amp)
    found = list(seeds.warm_start_candidates(problem, SearchControl(), lambda: False))
    assert found == run("amp", problem, top=2)


def test_galvatron_runs_on_each_accelerator_alone_too(
    asked: Callable[..., None], make_problem: Callable[..., Problem]
) -> None:
    problem = make_problem(layers=4, batch=8)
    asked(galvatron_bmw)
    found = list(seeds.warm_start_candidates(problem, SearchControl(), lambda: False))
    parts = [problem, *(problem.on_accelerator(name) for name in ("emulated-fast", "emulated-slow"))]
    assert found == [one for part in parts for one in galvatron_bmw(part, SearchControl(), 2)[:2]]


def test_seed_search_is_stopped_at_its_deadline(
    asked: Callable[..., None], make_problem: Callable[..., Problem]
) -> None:
    asked(amp, endless, amp)
    problem = make_problem(layers=4, batch=8)
    found = list(seeds.warm_start_candidates(problem, SearchControl(), over_after(10_000)))
    assert found == run("amp", problem, top=2)


def test_amp_returns_its_best_plan_at_the_deadline(make_problem: Callable[..., Problem]) -> None:
    problem = make_problem(layers=12, batch=32)
    told: list[float] = []
    whole = seeds.amp_candidates(problem, SearchControl(), lambda: False, told.append)
    short = seeds.amp_candidates(problem, SearchControl.with_budget(0.0), lambda: True, told.append)
    assert whole == run("amp", problem, top=2)
    assert min(told) == whole[0].estimate.iteration_seconds < max(told)
    assert whole[0].estimate.iteration_seconds <= short[0].estimate.iteration_seconds


def test_amp_without_a_plan_is_stopped_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch, make_problem: Callable[..., Problem]
) -> None:
    monkeypatch.setattr(seeds, "amp", endless)
    told: list[float] = []
    problem = make_problem(layers=4, batch=8)
    assert seeds.amp_candidates(problem, SearchControl.with_budget(0.0), lambda: True, told.append) == told == []


def test_late_seed_is_refined_when_it_is_better(
    monkeypatch: pytest.MonkeyPatch, make_cluster: Callable[..., Cluster], make_problem: Callable[..., Problem]
) -> None:
    problem = make_problem(make_cluster((("fast", 2), ("slow", 2))), layers=4, batch=8)
    (best,) = run("auto", problem, top=1, control=BRIEF)
    strange = run("random", problem, top=None)[-1]

    def offered(seconds: float) -> float:
        """Return the answer's seconds if a late candidate claims to take `seconds`."""
        told = replace(strange, estimate=replace(strange.estimate, iteration_seconds=seconds))
        monkeypatch.setattr(search, "late_candidates", lambda *_: [told])
        (found,) = run("auto", problem, top=1, control=BRIEF)
        return found.estimate.iteration_seconds

    seconds = best.estimate.iteration_seconds
    assert offered(seconds / 2) == seconds / 2
    assert offered(seconds * 2) == seconds


def test_alpa_runs_last_at_higher_effort_when_it_did_not_run_first(
    monkeypatch: pytest.MonkeyPatch, make_cluster: Callable[..., Cluster], make_problem: Callable[..., Problem]
) -> None:
    many = make_problem(make_cluster((("fast", 4), ("slow", 4), ("fast", 2))), layers=4, batch=8)
    few = make_problem(make_cluster((("fast", 4), ("slow", 2))), layers=4, batch=8)
    thorough = SearchControl(effort=1.5)
    found = seeds.late_candidates(many, thorough, lambda: False)
    assert found == VariantSearch(alpa_of_degrees, fastest_variant)(many, SearchControl(), None)[:2]
    assert seeds.late_candidates(many, SearchControl(), lambda: False) == []
    assert seeds.late_candidates(few, thorough, lambda: False) == []
    assert seeds.late_candidates(many, thorough, lambda: True) == []
