"""Start of a worker's processes: thread limits, torch preloaded by a fork server, and signal watching."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing import forkserver

from trainwright.worker_api import NODE_NAME_VARIABLE, Cause, Failure, FailureReason
from trainwright_worker.gang import report_writer

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_TERMINATION_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def limit_threads() -> None:
    """Limit libraries to one thread per process, since several devices' processes share a node's cores.

    Call it before they are loaded: they read these variables then.
    """
    for name in _THREAD_VARIABLES:
        os.environ.setdefault(name, "1")


def silence_torch_logs() -> None:
    """Silence torch's pages of addresses on every lost connection; the worker reports the lost peer itself."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def start_fork_server(module: str) -> None:
    """Start the fork server of a pod's processes, which loads their module and torch once for all (seconds of a core).

    The pod's first process cannot be forked instead: it runs rendezvous threads by then, and a process forked from a
    threaded one may deadlock on a lock that a thread held.
    """
    multiprocessing.set_forkserver_preload([module])
    forkserver.ensure_running()


def reset_signal_handlers() -> None:
    """Restore default signal handlers in a forked process; inherited ones would only note the signal."""
    signal.set_wakeup_fd(-1)
    for number in _TERMINATION_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def watch_signals(on_signal: Callable[[str], None]) -> None:
    """Call `on_signal` with the signal's name, in a separate thread, when this process is asked to terminate.

    A Python handler would run only after the collective or rendezvous that blocks the main thread; without any handler a
    container's first process ignores the signal. Other handlers may be installed later in addition.
    """
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    for number in _TERMINATION_SIGNALS:
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    threading.Thread(target=_wait_for_signal, args=(read_fd, on_signal), name="signals", daemon=True).start()


def _wait_for_signal(read_fd: int, on_signal: Callable[[str], None]) -> None:
    while received := os.read(read_fd, 1):
        if received[0] in _TERMINATION_SIGNALS:
            on_signal(signal.Signals(received[0]).name)
            return


_EXIT_DELAY_SECONDS = 4.0
"""Delay between reporting a termination and exiting, within the pod's termination grace period."""


class SigtermHandler:
    """Handler of the signal that terminates this pod, run in a separate thread.

    Attributes:
        notify_gang: reports the cause to the other pods; assigned once the gang is reachable.
    """

    def __init__(self) -> None:
        self.notify_gang: Callable[[Cause], None] = lambda _cause: None
        self._reported = threading.Event()
        self._failure: Failure | None = None

    def install(self) -> None:
        """Start watching for signals."""
        watch_signals(self._on_signal)

    def wait_until_reported(self) -> None:
        """Wait until the termination is reported."""
        self._reported.wait(_EXIT_DELAY_SECONDS)

    def terminate_pod(self, failure: Failure) -> None:
        """Terminate the pod with this failure, as if by a signal."""
        self._failure = failure
        os.kill(os.getpid(), signal.SIGTERM)

    def _on_signal(self, signal_name: str) -> None:
        node = os.environ.get(NODE_NAME_VARIABLE)
        message = f"the pod was stopped by a signal ({signal_name}): it was deleted, evicted or preempted"
        failure = self._failure or Failure(FailureReason.TERMINATED, message, node=node)
        report_writer.write_failure(failure)
        self.notify_gang(Cause(failure.reason, failure.message, node))
        self._reported.set()
        # Meanwhile the main thread ends the pod's processes, unless it waits for pods that never come.
        threading.Event().wait(_EXIT_DELAY_SECONDS)
        sys.stderr.flush()
        os._exit(1)
