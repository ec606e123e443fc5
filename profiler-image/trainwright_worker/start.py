"""How a worker's processes start: forked from one server that has torch loaded, one thread of computation each."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import forkserver

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def start_server() -> None:
    """Start the server that processes are forked from, so that it loads torch (seconds of a core) once for all.

    Libraries read their thread counts when they are loaded, so these are set before.
    """
    for name in _THREAD_VARIABLES:
        os.environ.setdefault(name, "1")
    multiprocessing.set_forkserver_preload(["trainwright_worker.process"])
    forkserver.ensure_running()
