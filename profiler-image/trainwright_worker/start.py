"""How a worker's processes start: forked from one server that has torch loaded, one thread of computation each."""

from __future__ import annotations

import multiprocessing
import os

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def one_thread() -> None:
    """Libraries read these variables when they are loaded, so this comes before the first process starts."""
    for name in _THREAD_VARIABLES:
        os.environ.setdefault(name, "1")


def preload() -> None:
    """Load torch once a pod, not once a process: loading takes seconds of a core."""
    multiprocessing.set_forkserver_preload(["trainwright_worker.process"])
