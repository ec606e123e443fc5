"""Progress of describe: the kinds of layers whose values are checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainwright_worker.model_description.description import describe

EXAMPLES = Path(__file__).resolve().parents[2] / "deploy" / "examples" / "custom"


@pytest.mark.timeout(300)
def test_kinds_are_counted_as_they_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES / "encoder")
    steps: list[tuple[int, int]] = []
    described = describe("encoder:encoder", report=lambda done, total: steps.append((done, total)))
    whole = len(steps)
    assert steps == [(done, whole) for done in range(1, whole + 1)]
    assert whole >= len(described.kinds) > 1
