"""Upgrade notes: values that they announce exist in the chart."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from markdown_pages import DOCS, Page
from source_files import ROOT

from trainwright_operator.metrics import METRIC_DEFINITIONS

VALUES = yaml.safe_load((ROOT / "charts" / "trainwright" / "values.yaml").read_text(encoding="utf-8"))
ROWS = re.findall(r"^\| (`[^|]+`) \|", Page(DOCS / "upgrade-notes.md").text, re.MULTILINE)
ANNOUNCED = [name for row in ROWS for name in re.findall(r"`([\w.]+)`", row)]


@pytest.mark.parametrize("name", ANNOUNCED)
def test_announced_value_is_one_of_the_chart(name: str) -> None:
    found: Any = VALUES
    for part in name.split("."):
        assert part in found, f"values.yaml has no {name}"
        found = found[part]


def test_queries_in_the_place_of_former_metrics_name_those_that_exist() -> None:
    text = Page(DOCS / "upgrade-notes.md").text
    renamed = re.findall(r"^- `(trainwright_\w+)[^`]*`: (.*?)(?=^- )", text, re.MULTILINE | re.DOTALL)
    assert len(renamed) > 7
    for former, query in renamed:
        names = {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"trainwright_\w+", query)}
        assert names, former
        assert names <= METRIC_DEFINITIONS.keys(), former


def test_there_are_announced_values() -> None:
    assert ANNOUNCED
