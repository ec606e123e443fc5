"""Option `--report`: the answer of a command as a page."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from trainwright.answer import Answer
from trainwright.cli.inputs.overwriting import WRITTEN
from trainwright.report.breakdown import Difference
from trainwright.report.error_range import expected_range
from trainwright.report.format_sentences import number_format
from trainwright.report.remark import Remark, sentences
from trainwright.search import Candidate

PageOption = Annotated[
    Path | None,
    typer.Option(
        "--report", metavar="FILE.html", help="Write the answer as one page with drawings, which loads nothing, too."
    ),
    WRITTEN,
]


def write_page(
    path: Path,
    answer: Answer,
    candidates: Iterable[tuple[str, Candidate]],
    difference: Difference | None,
    reason: Remark,
) -> None:
    """Write the answer into a file, with named candidates and the `reason` of the difference to another plan."""
    from trainwright.report.page.composition import html_page  # noqa: PLC0415 - drawings that few answers need
    from trainwright.report.page.content import PageCandidate, PageContent  # noqa: PLC0415 - likewise

    content = PageContent(
        answer,
        tuple(PageCandidate(name, candidate) for name, candidate in candidates),
        tuple(sentences(expected_range(answer.best, answer.problem), number_format(answer), reason)),
        difference,
        commands=(typed_command(sys.argv[1:]),),
    )
    path.write_text(html_page(content), encoding="utf-8")


def typed_command(arguments: Sequence[str]) -> str:
    """Return the command as it was typed, without the options that write files."""
    kept: list[str] = []
    follows = False
    for word in arguments:
        name, equals, _ = word.partition("=")
        if not follows and name not in _WRITING:
            kept.append(word)
        follows = not follows and name in _WRITING and not equals
    return shlex.join(["trainwright", *kept])


_WRITING: Final = {"--report", "--trace", "--write-plan"}
