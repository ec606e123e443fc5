"""The ILP: HiGHS and elimination against enumeration of all assignments; memory prices against a memory limit."""

from __future__ import annotations

import alpa_intra_oracle as oracle
import numpy as np
import pytest

from trainwright.cost.operators.integer_program import IntegerProgram, WeightedObjective
from trainwright.search.alpa.intra.elimination import eliminate
from trainwright.search.alpa.intra.ilp import solve_ilp

INSTANCES = 240
GOALS = (
    WeightedObjective(3),
    WeightedObjective(2, in_flight=3, memory_price=0.5),
    WeightedObjective(1, in_flight=2, memory_price=4.0),
)


def assignment_of(solution, goal, cell=()):
    algorithms = [int(found[(goal, *cell)]) for found in solution.algorithms]
    return tuple((int(held[goal, one]), one) for held, one in zip(solution.weight_modes, algorithms, strict=True))


@pytest.mark.parametrize("start", range(0, INSTANCES, 60))
def test_elimination_equals_brute_force(start):
    for seed in range(start, start + 60):
        programme = oracle.drawn(seed)
        found = eliminate(programme, GOALS, ())
        for number, goal in enumerate(GOALS):
            best = oracle.brute_force(programme, goal)
            assert found.objective[number] == pytest.approx(best)
            if np.isfinite(best):
                assert programme.assignment_cost(assignment_of(found, number)).objective(goal) == pytest.approx(best)


@pytest.mark.parametrize("start", range(0, INSTANCES, 60))
def test_elimination_returns_costs_per_choice_of_kept_nodes(start):
    for seed in range(start, start + 60, 4):
        programme = oracle.drawn(seed, max_nodes=4)
        kept = tuple(range(len(programme.nodes)))[-2:]
        found = eliminate(programme, GOALS[:2], kept)
        assert found.objective.shape == (2, *(programme.nodes[node].seconds.shape[1] for node in kept))
        for cell in np.ndindex(found.objective.shape[1:]):
            best = oracle.brute_force(fixed(programme, dict(zip(kept, cell, strict=True))), GOALS[1])
            assert found.objective[(1, *cell)] == pytest.approx(best)
            if np.isfinite(best):
                assert programme.assignment_cost(assignment_of(found, 1, cell)).objective(GOALS[1]) == pytest.approx(
                    best
                )


def fixed(programme: IntegerProgram, chosen: dict[int, int]) -> IntegerProgram:
    """Return the ILP with one algorithm only for the given nodes: `chosen[node]`."""
    nodes = list(programme.nodes)
    for node, algorithm in chosen.items():
        seconds = np.full_like(nodes[node].seconds, np.inf)
        seconds[:, algorithm] = nodes[node].seconds[:, algorithm]
        nodes[node] = type(nodes[node])(
            seconds, nodes[node].iteration_seconds, nodes[node].state_bytes, nodes[node].activation_bytes
        )
    return IntegerProgram(tuple(nodes), programme.edges)


@pytest.mark.parametrize("start", range(0, INSTANCES, 60))
def test_the_solver_equals_brute_force_with_and_without_a_memory_limit(start):
    for seed in range(start, start + 60):
        programme, goal = oracle.drawn(seed), GOALS[seed % 3]
        for memory_bytes in (np.inf, 20.0 + seed % 60):
            best = oracle.brute_force(programme, goal, memory_bytes)
            found = solve_ilp(programme, goal, memory_bytes=memory_bytes)
            if not np.isfinite(best):
                assert found is None
                continue
            assert found is not None
            assert found.totals.objective(goal) == pytest.approx(best)
            assert found.totals.state_bytes + goal.in_flight * found.totals.activation_bytes <= memory_bytes * (
                1 + 1e-9
            )


def test_memory_price_finds_the_fastest_choice_of_its_memory():
    """Lagrange multipliers reach some Pareto points of time and memory, each exactly."""
    reached = 0
    for seed in range(90):
        programme = oracle.drawn(seed, max_nodes=4)
        for price in (0.1, 1.0, 10.0):
            goal = WeightedObjective(2, in_flight=2, memory_price=price)
            found = eliminate(programme, [goal], ())
            if not np.isfinite(found.objective[0]):
                continue
            totals = programme.assignment_cost(assignment_of(found, 0))
            held = totals.state_bytes + 2 * totals.activation_bytes
            time = 2 * totals.seconds + totals.iteration_seconds
            assert oracle.brute_force(programme, WeightedObjective(2, 2), held) == pytest.approx(time)
            reached += 1
    assert reached > 150


def test_memory_price_bounds_the_optimum_under_any_limit():
    """Weak duality: the priced objective minus price × limit is at most the optimum within the limit."""
    compared = 0
    for seed in range(90):
        programme = oracle.drawn(seed, max_nodes=4)
        for limit in (20.0, 40.0, 60.0):
            best = solve_ilp(programme, WeightedObjective(2, 2), memory_bytes=limit)
            if best is None:
                continue
            goals = [WeightedObjective(2, 2, price) for price in (0.0, 0.3, 1.0, 3.0)]
            bounds = eliminate(programme, goals, ()).objective - np.array([goal.memory_price for goal in goals]) * limit
            assert bounds.max() <= best.totals.objective(WeightedObjective(2, 2)) + 1e-6
            compared += 1
    assert compared > 75
