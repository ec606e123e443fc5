"""How a worker's processes start: forked with torch already loaded, one thread of computation each."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.context import ForkContext, ForkServerContext

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def one_thread() -> None:
    """Several devices' processes share a node's cores; libraries read these variables when they are loaded."""
    for name in _THREAD_VARIABLES:
        os.environ.setdefault(name, "1")


def start_context(backend: str) -> ForkContext | ForkServerContext:
    """How processes are made, so that torch is loaded once a pod and not once a process: it takes seconds of a core.

    With gloo they are forked from the process that has loaded torch anyway. A process that may have touched the GPU's
    driver must not be forked, so with nccl a server is, which has loaded torch and nothing more.
    """
    if backend == "gloo":
        return multiprocessing.get_context("fork")
    multiprocessing.set_forkserver_preload(["trainwright_worker.process"])
    return multiprocessing.get_context("forkserver")


def forget_signal_handlers() -> None:
    """A forked process ends at a signal, as a new one would; its parent's handlers would only note it."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
