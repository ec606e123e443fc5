"""The README's commands of the planner and of a user's own model, exactly as they are typed there."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECTION = re.compile(r"^## ([^\n]*)\n(.*?)(?=^## )", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```\n(.*?)^```", re.MULTILINE | re.DOTALL)
NOT_HERE = ("pip install", "cd ", "docker ", "kubectl ")


def commands(section: str) -> list[str]:
    sections: dict[str, str] = dict(SECTION.findall((ROOT / "README.md").read_text(encoding="utf-8")))
    lines = [line for block in BLOCK.findall(sections[section]) for line in block.splitlines()]
    return [line for line in lines if not line.startswith(NOT_HERE)]


def typed(section: str, folder: Path) -> subprocess.CompletedProcess[str]:
    trainwright = f"""trainwright() {{ {sys.executable} -c 'from trainwright.cli import app; app()' "$@"; }}"""
    python = f"""python() {{ {sys.executable} "$@"; }}"""
    script = "\n".join(["set -e", trainwright, python, *commands(section)])
    done = subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "deploy" / "examples", tmp_path / "examples")
    return tmp_path / "examples"


@pytest.mark.timeout(300)
def test_the_commands_answer_in_the_folder_of_examples(examples: Path) -> None:
    done = typed("Without Kubernetes", examples / "planner")
    assert "profiles estimated" in done.stdout
    assert "device times emulated" in done.stdout
    assert "sets the pace" in done.stdout


@pytest.mark.timeout(300)
def test_a_model_of_ones_own_is_described_and_planned(examples: Path) -> None:
    done = typed("Your own model", examples / "custom")
    assert "Candidates of auto (profiles estimated)" in done.stdout
    assert "forwardFlopsPerRow" in done.stdout


def test_the_mixed_cluster_in_the_examples_is_what_its_command_writes(tmp_path: Path) -> None:
    command = next(line for line in commands("Without Kubernetes") if line.startswith("trainwright cluster"))
    words = command.removeprefix("trainwright ").split(">")[0].split()
    program = f"import sys; sys.argv[1:] = {words!r}; from trainwright.cli import app; app()"
    written = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    kept = (ROOT / "deploy" / "examples" / "planner" / "mixed-cluster.yaml").read_text(encoding="utf-8")
    assert written.splitlines()[1:] == kept.splitlines()[1:]
