"""Commands of README.md and docs/ that need no cluster, exactly as they are typed there."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import stored_trials
from markdown_pages import Page, pages
from nightly import quick_first
from source_files import ROOT
from stored_trials import stored

QUICK = ("README.md", "docs/cli.md")
"""The other pages run nightly."""


def run_commands(page: Page) -> list[str]:
    return [fence.text for fence in page.fences if fence.language == "bash" and fence.mark == "run"]


BY_NAME = {page.name: page for page in pages() if run_commands(page)}
SHOWN = {
    "README.md": (
        "profiles estimated",
        "sets the pace",
        *(f"   1   {one}" for one in re.findall(r"`plan` finds ([\d.]+ ms)", BY_NAME["README.md"].text)),
    ),
    "docs/library.md": ("today: ", "calibrated: ", "version "),
    "docs/cli.md": ("profiles estimated", "device times emulated", "sets the pace"),
    "docs/runtimes.md": ("Candidates of amp (profiles estimated)",),
    "docs/exports.md": ("12.4% shorter than the given plan's 413.3 ms", "start 1 0,1,2,3  # ranks"),
    "docs/trials-and-calibration.md": ("model FLOP", "Mean error of memory"),
    "docs/slow-runs.md": (
        "Most likely: EFA, InfiniBand or RoCE unused",
        '"name": "recompute that memory does not ask for"',
    ),
    "docs/checkpoints.md": (
        "llama after 1 iterations, for the worker",
        "llama after 1 iterations, for torch's trainers",
    ),
    "docs/training.md": ("Candidates of auto (profiles estimated)", "torchrun (torch ≥ 2.8) runs the plan as it is."),
    "docs/hugging-face.md": ("million parameters", "kind: TrainingPlan", "Candidates of auto (profiles estimated)"),
    "docs/custom-models.md": ("Candidates of auto (profiles estimated)", "forwardFlopsPerRow"),
}
"""Parts of what the commands of a page print."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the project's examples, a model file and the answers of the fake kubectl."""
    shutil.copytree(ROOT / "deploy" / "examples", tmp_path / "deploy" / "examples")
    examples = tmp_path / "deploy" / "examples" / "planner"
    shutil.copy(examples / "model.yaml", tmp_path)
    (tmp_path / "stored.json").write_text(stored(examples), encoding="utf-8")
    return tmp_path


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", quick_first(BY_NAME, QUICK))
def test_commands_of_a_page_succeed(name: str, folder: Path) -> None:
    trainwright = f"""trainwright() {{ {sys.executable} -c 'from trainwright.cli import app; app()' "$@"; }}"""
    python = f"""python() {{ {sys.executable} "$@"; }}"""
    kubectl = f"""kubectl() {{ {sys.executable} {stored_trials.__file__} {folder / "stored.json"} "$@"; }}"""
    blocks = [f"cd {folder}\n{block}" if "\ncd " in f"\n{block}" else block for block in run_commands(BY_NAME[name])]
    script = "\n".join(["set -e", trainwright, python, kubectl, "pip() { true; }", *blocks])
    if " jq " in f" {script}" and shutil.which("jq") is None:
        pytest.skip("the page needs jq")
    done = subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for part in SHOWN[name]:
        assert part in done.stdout


def test_mixed_cluster_example_equals_the_output_of_its_command() -> None:
    line = next(line for line in BY_NAME["docs/cli.md"].text.splitlines() if line.startswith("trainwright cluster"))
    words = line.removeprefix("trainwright ").split(">")[0].split()
    program = f"import sys; sys.argv[1:] = {words!r}; from trainwright.cli import app; app()"
    written = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    kept = (ROOT / "deploy" / "examples" / "planner" / "mixed-cluster.yaml").read_text(encoding="utf-8")
    assert written.splitlines()[1:] == kept.splitlines()[1:]
