"""Lifecycle of the operator: settings, health and metrics, then the lease, then reconciliation, then shutdown."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from typing import NoReturn

from kubernetes.config import ConfigException
from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server

from trainwright_operator.kube import health
from trainwright_operator.kube.client import connect
from trainwright_operator.kube.lease import Lease
from trainwright_operator.kube.reconciler import Reconciler
from trainwright_operator.kube.watch import watch_forever
from trainwright_operator.metrics import Metrics
from trainwright_operator.settings import Settings

logger = logging.getLogger("trainwright_operator")

_BROKEN_EXIT_CODE = 70
_STOP_SECONDS = 5.0


def main() -> int:
    """Run until SIGTERM or SIGINT. Exit code 2: invalid settings."""
    try:
        settings = Settings.from_environment()
        _log(settings.log_level)
        asyncio.run(_run(settings))
    except (ValueError, ConfigException) as error:
        sys.stderr.write(f"trainwright operator: {error}\n")
        return 2
    return 0


def _log(level: str) -> None:
    logging.Formatter.converter = time.gmtime
    form = "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=level, format=form, datefmt="%Y-%m-%dT%H:%M:%S", stream=sys.stderr)
    logging.getLogger("kopf").setLevel(max(logging.WARNING, logging.getLogger().level))
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # its retries; callers report their outcome
    logging.getLogger("kopf._core.reactor.running").setLevel(logging.ERROR)  # signals are handled here, not there


async def _run(settings: Settings) -> None:
    pulse = health.Liveness()
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    metrics = Metrics(registry)
    api = connect()
    start_http_server(settings.metrics_port, registry=registry)
    health.serve(settings.health_port, pulse)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    stopping = asyncio.create_task(stop.wait())

    lease = Lease(api, settings, pulse)
    waiting = asyncio.create_task(lease.acquire())
    await asyncio.wait({waiting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if waiting.done() and waiting.exception() is not None:
        _exit_now("acquire lease", waiting.exception())
    if stop.is_set():
        waiting.cancel()
        return
    metrics.leads()
    reconciler = Reconciler(api, settings, metrics, pulse)
    work = {
        asyncio.create_task(lease.keep(), name="lease"),
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
    await lease.release()


def _exit_now(what: str, error: BaseException | None) -> NoReturn:
    """Exit immediately: without the lease another operator may act, so this one must not do anything more."""
    logger.critical("exiting because the task %r ended: %s: %s", what, type(error).__name__, error)
    os._exit(_BROKEN_EXIT_CODE)
