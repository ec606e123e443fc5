"""Option `--report`: the answer of a command as a page."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from trainwright.cli.overwriting import WRITTEN
from trainwright.report.page.content import PageContent

PageOption = Annotated[
    Path | None,
    typer.Option(
        "--report", metavar="FILE.html", help="Write the answer as one page with drawings, which loads nothing, too."
    ),
    WRITTEN,
]


def write_page(content: PageContent, path: Path) -> None:
    """Write the page into a file."""
    from trainwright.report.page.composition import html_page  # noqa: PLC0415 - drawings that few answers need

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
