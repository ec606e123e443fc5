"""Estimates of 400 plans equal the recorded ones, bit by bit."""

from __future__ import annotations

from typing import Any

import golden_estimates as golden
import pytest


@pytest.fixture(scope="module")
def rows() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Pairs of a recorded row and a row of today."""
    return list(zip(golden.stored(), golden.record(), strict=True))


@pytest.mark.parametrize("field", ["seconds", "breakdown", "bytes", "feasible", "critical", "amp", "galvatron"])
def test_estimates_equal_the_recorded_ones_bit_by_bit(rows: list[Any], field: str) -> None:
    changed = [
        f"problem {old['problem']} plan {old['plan']}: {old[field]} became {new[field]}{_difference(old[field], new[field])}"
        for old, new in rows
        if old[field] != new[field]
    ]
    assert not changed, f"{field} of {len(changed)} of {len(rows)} plans differs, for example:\n" + "\n".join(
        changed[:5]
    )


def test_recorded_plans_cover_every_cost_model_and_feature() -> None:
    rows = golden.stored()
    assert len(rows) == 400
    assert sum(row["amp"] is not None for row in rows) >= 100
    assert 100 <= sum(row["feasible"] for row in rows) < 400
    for part in rows[0]["breakdown"]:
        assert sum(float.fromhex(row["breakdown"][part]) > 0 for row in rows) >= 20, part


def _difference(old: Any, new: Any) -> str:
    if not isinstance(old, str) or not isinstance(new, str) or "0x" not in old:
        return ""
    before, after = float.fromhex(old), float.fromhex(new)
    return f" (relative difference {abs(after - before) / abs(before or 1):.1e})"
