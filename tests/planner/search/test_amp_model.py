"""AMP's own cost model (Eq. 3-5), written out for small plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from trainwright.cluster import Cluster
from trainwright.plan import LayerRun, Plan, Stage
from trainwright.search import Problem
from trainwright.search.uniform import amp_model
from trainwright.strategy import Strategy

MakeCluster = Callable[..., Cluster]
MakePlan = Callable[..., Plan]
MakeProblem = Callable[..., Problem]


@pytest.fixture(scope="module")
def problem(make_problem: MakeProblem) -> Problem:
    return make_problem()


@examples(30)
@given(data=st.sampled_from([1, 2]), rows=st.sampled_from([1, 2, 4]))
def test_amp_cost_equals_equation_4(problem: Problem, make_plan: MakePlan, data: int, rows: int) -> None:
    plan = make_plan(problem, [7, 7], data=data, rows=rows)
    kinds = [problem.model.kind_of(layer) for layer in range(14)]
    spent = [problem.profiles.cost("emulated-fast", kind.name, 1, rows) for kind in kinds]
    stage = [sum(c.forward_seconds + c.backward_seconds for c in spent[a : a + 7]) for a in (0, 7)]
    link = problem.cluster.link("node-1", "node-1" if data == 1 else "node-2").bandwidth_bytes_per_second
    exchange = 2 * rows * 64 * 128 * 4 / link
    held = [sum(kind.parameters for kind in kinds[a : a + 7]) for a in (0, 7)]
    within = problem.cluster.link("node-1", "node-1").bandwidth_bytes_per_second
    sync = max(held) * 4 * 2 * (data - 1) / data / within
    m = 16 // (data * rows)
    expected = (m - 1) * max(stage) + exchange + sum(stage) + sync
    assert amp_model.estimate_seconds(plan, problem.cost_context) == pytest.approx(expected)


def test_amp_pipelines_are_costed_separately(
    make_problem: MakeProblem, make_cluster: MakeCluster, make_plan: MakePlan
) -> None:
    """Eq. 4 takes the slowest of whole pipelines: here each has one slow stage, and none has two."""
    problem = make_problem(make_cluster((("fast", 2), ("slow", 2)), latency=0.0))
    fast, slow = problem.cluster.devices[:2], problem.cluster.devices[2:]
    crossed, straight = (
        make_plan(problem, [7, 7], data=2, devices=devices)
        for devices in ((fast[0], slow[0], slow[1], fast[1]), (fast[0], slow[0], fast[1], slow[1]))
    )

    def seconds(name: str, first: int, end: int, rows: int = 1) -> float:
        kinds = (problem.model.kind_of(layer) for layer in range(first, end))
        costs = [problem.profiles.cost(name, kind.name, 1, rows) for kind in kinds]
        return sum(c.forward_seconds + c.backward_seconds for c in costs)

    def eq5(times: tuple[float, float], link: float, rows: int = 1) -> float:
        return 7 * max(times) + sum(times) + 2 * rows * 64 * 128 * 4 / link

    table = {name: (seconds(name, 0, 7), seconds(name, 7, 14)) for name in ("emulated-fast", "emulated-slow")}
    quick, late = table["emulated-fast"], table["emulated-slow"]
    held = max(sum(problem.model.kind_of(i).parameters for i in range(a, a + 7)) for a in (0, 7))
    sync = held * 4 / 5e6
    assert amp_model.estimate_seconds(straight, problem.cost_context) == pytest.approx(eq5(late, 1e9) + sync)
    each = eq5((quick[0], late[1]), 5e6), eq5((late[0], quick[1]), 5e6)
    assert amp_model.estimate_seconds(crossed, problem.cost_context) == pytest.approx(max(each) + sync)
    # With a slow enough link the pipeline of fast devices is the slower one, and only it counts.
    apart = make_problem(make_cluster((("fast", 1), ("fast", 1), ("slow", 2)), between=1e3, latency=0.0))
    one, two, *others = apart.cluster.devices
    far = make_plan(apart, [7, 7], data=2, devices=(one, others[0], two, others[1]))
    assert eq5(quick, 1e3) > eq5(late, 1e9)
    assert amp_model.estimate_seconds(far, apart.cost_context) == pytest.approx(eq5(quick, 1e3) + held * 4 / 1e3)
    # The last stage serves both replicas of the first at once, but messages are sent per pipeline.
    merged = Stage(fast[1:], (LayerRun(7, 7, Strategy(1, 1), (2,)),))
    plan = replace(
        crossed, pipelines=(replace(crossed.pipelines[0], stages=(straight.pipelines[0].stages[0], merged)),)
    )
    below = seconds("emulated-fast", 7, 14, 2)
    each = eq5((quick[0], below), 1e9), eq5((late[0], below), 5e6)
    held = sum(problem.model.kind_of(i).parameters for i in range(7))
    assert amp_model.estimate_seconds(plan, problem.cost_context) == pytest.approx(max(each) + held * 4 / 5e6)
