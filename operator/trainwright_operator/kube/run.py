"""The operator's life: settings, health and metrics first, then the lease, then the work, then out quickly."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys

import kopf
from kubernetes.config import ConfigException
from prometheus_client import CollectorRegistry, start_http_server

from trainwright_operator.kube import handlers, health
from trainwright_operator.kube.api import connect
from trainwright_operator.kube.lease import Lease
from trainwright_operator.kube.reconciler import Reconciler
from trainwright_operator.metrics import Metrics
from trainwright_operator.settings import Settings

logger = logging.getLogger("trainwright_operator")

_LEASE_LOST_EXIT_CODE = 70
_STOP_SECONDS = 5.0


def main() -> int:
    """Run until SIGTERM or SIGINT. 2: the settings are wrong, told in one sentence."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("kopf").setLevel(logging.WARNING)
    try:
        settings = Settings.from_environment()
        asyncio.run(_run(settings))
    except (ValueError, ConfigException) as error:
        sys.stderr.write(f"trainwright operator: {error}\n")
        return 2
    return 0


async def _run(settings: Settings) -> None:
    pulse = health.Pulse()
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    api = connect()
    start_http_server(settings.metrics_port, registry=registry)
    health.serve(settings.health_port, pulse)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    lease = Lease(api, settings.lease_namespace, settings.identity, pulse)
    waiting = asyncio.create_task(lease.acquire())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({waiting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if stop.is_set():
        waiting.cancel()
        return
    keeping = asyncio.create_task(lease.keep())
    reconciler = Reconciler(api, settings, metrics, pulse)
    work = {
        asyncio.create_task(reconciler.resync(), name="re-sync"),
        asyncio.create_task(_watch(reconciler, settings, stop), name="watch"),
    }
    await asyncio.wait({keeping, stopping, *work}, return_when=asyncio.FIRST_COMPLETED)
    if keeping.done():
        # At once and hard: from here on another operator may act, and this one must not do one thing more.
        logger.critical("the lease is lost: %s", keeping.exception())
        os._exit(_LEASE_LOST_EXIT_CODE)
    for task in work:
        if task.done() and not stop.is_set():
            logger.critical("the %s ended by itself: %s", task.get_name(), task.exception())
            os._exit(1)
    logger.info("told to end")
    await reconciler.stop()
    for task in (keeping, *work):
        task.cancel()
    await asyncio.wait({keeping, *work}, timeout=_STOP_SECONDS)
    await lease.release()


async def _watch(reconciler: Reconciler, settings: Settings, stop: asyncio.Event) -> None:
    """kopf, until told to stop."""
    await kopf.operator(
        registry=handlers.registry_for(reconciler),
        settings=handlers.settings(),
        standalone=True,  # the lease says who works, so no peering
        clusterwide=not settings.namespaces,
        namespaces=settings.namespaces,
        stop_flag=stop,
    )
