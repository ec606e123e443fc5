"""What holds for every way to start a worker's processes: torch is loaded once, and each computes with one thread."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing import forkserver

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def one_thread() -> None:
    """Several devices' processes share a node's cores; libraries read these variables when they are loaded."""
    for name in _THREAD_VARIABLES:
        os.environ.setdefault(name, "1")


def start_server() -> None:
    """Start the server that a pod's processes are forked from, which loads torch (seconds of a core) once for them all.

    They are not forked from the pod's first process: that one runs threads of the rendezvous by then, and a process
    forked from a threaded one may wait for ever for a lock that a thread held.
    """
    multiprocessing.set_forkserver_preload(["trainwright_worker.process"])
    forkserver.ensure_running()


def forget_signal_handlers() -> None:
    """A forked process ends at a signal, as a new one would; its parent's handlers would only note it."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
