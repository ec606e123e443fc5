"""Command that records the golden files anew: `python tests/golden/record.py` (README.md says when)."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
NEEDED = (".", "../operator/simulation", "../worker/oracles", "../../benchmarks")
PARTS = ("estimates", "schemas", "searches", "decisions", "nodes")


def main(names: list[str]) -> None:
    if unknown := set(names) - set(PARTS):
        sys.exit(f"unknown part: {', '.join(sorted(unknown))}; choose some of {', '.join(PARTS)}, or none for all")
    sys.path[:0] = [str((FOLDER / folder).resolve()) for folder in NEEDED]
    for name in names or PARTS:
        golden = importlib.import_module(f"golden_{name}")
        before = golden.FILE.read_text() if golden.FILE.exists() else ""
        after = golden.text(golden.record())
        golden.FILE.write_text(after)
        print(  # noqa: T201 - a command
            f"{golden.FILE.name}: {'unchanged' if before == after else 'recorded'}, {len(after) / 1024:.0f} KiB"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
