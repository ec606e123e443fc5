"""Lifecycle of the operator: settings, health and metrics, then the lease, then reconciliation, then shutdown."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from kubernetes.config import ConfigException
from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server

from trainwright.outside.plain_text import plain_text
from trainwright_operator.kube import health
from trainwright_operator.kube.client import connect, connect_for_lease
from trainwright_operator.kube.lease import Lease
from trainwright_operator.kube.reconciler import Reconciler
from trainwright_operator.kube.watch import watch_forever
from trainwright_operator.kube.write_guard import WriteGuard
from trainwright_operator.metrics import Metrics
from trainwright_operator.settings import Settings

logger = logging.getLogger("trainwright_operator")

_BROKEN_EXIT_CODE = 70
_COLLECT_AFTER = (10_000, 20, 20)
"""Thresholds of the garbage collector. With 1,000 plans a full collection holds the loop for 0.3 s, and Python's own
thresholds, made for small programs, ask for sixteen in the first minute: 4 of its 25 s of CPU."""
_STOP_SECONDS = 5.0
UNSEEN_SECONDS = 90.0
"""Within which Prometheus has scraped each new series at 0: more than a minute, which is its own default interval."""
_RECURSION_LIMIT = 25_000
"""Above the 10,000 levels that objects of the API server nest at most: json fails at Python's own 1,000, and one plan would
hide all others that are listed with it. A level takes less than 400 bytes of a stack of 8 MiB."""


def main() -> int:
    """Run until SIGTERM or SIGINT. Exit code 2: invalid settings."""
    sys.setrecursionlimit(_RECURSION_LIMIT)
    try:
        settings = Settings.from_environment()
        _log(settings.log_level)
        asyncio.run(_run(settings))
    except (ValueError, ConfigException) as error:
        sys.stderr.write(f"trainwright operator: {plain_text(str(error))}\n")
        return 2
    return 0


class PlainFormatter(logging.Formatter):
    """Formatter whose records cannot steer a terminal or pass for several: further lines of a record are indented.

    Records of libraries quote what came from outside, as tracebacks do.
    """

    def format(self, record: logging.LogRecord) -> str:
        return plain_text(super().format(record)).replace("\n", "\n    ")


def _log(level: str) -> None:
    logging.Formatter.converter = time.gmtime
    form = "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PlainFormatter(form, datefmt="%Y-%m-%dT%H:%M:%S"))
    logging.basicConfig(level=level, handlers=[handler])
    logging.getLogger("kopf").setLevel(max(logging.WARNING, logging.getLogger().level))
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # its retries; callers report their outcome
    logging.getLogger("kopf._core.reactor.running").setLevel(logging.ERROR)  # signals are handled here, not there


async def _run(settings: Settings) -> None:
    pulse, guard = health.Liveness(), WriteGuard()
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    metrics = Metrics(registry, unseen_seconds=UNSEEN_SECONDS)
    api = connect(guard, settings.identity)
    start_http_server(settings.metrics_port, registry=registry)
    health.serve(settings.health_port, pulse)
    stop, acquired = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    stopping = asyncio.create_task(stop.wait())

    lease = Lease(
        connect_for_lease(settings.identity),
        settings,
        guard,
        pulse=pulse,
        acquired=lambda: _call(loop, acquired.set),
        lost=lambda error: _exit_now("lease", error),
    )
    lease.start()
    waiting = asyncio.create_task(acquired.wait())
    await asyncio.wait({waiting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not acquired.is_set():
        waiting.cancel()
        await asyncio.to_thread(lease.stop)
        if not acquired.is_set():
            return
    metrics.leads()
    gc.set_threshold(*_COLLECT_AFTER)
    gc.freeze()  # what imports made stays: collections need not walk through it
    reconciler = Reconciler(api, settings, metrics, pulse)
    work = {
        asyncio.create_task(reconciler.resync(), name="re-sync"),
        asyncio.create_task(watch_forever(api, reconciler, settings), name="watch"),
    }
    await asyncio.wait({stopping, *work}, return_when=asyncio.FIRST_COMPLETED)
    for task in work:
        if task.done():
            _exit_now(task.get_name(), task.exception())
    logger.info("received a termination signal; stopping")
    await reconciler.stop()
    for task in work:
        task.cancel()
    await asyncio.wait(work, timeout=_STOP_SECONDS)
    await asyncio.to_thread(_hand_over, lease, guard)


def _hand_over(lease: Lease, guard: WriteGuard) -> None:
    """Release the lease once no write is under way; otherwise it expires, after the last of them has ended."""
    has_ended = guard.close()
    lease.stop()
    if has_ended:
        lease.release()
    else:
        logger.warning("writes are still under way; the lease is left to expire")


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    with suppress(RuntimeError):  # the loop was closed by a termination signal
        loop.call_soon_threadsafe(function)


def _exit_now(what: str, error: BaseException | None) -> NoReturn:
    """Exit immediately: without the lease another operator may act, so this one must not do anything more."""
    logger.critical("exiting because the task %r ended: %s: %s", what, type(error).__name__, error)
    os._exit(_BROKEN_EXIT_CODE)
