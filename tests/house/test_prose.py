"""Docstrings open with a verb or a noun, and prose has plain words."""

from __future__ import annotations

import pytest
from allowlists import complaints


@pytest.mark.parametrize("rule", ["docstring_openings", "forbidden_phrases"])
def test_prose_keeps_the_rule(rule: str) -> None:
    found = complaints(rule)
    assert not found, "\n".join(found)
