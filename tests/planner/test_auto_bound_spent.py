"""What the proof of a lower bound may spend and keep, and tables that it makes in more than one way."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from auto_instances import instance
from bound_instances import drawn_problem

from trainwright.search import Control
from trainwright.search.auto.bound import classes as classes_module
from trainwright.search.auto.bound import ledger as ledger_module
from trainwright.search.auto.bound import lower_bound_seconds
from trainwright.search.auto.bound import terms as terms_module
from trainwright.search.auto.bound.classes import Classes
from trainwright.search.auto.bound.ledger import Ledger, SpentError
from trainwright.search.auto.bound.moves import Moves, moves_of
from trainwright.search.auto.bound.options import Array
from trainwright.search.auto.bound.ways import stage_counts
from trainwright.search.auto.exhaustive import exhaustive


@pytest.mark.parametrize("seed", range(40, 46))
def test_with_less_to_spend_a_bound_is_less_close_and_still_one(seed: int) -> None:
    problem = instance(seed, 600)
    (best,) = exhaustive(problem, Control(), 1)
    ample = lower_bound_seconds(problem)
    for effort in (0.0, 1e-5, 1e-4, 1e-3, 1e-2):
        assert lower_bound_seconds(problem, effort=effort) <= best.estimate.iteration_seconds
        assert lower_bound_seconds(problem, effort=effort) <= ample * (1 + 1e-2)


@pytest.mark.parametrize("most", [1e5, 1e6, 1e7])
def test_no_more_is_spent_than_there_is_but_for_the_last_step(most: float) -> None:
    classes = Classes(drawn_problem(random.Random(4)), most)
    steps: list[int] = []
    spend = classes.ledger.spend

    def noted(count: int) -> None:
        steps.append(count)
        spend(count)

    classes.ledger.spend = noted  # type: ignore[method-assign]
    for bound in (classes.one, classes.several):
        assert bound(1e-6, 1e3) >= 1e-6
        assert classes.ledger.spent <= classes_module._FARTHEST * most + max(steps)


def test_more_rows_and_prices_are_more_to_look_at() -> None:
    problem = replace(drawn_problem(random.Random(4)), global_batch_size=256)
    spent = []
    for rows in (1, 16, 256):
        shares = Classes(problem)._shares(rows)
        shares.weighted(1.0, 1.0)
        spent.append(shares.ledger.spent)
    assert 0 < spent[0] < spent[1] < spent[2]


def test_what_is_spent_ends_the_question() -> None:
    ledger = Ledger(10)
    ledger.spend(10)
    with pytest.raises(SpentError):
        ledger.spend(1)


def test_what_was_not_asked_for_the_longest_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "_MOST_KEPT_BYTES", 3 * 80)
    ledger, made = Ledger(), []

    def table(name: str) -> Array:
        def make() -> Array:
            made.append(name)
            return np.zeros(10)

        return ledger.table(name, make)

    for name in "abcabdabc":
        table(name)
    assert "".join(made) == "abcdc"


def test_sums_over_intervals_are_the_same_few_or_many(monkeypatch: pytest.MonkeyPatch) -> None:
    terms = Classes(drawn_problem(random.Random(5)))._terms
    by_kind, more = np.random.default_rng(1).random((2, 3, len(terms.problem.model.kinds)))
    expected = [
        [
            by_kind[row, terms.kind_of[a:b]].sum() + more[row, terms.kind_of[a]]
            for a, b in zip(terms.first, terms.end, strict=True)
        ]
        for row in range(3)
    ]
    for few in (0, 10**9):
        monkeypatch.setattr(terms_module, "_FEW_SUMS", few)
        assert np.allclose(terms.summed(by_kind, more), expected)
    for layer in range(terms.size):
        assert set(terms.first[terms.starting(layer)].tolist()) == {layer}
        assert terms.end[terms.ending(layer + 1)].tolist() == [layer + 1] * (layer + 1)
        assert terms.first[terms.ending(layer + 1)].tolist() == list(range(layer + 1))


@pytest.mark.parametrize("joined", [np.add, np.maximum])
def test_any_number_of_stages_is_one_after_the_other(joined: np.ufunc) -> None:
    terms, shape = Classes(drawn_problem(random.Random(6)))._terms, (2, 1)
    size, moves = terms.size, moves_of((2, 2), shape)
    table = np.random.default_rng(2).random((8, len(terms.first)))
    table[table < 0.1] = np.inf
    start = np.full((6, size + 1), np.inf)
    start[:, size] = 0.0
    every = newest = start
    for _ in range(sum(shape)):
        found = np.full_like(start, np.inf)
        moves.longer(terms, newest, found, table, joined)
        assert np.array_equal(found, _one_more(moves, newest, table, joined))
        every, newest = np.minimum(every, found), found
    at_once = start.copy()
    assert moves.longer(terms, at_once, at_once, table, joined) > 0
    assert np.array_equal(at_once, every)


def _one_more(moves: Moves, newest: Array, table: Array, joined: np.ufunc) -> Array:
    found = np.full_like(newest, np.inf)
    size = newest.shape[1] - 1
    for stage, beside, used in zip(moves.stage, moves.beside, moves.joined, strict=True):
        intervals = ((first, end) for first in range(size) for end in range(first + 1, size + 1))
        for number, (first, end) in enumerate(intervals):
            found[used, first] = min(found[used, first], joined(newest[beside, end], table[stage, number]))
    return found


def test_a_stage_joins_what_leaves_it_its_devices() -> None:
    moves, stages = moves_of((2, 3), (1, 2)), stage_counts((2, 3)).tolist()
    used = [list(one) for one in product(range(2), range(3))]
    found = [
        (stages[stage], used[beside], used[joined])
        for stage, beside, joined in zip(moves.stage, moves.beside, moves.joined, strict=True)
    ]
    expected = [
        ([c - a for a, c in zip(one, other, strict=True)], one, other)
        for other in used
        for one in used
        if one != other and all(a <= c for a, c in zip(one, other, strict=True))
    ]
    assert sorted(found) == sorted(expected)
