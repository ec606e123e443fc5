"""The per-layer dynamic programme against every assignment, and against the paper's table."""

from __future__ import annotations

from dataclasses import replace

import galvatron_oracle as oracle
import numpy as np
import pytest

from trainwright.search.galvatron.stage_programme import StageChoices, assign, measure

INSTANCES = 400


def drawn(seed: int, *, layers: int | None = None, most: int = 6) -> StageChoices:
    """A stage of up to four layers; what is released is O_f, a part of the forward bytes, or nothing."""
    rng = np.random.default_rng(seed)
    layers = layers or int(rng.integers(1, 5))
    size, layouts = int(rng.integers(1, most)), int(rng.integers(1, 4))
    moved = rng.uniform(0, 3, (layers, layouts, layouts))
    moved[:, range(layouts), range(layouts)] = 0
    forward = rng.integers(1, 10, (layers, size)).astype(float)
    peak = rng.integers(0, 8, (layers, size)) * (rng.random((layers, size)) < 0.5).astype(float)
    budget = rng.uniform(forward.min(axis=1).sum(), forward.max(axis=1).sum() + 8)
    return StageChoices(
        seconds=rng.integers(1, 10, (layers, size)).astype(float),
        moved_seconds=moved,
        layouts=rng.integers(0, layouts, size),
        forward_bytes=forward,
        peak_bytes=peak,
        released_bytes=forward * rng.choice([0.0, 0.5, 1.0]),
        budget_bytes=float(budget),
    )


@pytest.mark.parametrize("start", range(0, INSTANCES, 100))
def test_equals_brute_force(start):
    for seed in range(start, start + 100):
        choices = drawn(seed)
        found, best = assign(choices), oracle.brute_force(choices)
        if found is None:
            assert best == np.inf
        else:
            assert found.seconds == pytest.approx(best)
            assert found.bytes <= choices.budget_bytes * (1 + 1e-9)
            assert measure(choices, found.strategies) == pytest.approx(
                (oracle.objective(choices, found.strategies), oracle.needed_bytes(choices, found.strategies))
            )


def test_never_worse_than_the_papers_table_and_often_better(record_property):
    wins = solved = 0
    for seed in range(INSTANCES):
        choices = drawn(seed)
        plain = oracle.table_algorithm(choices, granules=20)
        if plain is None:
            continue
        found = assign(choices)
        assert found is not None
        solved += 1
        assert found.seconds <= oracle.objective(choices, plain) + 1e-9
        wins += found.seconds < oracle.objective(choices, plain) - 1e-9
    record_property("faster_than_the_table", f"{wins} of {solved}")
    assert 0 < wins < solved


@pytest.mark.parametrize("seed", range(6))
def test_long_stages_of_equal_layers_are_within_their_budget_and_no_worse_than_the_table(seed):
    one = drawn(seed, layers=1, most=5)
    layers = 12
    choices = replace(
        one,
        seconds=np.repeat(one.seconds, layers, axis=0),
        moved_seconds=np.repeat(one.moved_seconds, layers, axis=0),
        forward_bytes=np.repeat(one.forward_bytes, layers, axis=0),
        peak_bytes=np.repeat(one.peak_bytes, layers, axis=0),
        released_bytes=np.zeros((layers, one.seconds.shape[1])),
        budget_bytes=float(one.forward_bytes.mean() * layers + one.peak_bytes.max()),
    )
    found, plain = assign(choices), oracle.table_algorithm(choices, granules=60)
    assert found is not None
    assert found.bytes <= choices.budget_bytes
    assert plain is None or found.seconds <= oracle.objective(choices, plain) + 1e-9


def test_more_memory_is_never_slower():
    for seed in range(60):
        choices = drawn(seed)
        times = [assign(replace(choices, budget_bytes=choices.budget_bytes * factor)) for factor in (0.7, 1.0, 1.5)]
        seconds = [found.seconds if found else np.inf for found in times]
        assert seconds[0] >= seconds[1] - 1e-9 >= seconds[2] - 2e-9


def test_strategies_that_are_not_open_are_not_taken():
    choices = drawn(7, layers=3)
    closed = choices.seconds.copy()
    closed[1, :-1] = np.inf
    found = assign(replace(choices, seconds=closed, budget_bytes=1e6))
    assert found is not None
    assert found.strategies[1] == closed.shape[1] - 1
    assert assign(replace(choices, seconds=np.full_like(closed, np.inf), budget_bytes=1e6)) is None
