"""Findings of the checks, and the table of them as text, Markdown and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """Verdict on one finding."""

    OK = "ok"
    FAILS = "fails"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the table.

    Attributes:
        reason: why it was skipped or how it failed, as the rest of a sentence; empty if the figures say it.
        check: name of the check, which the runner fills in.
    """

    subject: str
    measured: str
    expected: str
    verdict: Verdict = Verdict.OK
    reason: str = ""
    check: str = ""

    @property
    def verdict_text(self) -> str:
        """Return the verdict with its reason."""
        link = " because " if self.verdict is Verdict.SKIPPED else ": "
        return f"{self.verdict}{link}{self.reason}" if self.reason else str(self.verdict)


def judged(subject: str, measured: str, expected: str, *, holds: bool) -> Finding:
    """Return a finding that is ok exactly if the expectation holds."""
    return Finding(subject, measured, expected, Verdict.OK if holds else Verdict.FAILS)


def skipped(subject: str, reason: str, measured: str = "–", expected: str = "–", *, check: str = "") -> Finding:
    """Return a finding without a judgement."""
    return Finding(subject, measured, expected, Verdict.SKIPPED, reason, check)


def predicted(subject: str, figures: tuple[str, str], error: float, *, aim: float, limit: float) -> Finding:
    """Judge a relative error of a prediction; `figures` are the measured and the predicted one, with units."""
    measured, expected = figures
    reason = f"above the aim of {aim:.0%}" if aim < abs(error) <= limit else ""
    verdict = Verdict.OK if abs(error) <= limit else Verdict.FAILS
    text = f"{measured}; the prediction is {error:+.1%} off"
    return Finding(subject, text, f"{expected} within {limit:.0%}", verdict, reason)


COLUMNS = ("check", "subject", "measured", "expected", "verdict")


def _cells(finding: Finding) -> tuple[str, ...]:
    return finding.check, finding.subject, finding.measured, finding.expected, finding.verdict_text


def text_table(findings: Sequence[Finding]) -> str:
    """Return the table in columns of equal width."""
    rows = [COLUMNS, *map(_cells, findings)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS) - 1)]
    return "\n".join("  ".join((*map(str.ljust, row, widths), row[-1])) for row in rows)


def markdown(title: str, findings: Sequence[Finding]) -> str:
    """Return the table as a Markdown page."""
    rows = [COLUMNS, ("---",) * len(COLUMNS), *map(_cells, findings)]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([f"# {title}", "", summary(findings), "", *lines, ""])


def as_json(title: str, findings: Sequence[Finding]) -> str:
    """Return the findings as JSON."""
    return json.dumps({"title": title, "findings": list(map(asdict, findings))}, indent=1, ensure_ascii=False) + "\n"


def summary(findings: Sequence[Finding]) -> str:
    """Count the verdicts in one sentence."""
    count = {verdict: sum(one.verdict is verdict for one in findings) for verdict in Verdict}
    return f"{count[Verdict.OK]} ok, {count[Verdict.FAILS]} fail, {count[Verdict.SKIPPED]} skipped."
