"""Watches of plans by kopf, restarted when the readable namespaces change.

Handlers only wake a plan's task, so missed events do no harm. Only `on.event` handlers are used: others make kopf
store the whole spec in an annotation, and timers or daemons add a finalizer, which would block deletion of plans while
no operator runs.

kopf waits at its end for every task of its event loop, so it gets a thread and a loop of its own. That end may never
come: when one task fails kopf stops the others, and a watch that is stopped together with its pausing task takes the
stop for a pause and restarts. The end of the first kopf task is therefore reported, not the end of all.

Only readable namespaces are watched, rechecked periodically. A deleted namespace takes the operator's rights with it
and may return without them, and kopf ends if one of its watches stays refused; leaving the namespace out keeps the
other plans watched.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast

import kopf

from trainwright_operator import plan_resource
from trainwright_operator.api import GROUP, PLURAL, VERSION
from trainwright_operator.flow.gangs.launchers.registry import LAUNCHERS
from trainwright_operator.flow.names import PLAN_UID_LABEL
from trainwright_operator.flow.snapshot import JobFacts, PlanFacts, PodFacts
from trainwright_operator.kube import client, object_facts
from trainwright_operator.kube.client import Api, ApiError
from trainwright_operator.kube.object_cache import WatchEvent, version_of
from trainwright_operator.kube.reconciler import Reconciler
from trainwright_operator.settings import Settings

Found = PlanFacts | PodFacts | JobFacts


class KopfWatch:
    """kopf in a thread of its own. `ended` returns or raises when kopf ends unexpectedly."""

    def __init__(self, reconciler: Reconciler, settings: Settings) -> None:
        self._reconciler = reconciler
        self._settings = settings
        # No threading.Event: kopf would wait for it in its loop's thread pool, which would block the end of the loop.
        self._stop: Future[None] = Future()
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()

    def start(self) -> None:
        """Start watching."""
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def stop(self) -> None:
        """Request the end without waiting for it."""
        with suppress(InvalidStateError):  # it has ended already
            self._stop.set_result(None)

    async def ended(self) -> None:
        """Wait until kopf ends."""
        await self._ended

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            asyncio.run(self._watch())
        except BaseException as error:  # noqa: BLE001 - the waiting loop reports whatever ended it
            failure = error
        self._call_end(failure)

    async def _watch(self) -> None:
        tasks = await kopf.spawn_tasks(
            registry=_registry(self._observe, self._settings.worker_image),
            settings=kopf_settings(),
            standalone=True,  # the lease replaces peering
            # Set explicitly: kopf's default is the user's name, which an image's bare user id lacks.
            identity=cast("Any", self._settings.identity),  # a string, whose type kopf does not export
            clusterwide=not self._settings.namespaces,
            namespaces=self._settings.namespaces,
            stop_flag=asyncio.wrap_future(self._stop),
        )
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        failures = (task.exception() for task in done if not task.cancelled())
        self._call_end(next((failure for failure in failures if failure is not None), None))
        await kopf.run_tasks(tasks)  # ends the others in order, as far as they let it

    def _call_end(self, failure: BaseException | None) -> None:
        with suppress(RuntimeError):  # the loop closed before kopf ended
            self._loop.call_soon_threadsafe(self._tell_end, failure)

    def _tell_end(self, failure: BaseException | None) -> None:
        if self._ended.done():  # already reported, or no longer awaited
            return
        if failure is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(RuntimeError(f"{type(failure).__name__}: {failure}"))

    def _observe(self, event: WatchEvent) -> None:
        """Pass an event from kopf's thread to the plans' loop."""
        self._loop.call_soon_threadsafe(self._reconciler.observe, event)


def _registry(observe: Callable[[WatchEvent], None], default_image: str) -> kopf.OperatorRegistry:
    """Return the registry with all handlers, which convert objects in the thread of the watch."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    def login(**options: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**options) or kopf.login_with_kubeconfig(**options)

    handle = partial(event_handler, observe)

    def plan_facts(body: dict[str, Any]) -> PlanFacts:
        return plan_resource.plan_facts(body, default_image)

    present = {PLAN_UID_LABEL: kopf.PRESENT}
    kopf.on.event(GROUP, VERSION, PLURAL, id="plan", registry=registry)(handle(plan_facts))
    for launcher in LAUNCHERS.values():
        convert = partial(object_facts.job_facts, launcher=launcher)
        kopf.on.event(*launcher.api, labels=present, id=launcher.api.plural, registry=registry)(
            handle(convert, object_facts.is_of_plan)
        )
    kopf.on.event("", "v1", "pods", labels=present, id="pod", registry=registry)(
        handle(object_facts.pod_facts, object_facts.is_of_gang)
    )
    return registry


def event_handler(
    observe: Callable[[WatchEvent], None],
    convert: Callable[[dict[str, Any]], Found],
    is_owned: Callable[[dict[str, Any]], bool] = lambda _: True,
) -> Callable[..., Any]:
    """Return kopf's handler of a watch, which passes on events about converted objects."""

    async def changed(body: kopf.Body, event: Any, type: str | None, **_: Any) -> None:  # noqa: A002 - kopf's name
        resource = dict(body)
        event_facts = watch_event(resource, convert(resource), type, is_owned=is_owned(resource))
        # Half of the object, which kopf keeps for some time. The body is a view of it, and a plan's facts need them.
        event["object"]["metadata"].pop("managedFields", None)
        observe(event_facts)

    return changed


def watch_event(resource: dict[str, Any], facts: Found, kind: str | None, *, is_owned: bool) -> WatchEvent:
    """Return the event of a watch about a converted object; `kind`: as the watch says, None at a listing.

    An object that is not owned by what its labels tell is none of the plan's: a copy, or left by its owner's deletion.
    """
    meta = resource["metadata"]
    is_going = isinstance(facts, PlanFacts) and "deletionTimestamp" in meta
    return WatchEvent(
        facts=facts,
        owner=(meta.get("labels") or {}).get(PLAN_UID_LABEL, ""),
        version=version_of(meta.get("resourceVersion", "")),
        deleted=kind == "DELETED" or is_going or not is_owned,
        is_listing=kind is None,
        is_new=kind == "ADDED",
    )


def kopf_settings() -> kopf.OperatorSettings:
    """Return kopf's settings."""
    chosen = kopf.OperatorSettings()
    # A handler's progress must not be stored in the status, whose schema would drop it.
    chosen.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=GROUP)
    chosen.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=GROUP)
    # The flow creates the Events, one for each change of a condition.
    chosen.posting.enabled = False
    # A periodic reconnect repairs any broken watch.
    chosen.watching.server_timeout = 600
    chosen.watching.connect_timeout = 10
    chosen.networking.request_timeout = 60
    chosen.networking.connect_timeout = 10
    # The default grows to ten minutes, too long after a recovery.
    chosen.queueing.error_delays = (1, 1, 2, 3, 5, 8, 13, 21, 34, 60)
    # Only children of plans, out of thousands of pods and jobs in the cluster.
    chosen.watching.label_selectors["", "v1", "pods"] = PLAN_UID_LABEL
    for launcher in LAUNCHERS.values():
        chosen.watching.label_selectors[launcher.api] = PLAN_UID_LABEL
    # kopf would kill the whole process; its thread ends with the process anyway.
    chosen.process.ultimate_exiting_timeout = None
    return chosen


logger = logging.getLogger(__name__)

RECHECK_SECONDS = 20.0
"""Interval of checks on each named namespace; kopf tolerates refusals for 54 s."""
_RARELY_SECONDS = 600.0
"""A watch that ends at most this often is restarted: kopf ends after a single 401, which may be transient."""


async def watch_forever(api: Api, reconciler: Reconciler, settings: Settings) -> None:
    """Watch forever, restarting when the readable namespaces change or after a rare end.

    Raise the cause of repeated ends.
    """
    readable = await _readable(api, settings.namespaces, before=settings.namespaces)
    last_end = -_RARELY_SECONDS
    while True:
        watched = readable
        watch = KopfWatch(reconciler, replace(settings, namespaces=watched))
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
                    logger.warning("the watch ended and is restarted: %s", ended.exception())
                    break
        finally:
            watch.stop()
            _let_go(ended)
        if readable != watched:
            logger.info("watching namespaces: %s", ", ".join(readable) or "none, as none may be read")


async def _readable(api: Api, namespaces: tuple[str, ...], before: tuple[str, ...]) -> tuple[str, ...]:
    """Return the namespaces whose plans can be listed; without an answer, a namespace keeps its previous state."""

    async def is_readable(namespace: str) -> bool:
        try:
            await api.get(client.plans_path(namespace), limit="1")
        except ApiError as error:
            return error.status != 403 and namespace in before
        return True

    readable = await asyncio.gather(*map(is_readable, namespaces))
    return tuple(namespace for namespace, readable in zip(namespaces, readable, strict=True) if readable)


def _let_go(ended: asyncio.Task[None]) -> None:
    if ended.done() and not ended.cancelled():
        ended.exception()  # retrieved, because asyncio warns otherwise
    ended.cancel()
