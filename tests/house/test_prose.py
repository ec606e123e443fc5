"""Docstrings open with a verb or a noun, prose has plain words, and variables have nouns for names."""

from __future__ import annotations

import pytest
from allowlists import complaints


@pytest.mark.parametrize("rule", ["docstring_openings", "forbidden_phrases", "weak_names"])
def test_prose_keeps_the_rule(rule: str) -> None:
    found = complaints(rule)
    assert not found, "\n".join(found)
