"""Discovery says of each node object what is recorded."""

from __future__ import annotations

import golden_nodes as golden
import pytest

ROWS, STORED = golden.rows(), golden.stored()


def test_every_node_object_is_recorded() -> None:
    assert list(STORED) == list(ROWS)


@pytest.mark.parametrize("name", STORED)
def test_discovery_says_of_a_node_what_is_recorded(name: str) -> None:
    """After a change of its words, record anew: `python tests/golden/record.py nodes`."""
    assert golden.said_of(ROWS[name]) == STORED[name]
