"""Progress lines at even steps, so that a log's tail reaches far back."""

from __future__ import annotations

from typing import Any

import pytest

from trainwright_worker.gang import report_writer


@pytest.mark.parametrize(("total", "lines"), [(1, 1), (7, 7), (20, 20), (21, 20), (503, 20), (10_000, 20)])
def test_progress_has_few_lines_and_always_the_last(capfd: Any, total: int, lines: int) -> None:
    for number in range(total):
        report_writer.write_progress(number + 1, total, "iterations")
    told = capfd.readouterr().out.splitlines()
    assert len(told) == lines
    assert '"done":1,' in told[0].replace(" ", "")
    assert f'"done":{total},' in told[-1].replace(" ", "")
