"""`decide` returns the recorded actions in every pass of simulated runs."""

from __future__ import annotations

from functools import cache
from typing import Any

import golden_decisions as golden
import pytest

STORED = golden.stored()


@cache
def today(scenario: str) -> golden.Trace:
    return golden.trace(scenario)


def structure(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key != "messages"}


@pytest.mark.parametrize("scenario", STORED)
def test_decisions_equal_the_recorded_ones(scenario: str) -> None:
    """Actions, names, stored data, reasons, phases and numbers; whatever the messages say."""
    before, after = STORED[scenario], today(scenario)
    for number, (old, new) in enumerate(zip(before, after, strict=False)):
        assert structure(new) == structure(old), f"pass {number} of {scenario!r} decides otherwise"
    assert len(after) == len(before)


@pytest.mark.parametrize("scenario", STORED)
def test_messages_equal_the_recorded_ones(scenario: str) -> None:
    """After a reworded message, record anew: `python tests/golden/record.py decisions`."""
    before, after = ([entry.get("messages", {}) for entry in trace] for trace in (STORED[scenario], today(scenario)))
    assert after == before


def test_every_scenario_is_recorded() -> None:
    assert list(STORED) == list(golden.SCENARIOS)
