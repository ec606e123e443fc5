"""Which namespaces are watched: those that may be read, asked again from time to time.

A namespace that was deleted takes the operator's rights there with it, and may come again without them. kopf gives up
altogether where one of its watches stays refused; so such a namespace is left out until it may be read again, and the
others' plans never notice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

from trainwright_operator.kube import paths
from trainwright_operator.kube.api import Api, ApiError
from trainwright_operator.kube.reconciler import Reconciler
from trainwright_operator.kube.watch import Watch
from trainwright_operator.settings import Settings

logger = logging.getLogger(__name__)

RECHECK_SECONDS = 20.0
"""How often each named namespace is asked for; kopf bears refusals for 54 s."""
_RARELY_SECONDS = 600.0
"""A watch that ends no more often than this is begun anew: kopf gives up over a single 401, which may be passing."""


async def watch_for_ever(api: Api, reconciler: Reconciler, settings: Settings) -> None:
    """Watch, anew whenever other namespaces may be read, or rarely. Raises what ends watches again and again."""
    readable = await _readable(api, settings.namespaces, before=settings.namespaces)
    last_end = -_RARELY_SECONDS
    while True:
        watched = readable
        watch = Watch(reconciler, replace(settings, namespaces=watched))
        if watched or not settings.namespaces:
            watch.start()
        ended = asyncio.create_task(watch.ended())
        try:
            while readable == watched:
                await asyncio.wait({ended}, timeout=RECHECK_SECONDS)
                readable = await _readable(api, settings.namespaces, before=watched)
                if readable == watched and ended.done():
                    if time.monotonic() - last_end < _RARELY_SECONDS:
                        return ended.result()
                    last_end = time.monotonic()
                    logger.warning("the watch ended and is begun anew: %s", ended.exception())
                    break
        finally:
            watch.stop()
            _let_go(ended)
        if readable != watched:
            logger.info("watching now: %s", ", ".join(readable) or "nothing, no namespace may be read")


async def _readable(api: Api, namespaces: tuple[str, ...], before: tuple[str, ...]) -> tuple[str, ...]:
    """Those whose plans may be listed. One that gives no answer now is as it was."""

    async def is_readable(namespace: str) -> bool:
        try:
            await api.get(paths.plans(namespace), limit="1")
        except ApiError as error:
            return error.status != 403 and namespace in before
        return True

    found = await asyncio.gather(*map(is_readable, namespaces))
    return tuple(namespace for namespace, readable in zip(namespaces, found, strict=True) if readable)


def _let_go(ended: asyncio.Task[None]) -> None:
    if ended.done() and not ended.cancelled():
        ended.exception()  # looked at, or asyncio complains; the next watch is what becomes of it
    ended.cancel()
