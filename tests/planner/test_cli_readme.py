"""The README's commands of the planner, exactly as they are typed there."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECTION = re.compile(r"^## Without Kubernetes\n(.*?)^## ", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```\n(.*?)^```", re.MULTILINE | re.DOTALL)
NOT_HERE = ("pip install", "cd ")


def commands() -> list[str]:
    section = SECTION.search((ROOT / "README.md").read_text(encoding="utf-8"))
    assert section is not None
    lines = [line for block in BLOCK.findall(section[1]) for line in block.splitlines()]
    return [line for line in lines if not line.startswith(NOT_HERE)]


def test_the_commands_answer_in_the_folder_of_examples(tmp_path: Path) -> None:
    folder = tmp_path / "planner"
    shutil.copytree(ROOT / "deploy" / "examples" / "planner", folder)
    trainwright = f"""trainwright() {{ {sys.executable} -c 'from trainwright.cli import app; app()' "$@"; }}"""
    script = "\n".join(["set -e", trainwright, *commands()])
    done = subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "profiles estimated" in done.stdout
    assert "device times emulated" in done.stdout
    assert "sets the pace" in done.stdout


def test_the_mixed_cluster_in_the_examples_is_what_its_command_writes(tmp_path: Path) -> None:
    command = next(line for line in commands() if line.startswith("trainwright cluster"))
    words = command.removeprefix("trainwright ").split(">")[0].split()
    program = f"import sys; sys.argv[1:] = {words!r}; from trainwright.cli import app; app()"
    written = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    kept = (ROOT / "deploy" / "examples" / "planner" / "mixed-cluster.yaml").read_text(encoding="utf-8")
    assert written.splitlines()[1:] == kept.splitlines()[1:]
