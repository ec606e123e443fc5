"""What holds for every way to start a worker's processes: torch is loaded once, and each computes with one thread."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing import forkserver

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def one_thread() -> None:
    """Several devices' processes share a node's cores; libraries read these variables when they are loaded."""
    for name in _THREAD_VARIABLES:
        os.environ.setdefault(name, "1")


def few_words() -> None:
    """Torch warns of every lost connection with pages of addresses; who is lost is told in the worker's own words."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def start_server() -> None:
    """Start the server that a pod's processes are forked from, which loads torch (seconds of a core) once for them all.

    They are not forked from the pod's first process: that one runs threads of the rendezvous by then, and a process
    forked from a threaded one may wait for ever for a lock that a thread held.
    """
    multiprocessing.set_forkserver_preload(["trainwright_worker.process"])
    forkserver.ensure_running()


def forget_signal_handlers() -> None:
    """A forked process ends at a signal, as a new one would; its parent's handlers would only note it."""
    signal.set_wakeup_fd(-1)
    for number in _ENDING:
        signal.signal(number, signal.SIG_DFL)


def heed_signals(told: Callable[[str], None]) -> None:
    """Call `told` with a signal's name, in a thread of its own, when this process is asked to end.

    A handler would have to wait until the main thread is out of the collective or the rendezvous that keeps it; and
    without one a container's first process does not end at all. Other handlers may be set later, beside this.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    for number in _ENDING:
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=_wait_for_signal, args=(reading, told), name="signals", daemon=True).start()


def _wait_for_signal(reading: int, told: Callable[[str], None]) -> None:
    while numbers := os.read(reading, 1):
        if numbers[0] in _ENDING:
            told(signal.Signals(numbers[0]).name)
            return
