"""Searches choose the recorded plans, with the recorded seconds."""

from __future__ import annotations

import golden_searches as golden
import pytest

STORED = {(row["case"], row["search"]): row for row in golden.stored()}


QUICK_AUTO_CASES = (0, 2, 30, 48, 86, 119)
"""Cases of `auto` that `make test` runs: one to three accelerator types, some short of memory. The others run nightly."""


@pytest.mark.parametrize(
    ("case", "search"),
    [
        pytest.param(case, search, marks=() if search != "auto" or case in QUICK_AUTO_CASES else pytest.mark.slow)
        for case, search in STORED
    ],
)
def test_search_chooses_the_recorded_plan(case: int, search: str) -> None:
    before, after = STORED[case, search], golden.answer(case, search)
    assert (after["plan"], after["seconds"]) == (before["plan"], before["seconds"])


def test_every_search_is_recorded() -> None:
    assert list(STORED) == list(golden.questions())
