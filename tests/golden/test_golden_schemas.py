"""JSON schemas of documents equal the recorded ones."""

from __future__ import annotations

import golden_schemas as golden
import pytest

STORED, TODAY = golden.stored(), golden.record()


def test_documents_have_the_recorded_names() -> None:
    assert list(TODAY) == list(STORED)


@pytest.mark.parametrize("name", STORED)
def test_schema_of_a_document_equals_the_recorded_one(name: str) -> None:
    assert TODAY[name] == STORED[name]


@pytest.mark.parametrize("name", STORED)
def test_kind_of_a_document_is_the_recorded_one(name: str) -> None:
    assert TODAY[name]["properties"]["document"] == STORED[name]["properties"]["document"]
