"""Upgrade notes: values that they announce exist in the chart."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from markdown_pages import DOCS, Page
from source_files import ROOT

VALUES = yaml.safe_load((ROOT / "charts" / "trainwright" / "values.yaml").read_text(encoding="utf-8"))
ROWS = re.findall(r"^\| (`[^|]+`) \|", Page(DOCS / "upgrade-notes.md").text, re.MULTILINE)
ANNOUNCED = [name for row in ROWS for name in re.findall(r"`([\w.]+)`", row)]


@pytest.mark.parametrize("name", ANNOUNCED)
def test_announced_value_is_one_of_the_chart(name: str) -> None:
    found: Any = VALUES
    for part in name.split("."):
        assert part in found, f"values.yaml has no {name}"
        found = found[part]


def test_there_are_announced_values() -> None:
    assert ANNOUNCED
