"""kopf's part: watching. A handler only wakes a plan's task, so no edge that is missed can do harm.

Only `on.event` handlers are used: with others kopf keeps the whole spec in an annotation, and with timers or daemons it
adds a finalizer, which would keep plans from being deleted while no operator runs.

kopf takes every task of its event loop for its own and waits for them at its end, so it gets a thread and a loop of its own.
That end may never come: when one task fails kopf stops the others, and a watch that is stopped together with the task that
would pause it takes that for a pause and begins anew. So the first of kopf's tasks that ends is told, not the end of all.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

import kopf
from kopf._core.engines.peering import Identity

from trainwright_operator.api import GROUP, PLURAL, VERSION
from trainwright_operator.flow.names import PLAN_UID_LABEL
from trainwright_operator.kube.reconciler import Reconciler
from trainwright_operator.settings import Settings


class Watch:
    """kopf in its thread. `ended` returns, or raises, when it ends by itself, which it never should."""

    def __init__(self, reconciler: Reconciler, settings: Settings) -> None:
        self._reconciler = reconciler
        self._settings = settings
        # No threading.Event: kopf would wait for one in a thread of its loop's pool, and the loop's end for that thread.
        self._stop: Future[None] = Future()
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()

    def start(self) -> None:
        """Begin to watch."""
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def stop(self) -> None:
        """Tell it to end; nothing of ours depends on when it does."""
        with suppress(InvalidStateError):  # it has ended already
            self._stop.set_result(None)

    async def ended(self) -> None:
        """Wait for its end."""
        await self._ended

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            asyncio.run(self._watch())
        except BaseException as error:  # noqa: BLE001 - whatever ended it is told in the loop that waits for it
            failure = error
        self._call_end(failure)

    async def _watch(self) -> None:
        tasks = await kopf.spawn_tasks(
            registry=_registry(self._call),
            settings=kopf_settings(),
            standalone=True,  # the lease says who works, so no peering
            # Given, or kopf asks for the user's name, which an image's bare user id does not have.
            identity=Identity(self._settings.identity),
            clusterwide=not self._settings.namespaces,
            namespaces=self._settings.namespaces,
            stop_flag=asyncio.wrap_future(self._stop),
        )
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        failures = (task.exception() for task in done if not task.cancelled())
        self._call_end(next((failure for failure in failures if failure is not None), None))
        await kopf.run_tasks(tasks)  # ends the others in order, as far as they let it

    def _call_end(self, failure: BaseException | None) -> None:
        with suppress(RuntimeError):  # the loop is closed: told to end, and quicker than kopf
            self._loop.call_soon_threadsafe(self._tell_end, failure)

    def _tell_end(self, failure: BaseException | None) -> None:
        if self._ended.done():  # told already, or nobody waits any more
            return
        if failure is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(RuntimeError(f"{type(failure).__name__}: {failure}"))

    def _call(self, namespace: str, name: str, uid: str) -> None:
        """From kopf's thread to the loop of the plans' tasks: a plan by its name, or the owner of a child by its uid."""
        if uid:
            self._loop.call_soon_threadsafe(self._reconciler.wake_owner, uid)
        else:
            self._loop.call_soon_threadsafe(self._reconciler.wake, namespace, name)


def _registry(call: Callable[[str, str, str], None]) -> kopf.OperatorRegistry:
    """The handlers."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    def login(**options: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**options) or kopf.login_with_kubeconfig(**options)

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def plan_changed(namespace: str | None, name: str | None, **_: Any) -> None:
        if namespace and name:
            call(namespace, name, "")

    async def child_changed(labels: Mapping[str, str], **_: Any) -> None:
        call("", "", labels[PLAN_UID_LABEL])

    present = {PLAN_UID_LABEL: kopf.PRESENT}
    kopf.on.event("kubeflow.org", "v1", "pytorchjobs", labels=present, id="job", registry=registry)(child_changed)
    kopf.on.event("", "v1", "pods", labels=present, id="pod", registry=registry)(child_changed)
    return registry


def kopf_settings() -> kopf.OperatorSettings:
    """Kopf's settings, each with its reason."""
    chosen = kopf.OperatorSettings()
    # Should a later handler keep progress, it must not go into the status, whose schema would drop it.
    chosen.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=GROUP)
    chosen.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=GROUP)
    # Events are made by the flow, one for each change of a condition.
    chosen.posting.enabled = False
    # A watch that is closed by the server from time to time heals by itself whatever went wrong with it.
    chosen.watching.server_timeout = 600
    chosen.watching.connect_timeout = 10
    chosen.networking.request_timeout = 60
    chosen.networking.connect_timeout = 10
    # The default grows to ten minutes; nobody waits that long for an operator that recovers.
    chosen.queueing.error_delays = (1, 1, 2, 3, 5, 8, 13, 21, 34, 60)
    # The server sends only pods and jobs of plans, of the thousands that a cluster may have.
    chosen.watching.label_selectors["", "v1", "pods"] = PLAN_UID_LABEL
    chosen.watching.label_selectors["kubeflow.org", "v1", "pytorchjobs"] = PLAN_UID_LABEL
    # kopf would kill the whole process; its thread ends with the process anyway.
    chosen.process.ultimate_exiting_timeout = None
    return chosen
