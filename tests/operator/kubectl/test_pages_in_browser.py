"""Pages of a cluster in a real browser: an answer with its trials, and all plans."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from answered_plans import BASELINE, FIRST, SECOND, WAITING, resource, status_of
from browser import CHROMIUM, Tab, new_tab
from flow_world import START, World, spec_of

from trainwright_operator.kubectl.cluster_page import page_of
from trainwright_operator.page_process import cluster_commands, draw_page

pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(180),
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
]


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with new_tab(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return an answer's page and one of several plans, as files."""
    drawn: list[str] = []
    world = World(
        spec=spec_of(trials={"topK": 2, "timeline": True}),
        draw=lambda request: drawn.append(draw_page(request, cluster_commands(request))) or "",
    )
    world.run()
    world.step()
    nodes = [
        {"name": f"gpu-{number}", "accelerator": "Tesla-T4", "devices": 1, "relativeSeconds": 1.0 + number / 10}
        for number in range(4)
    ]
    cluster = {"devices": 4, "nodes": nodes, "accelerators": [{"name": "Tesla-T4", "devices": 4, "memoryBytes": 1}]}
    spent = [{"purpose": "Trials", "succeeded": 7200.0}]
    plans = [
        resource(
            f"plan-{number}",
            status_of(FIRST, SECOND, BASELINE, cluster=cluster, deviceSeconds=spent, profilesMeasuredAt=START),
        )
        for number in range(30)
    ]
    listed = page_of([*plans, resource("waits", WAITING)], START, None)
    folder = tmp_path_factory.mktemp("pages")
    for name, page in (("answer", drawn[0]), ("plans", listed)):
        (folder / f"{name}.html").write_text(page, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in ("answer", "plans")}


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("name", ["answer", "plans"])
def test_page_loads_without_complaint_fits_and_is_readable(
    pages: dict[str, Path], tab: Tab, name: str, width: int, theme: str
) -> None:
    tab.open(pages[name], width=width, theme=theme)
    assert tab.complaints == []
    assert tab.value("document.documentElement.scrollWidth") <= width
    assert tab.poor_contrasts() == []
