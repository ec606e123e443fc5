"""What the tree promises: the standard library stays reachable, and generated files are what they are made from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_operator_folder_does_not_shadow_the_standard_library() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import operator; assert operator.eq(1, 1); import kopf"],
        cwd=ROOT,
        env={"PYTHONPATH": "."},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not (ROOT / "operator" / "__init__.py").exists()


def test_the_planner_loads_without_torch_and_kubernetes() -> None:
    program = (
        "import sys; sys.modules.update(torch=None, kubernetes=None, kopf=None);"
        "import trainwright.cli, trainwright.search, trainwright.orders, trainwright.documents"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
