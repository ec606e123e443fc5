"""The README's table of metrics is what the operator exports."""

from __future__ import annotations

import runpy
from pathlib import Path

from trainwright_operator.metrics import TABLE

ROOT = Path(__file__).resolve().parents[2]


def test_the_readme_lists_every_metric() -> None:
    readme = (ROOT / "README.md").read_text()
    with_metrics = runpy.run_path(str(ROOT / "deploy" / "development" / "generate.py"))["with_metrics"]
    assert with_metrics(readme) == readme, "run `make generate`"
    assert all(f"| `{name}` |" in readme for name in TABLE)
