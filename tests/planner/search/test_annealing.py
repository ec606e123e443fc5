"""AMP's Algorithm 2: domino tilings, and the walk over strategies."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from trainwright.cluster import Cluster
from trainwright.plan import divisors
from trainwright.search import Problem, SearchControl, annealing
from trainwright.search.annealing import domino_placement, tiling
from trainwright.search.candidates import LazyCandidate
from trainwright.search.degrees import Degrees
from trainwright.search.uniform.placed_stages import megatron_placement

MakeCluster = Callable[..., Cluster]
MakeProblem = Callable[..., Problem]

widths = st.lists(st.integers(1, 5), min_size=1, max_size=6)
seeds = st.integers(0, 2**32)


def cells(widths: Sequence[int]) -> list[tuple[int, int]]:
    return [(row, column) for row, width in enumerate(widths) for column in range(width)]


@given(widths=widths, seed=seeds, pick=st.integers(0, 100))
def test_dominoes_cover_every_device_once(widths: list[int], seed: int, pick: int) -> None:
    sizes = divisors(sum(widths))
    size = sizes[pick % len(sizes)]
    found = tiling(widths, size, np.random.default_rng(seed))
    if found is None:
        assert size > 1  # single devices always tile
        return
    covered = [
        (row + i, column + j) for row, column, height, width in found for i in range(height) for j in range(width)
    ]
    assert sorted(covered) == cells(widths)
    assert all(height * width == size for _, _, height, width in found)
    assert [domino[:2] for domino in found] == sorted(domino[:2] for domino in found)


@given(nodes=st.integers(1, 6), slots=st.integers(1, 6), seed=seeds)
def test_equal_nodes_can_always_be_tiled_by_whole_nodes_or_slots(nodes: int, slots: int, seed: int) -> None:
    for size in (1, slots, nodes * slots):
        assert tiling([slots] * nodes, size, np.random.default_rng(seed)) is not None


def test_tilings_use_horizontal_and_vertical_dominoes() -> None:
    found = {tuple(tiling([2, 2], 2, np.random.default_rng(seed)) or ()) for seed in range(20)}
    assert found == {((0, 0, 1, 2), (1, 0, 1, 2)), ((0, 0, 2, 1), (0, 1, 2, 1))}


@pytest.mark.parametrize(("widths", "size"), [([1, 3], 4), ([3, 1], 2), ([2, 1, 3], 3)])
def test_tiling_is_none_when_impossible(widths: list[int], size: int) -> None:
    # Rows of three and one cells hold one horizontal domino, and the remaining cells form no rectangle.
    found = {str(tiling(widths, size, np.random.default_rng(seed))) for seed in range(10)}
    if (widths, size) == ([3, 1], 2):
        assert found == {"[(0, 0, 2, 1), (0, 1, 1, 2)]"}
    else:
        assert found == {"None"}


@given(widths=widths, seed=seeds, pick=st.integers(0, 1000))
def test_placement_uses_every_device_once_and_depends_only_on_the_seed(widths: list[int], seed: int, pick: int) -> None:
    count = sum(widths)
    nodes = np.repeat(np.arange(len(widths)), widths)
    every = [Degrees(p, d, count // p // d) for p in divisors(count) for d in divisors(count // p)]
    degrees = every[pick % len(every)]
    placement, again = (domino_placement(nodes, degrees, np.random.default_rng(seed)) for _ in range(2))
    assert placement.shape == (degrees.pipeline, degrees.data, degrees.tensor)
    assert sorted(placement.reshape(-1).tolist()) == list(range(count))
    assert np.array_equal(placement, again)


def test_placement_is_megatrons_when_no_tiling_is_found() -> None:
    degrees = Degrees(1, 2, 2)
    placement = domino_placement(np.array([0, 1, 1, 1]), degrees, np.random.default_rng(0))
    assert np.array_equal(placement, megatron_placement(degrees))


def test_tensor_groups_stay_inside_a_node_under_horizontal_dominoes(mixed: Problem) -> None:
    """Every stage is a rectangle of the mesh: no more nodes than its height."""
    nodes = np.repeat(np.arange(4), 4)
    for seed in range(20):
        placement = domino_placement(nodes, Degrees(4, 2, 2), np.random.default_rng(seed))
        for stage in placement:
            rows, columns = {n // 4 for n in stage.reshape(-1).tolist()}, {n % 4 for n in stage.reshape(-1).tolist()}
            assert len(rows) * len(columns) == 4


@pytest.fixture(scope="module")
def mixed(make_problem: MakeProblem, make_cluster: MakeCluster) -> Problem:
    return make_problem(make_cluster((("fast", 2), ("slow", 2)), between=2e6), layers=6, batch=8)


@dataclass(eq=False)
class Stop:
    """A strategy of a scripted walk."""

    seconds: float
    number: int
    stages: None = None
    rows: int = 1
    ends: tuple[int, ...] = (1,)


@dataclass
class ScriptedWalk:
    """Every neighbour is slower by `step`; draws are what is put in."""

    draws: list[float]
    step: float
    passed: list[Stop] = field(default_factory=list)
    drafted: int = 0

    @property
    def plan_space(self) -> ScriptedWalk:
        return self

    @property
    def generator(self) -> ScriptedWalk:
        return self

    def random(self) -> float:
        return self.draws[len(self.passed) - 1]

    def start(self) -> Stop:
        return Stop(100.0, 0)

    def neighbour(self, here: Stop) -> Stop:
        self.passed.append(here)
        return Stop(here.seconds + self.step, len(self.passed))

    def lazy_candidate(self, *_: object) -> LazyCandidate:
        self.drafted += 1
        return LazyCandidate(0.0, lambda: pytest.fail("not costed here"))


def walk_by(monkeypatch: pytest.MonkeyPatch, problem: Problem, walk: ScriptedWalk) -> list[float]:
    """Return seconds of the current strategy before each step of the walk."""
    monkeypatch.setattr(annealing, "_Walk", lambda *_: walk)
    monkeypatch.setattr(annealing, "best_of", lambda *_, **__: [])
    annealing.amp_annealing(problem, SearchControl(), None)
    return [stop.seconds for stop in walk.passed]


def test_annealing_continues_from_accepted_plans_with_geometric_cooling(
    monkeypatch: pytest.MonkeyPatch, mixed: Problem
) -> None:
    """A neighbour slower by Δ is accepted where a draw from 0 … 1 is below exp(-Δ / T), T from 1 to 0.01 of the start."""
    count, step = annealing.ITERATIONS, 0.5
    chances = [math.exp(-step / (100.0 * 0.01 ** (k / count))) for k in range(count)]
    draws = [chance * (1 - 1e-9 if k % 2 == 0 else 1 + 1e-9) for k, chance in enumerate(chances)]
    stood = walk_by(monkeypatch, mixed, ScriptedWalk(draws, step))
    assert stood == [100.0 + step * ((k + 1) // 2) for k in range(count)]


def test_a_faster_neighbour_is_always_accepted(monkeypatch: pytest.MonkeyPatch, mixed: Problem) -> None:
    count = annealing.ITERATIONS
    walk = ScriptedWalk([math.nextafter(1.0, 0.0)] * count, -0.125)
    assert walk_by(monkeypatch, mixed, walk) == [100.0 - 0.125 * k for k in range(count)]
    assert walk.drafted == annealing.MAX_EVALUATED


@examples(5)
@given(seed=seeds)
def test_neighbour_keeps_data_or_tensor_degree_with_equal_probability(mixed: Problem, seed: int) -> None:
    walk = annealing._Walk(mixed, SearchControl(seed=seed))
    here = walk.start()
    assert here is not None
    moved = []
    for _ in range(300):
        following = walk.neighbour(here)
        if following is not None:
            kept = following.degrees.data == here.degrees.data, following.degrees.tensor == here.degrees.tensor
            assert any(kept)
            assert following.rows in walk.sizes_by_degrees[following.degrees]
            moved.append(kept)
    # From (1, 4, 1) keeping data = 4 leaves no other degrees; keeping tensor = 1 leaves three, two of them other.
    assert here.degrees == Degrees(1, 4, 1)
    assert 0.2 < sum(not data for data, _ in moved) / len(moved) < 0.47
