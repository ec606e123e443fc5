"""`make bench`: CPU seconds of the searches on one core, and of the papers' plain algorithms in the same run.

Every file `*_bench.py` next to this one has a `main()` that prints its part; arguments select files by name.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ORACLES = HERE.parent / "tests" / "planner" / "oracles"


def main(chosen: list[str]) -> None:
    """Run the named benchmarks, or all if none is named."""
    sys.path.insert(0, str(ORACLES))
    for path in sorted(HERE.glob("*_bench.py")):
        if not chosen or path.stem.removesuffix("_bench") in chosen:
            importlib.import_module(path.stem).main()


if __name__ == "__main__":
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = "1"  # before numpy is imported: seconds of one core
    main(sys.argv[1:])
