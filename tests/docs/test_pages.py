"""Pages of the documentation: links, navigation, fenced blocks, paths that they name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from markdown_pages import DOCS, Page, pages
from source_files import ROOT

from trainwright_operator.api.spec import TrainingPlanSpec
from trainwright_operator.api.status import NodeExclusion
from trainwright_operator.flow.reasons import ENDED_BY_CLUSTER, ENVIRONMENTAL, Reason

LANGUAGES = {"bash", "json", "python", "text", "yaml"}
MAX_README_LINES = 120
FOLDERS = ("benchmarks", "charts", "deploy", "docs", "operator", "planner", "profiler-image", "tests")
PATH = re.compile(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]+)`")

every_page = pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)


@every_page
def test_every_relative_link_has_a_target(page: Page) -> None:
    for target in page.links():
        name, _, anchor = target.partition("#")
        path = (page.path.parent / name).resolve() if name else page.path
        assert path.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in Page(path).anchors(), f"{page.name}: {target}"


@every_page
def test_every_path_in_code_exists(page: Page) -> None:
    if page.path.parent.name == "reference" or page.name == "CHANGELOG.md":
        return
    missing = [found for found in PATH.findall(page.text) if "NAME" not in found and not (ROOT / found).exists()]
    assert not missing


@every_page
def test_every_command_is_run_or_names_the_tests_that_cover_it(page: Page) -> None:
    for fence in page.fences:
        assert fence.language in LANGUAGES, f"{page.name}: fenced block of language {fence.language!r}"
        if fence.language == "bash" and fence.mark != "run":
            start, _, tests = fence.mark.partition(" ")
            assert start == "cluster:", f"{page.name}: mark the block with `run` or `cluster: TESTS`:\n{fence.text}"
            assert tests, page.name
            assert all((ROOT / test).is_file() for test in tests.split()), f"{page.name}: {fence.mark}"


def test_navigation_lists_every_page_once() -> None:
    found = list(_leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))
    assert sorted(found) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def _leaves(part: Any) -> Iterator[str]:
    if isinstance(part, str):
        yield part
    else:
        for inner in part.values() if isinstance(part, dict) else part:
            yield from _leaves(inner)


def test_readme_is_short() -> None:
    assert len(Page(ROOT / "README.md").text.splitlines()) <= MAX_README_LINES


@every_page
def test_every_training_plan_shown_is_valid(page: Page) -> None:
    for fence in page.fences:
        if fence.language == "yaml":
            shown = yaml.safe_load(fence.text)
            if shown.get("kind") == "TrainingPlan":
                assert TrainingPlanSpec.model_validate(shown["spec"]).model.family


def test_every_reason_has_a_row_with_its_remedy() -> None:
    rows = re.findall(r"^\| `(\w+)` \| \S.* \| \S.* \|$", Page(DOCS / "status-and-reasons.md").text, re.MULTILINE)
    assert sorted(rows) == sorted(Reason)


def test_every_code_of_a_node_that_is_left_out_has_a_row() -> None:
    section = Page(DOCS / "status-and-reasons.md").text.partition("### Nodes that are left out")[2].partition("##")[0]
    assert re.findall(r"^\| `(\w+)` \| \S.* \|$", section, re.MULTILINE) == list(NodeExclusion)


@pytest.mark.parametrize(
    ("opening", "reasons"),
    [("What the cluster ends (", ENDED_BY_CLUSTER), ("Three more (", ENVIRONMENTAL - ENDED_BY_CLUSTER)],
)
def test_docs_list_reasons_that_are_tried_again(opening: str, reasons: frozenset[Reason]) -> None:
    listed = Page(DOCS / "status-and-reasons.md").text.partition(opening)[2].partition(")")[0]
    assert sorted(re.findall(r"`(\w+)`", listed)) == sorted(reasons)
