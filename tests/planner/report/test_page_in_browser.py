"""Page of an answer in a real browser: no complaint, no overflow, readable in both themes, usable with the keyboard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, Tab, new_tab
from typer.testing import CliRunner

from trainwright import documents
from trainwright.accelerators import cluster_of
from trainwright.cli import app

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    (folder / "model.yaml").write_text(
        "gpt: {layers: 24, hidden_size: 1024, heads: 16, sequence_length: 1024, vocabulary_size: 52256}\n"
        "global_batch_size: 32\ndtype: float16\n"
    )
    (folder / "cluster.json").write_text(documents.dumps(cluster_of({"p3.8xlarge": 2, "g4dn.12xlarge": 1})))
    given = [f"--cluster={folder / 'cluster.json'}", f"--model={folder / 'model.yaml'}"]
    words = ["plan", "--planner=amp", "--top=5", "--node-worth", *given, f"--report={folder / 'page.html'}"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    return folder / "page.html"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with new_tab(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_page_loads_without_complaint_fits_and_is_readable(page: Path, tab: Tab, width: int, theme: str) -> None:
    tab.open(page, width=width, theme=theme)
    assert tab.complaints == []
    assert tab.value("document.documentElement.scrollWidth") <= width
    assert tab.poor_contrasts() == []


def test_the_theme_changes_with_the_keyboard(page: Path, tab: Tab) -> None:
    tab.open(page, width=1280, theme="light")
    background = "getComputedStyle(document.body).backgroundColor"
    before = tab.value(background)
    tab.press("Tab", 9)
    assert tab.value("document.activeElement.id") == "theme"
    tab.press("Enter", 13)
    assert tab.value(background) != before
    assert tab.value("document.activeElement.textContent") == "Light"
    tab.press("Tab", 9)
    assert tab.value("document.activeElement.getAttribute('aria-label')") == "Model"


def test_the_policy_of_the_page_forbids_scripts_and_images_of_others(page: Path, tab: Tab) -> None:
    tab.open(page, width=1280, theme="light")
    tab.value(
        "document.body.insertAdjacentHTML('beforeend', '<img src=\"https://example.org/a.png\" onerror=\"window.ran = 1\">')"
    )
    tab.value("new Promise(done => setTimeout(done, 200))")
    assert tab.value("window.ran === undefined")
    assert any("Content Security Policy" in complaint for complaint in tab.complaints)
    tab.complaints.clear()
