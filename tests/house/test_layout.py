"""Names are unique in their folder, classes, files and folders have a readable size, and decisions are made from values."""

from __future__ import annotations

import pytest
from allowlists import complaints


@pytest.mark.parametrize(
    "rule",
    ["duplicate_modules", "duplicate_classes", "large_classes", "long_files", "full_folders", "mutable_classes"],
)
def test_layout_keeps_the_rule(rule: str) -> None:
    found = complaints(rule)
    assert not found, "\n".join(found)
