"""`make bench`: what searches cost in CPU seconds on one core, beside the papers' plain algorithms in the same run.

Every file `*_bench.py` beside this one has a `main()` that prints its part; names on the command line choose some.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ORACLES = HERE.parent / "tests" / "planner" / "oracles"


def main(chosen: list[str]) -> None:
    """Run the benchmarks of these names, all where none is given."""
    sys.path.insert(0, str(ORACLES))
    for path in sorted(HERE.glob("*_bench.py")):
        if not chosen or path.stem.removesuffix("_bench") in chosen:
            importlib.import_module(path.stem).main()


if __name__ == "__main__":
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = "1"  # before numpy is imported: seconds of one core
    main(sys.argv[1:])
