"""Pictures of the documentation are what the page draws, and stand where people look."""

from __future__ import annotations

from pathlib import Path
from xml.etree.ElementTree import fromstring

import pytest
from documentation_pictures import FOLDER, PICTURES, ROOT


@pytest.mark.parametrize("name", PICTURES)
def test_committed_picture_equals_the_drawn_one(name: str) -> None:
    committed = (FOLDER / name).read_text(encoding="utf-8")
    assert committed == PICTURES[name](), "run `make generate`"
    assert fromstring(committed).tag == "{http://www.w3.org/2000/svg}svg"


def test_folder_has_no_other_picture() -> None:
    assert {path.name for path in FOLDER.glob("*.svg")} == set(PICTURES)


@pytest.mark.parametrize(
    ("page", "name"),
    [
        ("README.md", "page.png"),
        ("README.md", "timeline.svg"),
        ("docs/index.md", "timeline.svg"),
        ("docs/index.md", "difference.svg"),
        ("docs/accuracy.md", "accuracy.svg"),
        ("docs/timelines.md", "timeline.svg"),
    ],
)
def test_page_shows_the_picture_with_words_for_those_who_do_not_see_it(page: str, name: str) -> None:
    text = (Path(ROOT) / page).read_text(encoding="utf-8")
    assert f"pictures/{name})" in text
    assert f"![](docs/pictures/{name})" not in text
