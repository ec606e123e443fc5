"""Markdown pages of the project: links, anchors and fenced blocks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from source_files import ROOT

DOCS = ROOT / "docs"
_FENCE = re.compile(r"^(?:<!-- ([^\n]*) -->\n)?(?:```)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)
_CODE = re.compile(r"`[^`\n]*`")


class Fence(NamedTuple):
    """A fenced block: the comment on the line before it, its language and its text."""

    mark: str
    language: str
    text: str


@dataclass(frozen=True)
class Page:
    """A Markdown file."""

    path: Path

    @property
    def name(self) -> str:
        """Path from the project's root."""
        return self.path.relative_to(ROOT).as_posix()

    @property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def fences(self) -> list[Fence]:
        return [Fence(*found) for found in _FENCE.findall(self.text)]

    @property
    def prose(self) -> str:
        """The text without fenced blocks."""
        return _FENCE.sub("", self.text)

    def links(self) -> Iterator[str]:
        """Yield targets of links that stay in the project."""
        for target in _LINK.findall(_CODE.sub("", self.prose)):
            if not re.match(r"[a-z]+:", target):
                yield target

    def anchors(self) -> set[str]:
        """Return the anchors of all headings, the second of equal ones with `_1` as Zensical names it."""
        met = Counter[str]()
        found = set()
        for heading in _HEADING.findall(self.prose):
            slug = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())
            found.add(f"{slug}_{met[slug]}" if met[slug] else slug)
            met[slug] += 1
        return found


def pages() -> list[Page]:
    """Return the pages for readers: those at the project's root and those of docs/."""
    return [Page(path) for path in (*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md")))]
