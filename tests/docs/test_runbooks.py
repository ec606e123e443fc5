"""Runbooks: one section for each alert, to which its annotation leads."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from markdown_pages import DOCS, Page
from source_files import ROOT

RUNBOOKS = Page(DOCS / "runbooks.md")
ALERTS = yaml.safe_load((ROOT / "charts" / "trainwright" / "files" / "alerts.yaml").read_text(encoding="utf-8"))
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"] if "alert" in rule]
PARTS = ("**Meaning.**", "**See it.**", "**Likely causes.**", "**Do.**", "**Silence**")


def sections() -> dict[str, str]:
    """Return the text of each alert's section."""
    found = re.split(r"^## (\w+)$", RUNBOOKS.text, flags=re.MULTILINE)[1:]
    return dict(zip(found[::2], found[1::2], strict=True))


def test_every_alert_has_a_section_and_every_section_its_alert() -> None:
    assert list(sections()) == [rule["alert"] for rule in RULES]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_annotation_leads_to_the_section(rule: dict[str, Any]) -> None:
    page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    assert (ROOT / page) == RUNBOOKS.path
    assert anchor == rule["alert"].lower()
    assert anchor in RUNBOOKS.anchors()


@pytest.mark.parametrize(("name", "text"), sections().items())
def test_section_has_every_part(name: str, text: str) -> None:
    places = [text.find(part) for part in PARTS]
    assert -1 not in places, f"{name} lacks {PARTS[places.index(-1)]}"
    assert places == sorted(places)
