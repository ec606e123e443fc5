"""Bar of a long step: on a terminal with the time that is left, nowhere else."""

from __future__ import annotations

import io
import re

import pytest

from trainwright.report.progress import ProgressBar, progress_bar
from trainwright.report.units import duration


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    return Terminal()


def last_bar(terminal: Terminal) -> str:
    """Return the last drawn bar without its control codes."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue()).rpartition("\r")[2].rstrip()


def test_bar_tells_the_share_and_the_time_that_is_left(terminal: Terminal) -> None:
    bar = ProgressBar(terminal, refreshes=False)
    seconds = 100.0
    bar._progress.get_time = lambda: seconds
    bar.show("trials", 1, 5)
    assert "left" not in last_bar(terminal)
    seconds += 10.0
    bar.show("trials", 2, 5, "best 0.2 s")
    shown = last_bar(terminal)
    assert shown.startswith("trials ")
    assert " 40%" in shown
    assert "about 30 s left best 0.2 s" in shown  # three more of those that take 10 s each


def test_another_step_begins_anew(terminal: Terminal) -> None:
    bar = ProgressBar(terminal, refreshes=False)
    bar.show("links", 3, 4)
    bar.hide()
    bar.show("profiles", 0, 2)
    shown = last_bar(terminal)
    assert "links" not in shown
    assert " 0%" in shown
    bar.hide()


@pytest.mark.parametrize("colours", [False, True])
def test_nothing_is_shown_without_a_terminal(monkeypatch: pytest.MonkeyPatch, colours: bool) -> None:
    if colours:
        monkeypatch.setenv("FORCE_COLOR", "1")
    stream = io.StringIO()
    with progress_bar("search", stream) as report:
        report(1, 2)
    assert stream.getvalue() == ""


def test_no_control_codes_are_written_to_a_dumb_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    with progress_bar("search", stream) as report:
        report(1, 2)
    assert stream.getvalue() == ""


@pytest.mark.parametrize(("seconds", "text"), [(52.4, "52 s"), (600, "10 min"), (7200, "2 h"), (259_200, "3 d")])
def test_durations_are_said_in_their_unit(seconds: float, text: str) -> None:
    assert duration(seconds) == text
