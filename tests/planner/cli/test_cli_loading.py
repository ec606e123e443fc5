"""Lazy loading: the command line imports only the requested search."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trainwright.search import SEARCHES, preload_search
from trainwright.search.registry import SEARCH_MODULES, load_search

FOLDER = Path(__file__).parents[3] / "deploy" / "examples" / "planner"
SLOW = ("trainwright.search.alpa.search", "trainwright.search.auto.search", "trainwright.search.galvatron", "scipy")


def loads(*arguments: str) -> set[str]:
    """Return the slow modules that a command imports."""
    program = (
        "import sys; from trainwright.cli import app; app(sys.argv[1:], standalone_mode=False); "
        f"print(*(name for name in {SLOW} if name in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=FOLDER, capture_output=True, text=True, check=True
    )
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("planner", ["amp", "megatron"])
def test_planner_loads_only_the_searches_it_needs(planner: str) -> None:
    documents = ("--cluster", "cluster.yaml", "--model", "model.yaml", "--profiles", "profiles.json")
    # The work bound takes scipy's linear program.
    assert loads("plan", *documents, "--planner", planner, "--top", "1") == {"scipy"}


def test_a_commands_help_loads_no_search() -> None:
    assert not loads("plan", "--help")


@pytest.mark.parametrize("planner", SEARCHES)
def test_every_search_is_at_its_registered_place(planner: str) -> None:
    preload_search(planner)
    assert callable(load_search(SEARCH_MODULES[planner]))
    assert load_search(SEARCH_MODULES[planner]) is load_search(SEARCH_MODULES[planner])


def test_package_runs_like_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trainwright", "schema", "nothing"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("trainwright: unknown document 'nothing'")
    assert done.stderr.count("\n") == 1
