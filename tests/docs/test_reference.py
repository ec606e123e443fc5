"""Pages of docs/reference are what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest
from reference_pages import PAGES

from trainwright_operator.metrics import METRIC_DEFINITIONS

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference"


@pytest.mark.parametrize("name", PAGES)
def test_committed_page_equals_the_generated_one(name: str) -> None:
    assert (REFERENCE / name).read_text(encoding="utf-8") == PAGES[name](), "run `make generate`"


def test_generated_folder_has_no_other_page() -> None:
    assert {path.name for path in REFERENCE.iterdir()} == set(PAGES)


def test_metrics_page_lists_every_metric() -> None:
    page = (REFERENCE / "metrics.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in page for name in METRIC_DEFINITIONS)
