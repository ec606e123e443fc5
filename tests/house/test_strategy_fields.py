"""Few files know single fields of a layer's strategy, so that a new one touches few."""

from __future__ import annotations

from strategy_fields import files_naming_sequence_parallel, files_reading_tensor

MAX_NAMING_SEQUENCE_PARALLEL = 18
MAX_READING_TENSOR = 39


def test_few_files_name_sequence_parallelism() -> None:
    found = files_naming_sequence_parallel()
    assert 0 < len(found) <= MAX_NAMING_SEQUENCE_PARALLEL, "\n".join(found)


def test_few_files_read_the_tensor_degree() -> None:
    found = files_reading_tensor()
    assert 0 < len(found) <= MAX_READING_TENSOR, "\n".join(found)
