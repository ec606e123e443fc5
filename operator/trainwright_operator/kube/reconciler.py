"""One task for each plan: snapshot, decide, apply; woken by events, and by itself soon while something is under way."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from trainwright_operator.flow.actions import Action, EmitEvent, PinPod, SetStatus
from trainwright_operator.flow.decide import decide, is_finished, seconds_until_next_look
from trainwright_operator.flow.pinning import is_gated
from trainwright_operator.flow.snapshot import PlanFacts, Snapshot
from trainwright_operator.kube import paths
from trainwright_operator.kube.api import Api, ApiError
from trainwright_operator.kube.apply import Applier
from trainwright_operator.kube.health import Pulse
from trainwright_operator.kube.observe import Memory, Observer
from trainwright_operator.kube.searches import Searches
from trainwright_operator.metrics import Metrics
from trainwright_operator.settings import Settings

logger = logging.getLogger(__name__)

RESYNC_SECONDS = 30.0
"""How often all plans are listed: it finds what a lost watch missed, and probes the API server for the health check."""
_SOON_SECONDS = 0.2
"""After a pass that did something the next one follows at once: most steps need no waiting."""
_MAX_BACKOFF_SECONDS = 30.0
_PASSES_AT_ONCE = 8


class Reconciler:
    """All plans' tasks."""

    def __init__(self, api: Api, settings: Settings, metrics: Metrics, pulse: Pulse) -> None:
        self._api = api
        self._settings = settings
        self._metrics = metrics
        self._pulse = pulse
        self._observer = Observer(api, settings)
        self._searches = Searches(settings.concurrent_searches)
        metrics.searches_are(self._searches.running, self._searches.waiting)
        self._applier = Applier(api, self._searches)
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._calls: dict[tuple[str, str], asyncio.Event] = {}
        self._names: dict[str, tuple[str, str]] = {}
        self._generations: dict[tuple[str, str], int] = {}
        self._placement = asyncio.Lock()
        self._passes = asyncio.Semaphore(_PASSES_AT_ONCE)
        self._stopping = False

    def wake(self, namespace: str, name: str) -> None:
        """Look at the plan now. What calls may be old news; the pass reads afresh."""
        if self._stopping:
            return  # the lease is about to be handed back: no pass may begin any more
        key = (namespace, name)
        self._calls.setdefault(key, asyncio.Event()).set()
        if key not in self._tasks:
            self._tasks[key] = asyncio.create_task(self._lead(key), name=f"plan {namespace}/{name}")

    def wake_owner(self, uid: str) -> None:
        """Look at the plan with that uid, if it is known."""
        if uid in self._names:
            self.wake(*self._names[uid])

    async def resync(self) -> None:
        """List all plans for ever and wake those that have no task, changed or are gone; the heal of whatever was missed."""
        told: dict[str, int] = {}
        while True:
            for namespace in self._settings.namespaces or ("",):
                # Each for itself: one that was deleted must not keep the others' plans from being found.
                try:
                    items = await self._api.list(paths.plans(namespace))
                except ApiError as error:
                    if told.get(namespace) != error.status:
                        logger.warning("listing the plans of %s failed: %s", namespace or "all namespaces", error)
                    told[namespace] = error.status
                    if error.is_missing or error.status == 403:
                        self._pulse.beat()  # an answer, though not the one that was hoped for
                    continue
                if told.pop(namespace, None) is not None:
                    logger.info("the plans of %s are listed again", namespace or "all namespaces")
                self._wake_changed(namespace, items)
                self._metrics.listed()
                self._pulse.beat()
            await asyncio.sleep(RESYNC_SECONDS)

    def _wake_changed(self, namespace: str, items: Sequence[dict[str, Any]]) -> None:
        """Those of a namespace, or of all, of which the last pass saw another generation, or none."""
        listed = {(one["metadata"]["namespace"], one["metadata"]["name"]): one["metadata"] for one in items}
        for key, meta in listed.items():
            if key not in self._tasks or self._generations.get(key) not in (None, meta.get("generation")):
                self.wake(*key)
        for key in set(self._tasks).difference(listed):
            if namespace in ("", key[0]):
                self.wake(*key)

    async def stop(self) -> None:
        """End all tasks; the cluster holds everything that is needed to go on."""
        self._stopping = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _lead(self, key: tuple[str, str]) -> None:
        """Passes until the plan is gone."""
        memory = Memory()
        uid = told = ""
        failures = 0
        try:
            while True:
                self._calls[key].clear()
                try:
                    async with self._passes:
                        plan, pause = await self._pass(key, memory)
                    failures, told = 0, ""
                    if plan is None or (uid and plan.uid != uid):
                        if plan is not None:
                            self._calls[key].set()
                        return
                    uid = plan.uid
                    self._names[uid] = key
                    self._generations[key] = plan.generation
                except ApiError as error:
                    failures += 1
                    pause = min(2.0**failures, _MAX_BACKOFF_SECONDS) * random.uniform(0.5, 1.0)  # noqa: S311 - jitter
                    level = logging.DEBUG if str(error) == told else logging.WARNING
                    logger.log(level, "plan %s/%s: %s; again in %.1f s", *key, error, pause)
                    told = str(error)
                await self._pause(key, pause)
        except Exception:
            # A defect. The plan is taken up again at the next re-sync; the process stays up for the others.
            logger.exception("plan %s/%s: the pass broke down", *key)
            self._metrics.reconcile_failed()
        finally:
            self._forget(key, uid)

    def _forget(self, key: tuple[str, str], uid: str) -> None:
        self._tasks.pop(key, None)
        self._names.pop(uid, None)
        self._generations.pop(key, None)
        self._searches.forget(uid)
        self._metrics.forget(*key)
        if self._calls.pop(key).is_set():
            asyncio.get_running_loop().call_soon(self.wake, *key)

    async def _pause(self, key: tuple[str, str], seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._calls[key].wait()
        except TimeoutError:
            return

    async def _pass(self, key: tuple[str, str], memory: Memory) -> tuple[PlanFacts | None, float]:
        """One pass; the plan as it was found, and the seconds until the next one unless something calls."""
        started, failing = time.monotonic(), memory.failing
        try:
            plan = await self._observer.plan(*key)
            if plan is None:
                return None, 0.0
            snapshot = await self._observer.snapshot(plan, memory, self._searches.facts(plan.uid))
            if any(is_gated(pod) for pod in snapshot.pods):
                async with self._placement:
                    # Anew, under the lock: two plans must never both see the same devices free. Logs place nobody.
                    facts = self._searches.facts(plan.uid)
                    snapshot = await self._observer.snapshot(plan, memory, facts, read=snapshot.pods)
                    pause = await self._decide(snapshot, memory)
            else:
                pause = await self._decide(snapshot, memory)
        except ApiError:
            self._metrics.reconcile_failed()
            if memory.failing is failing:
                memory.failing = None  # the cluster could not even be looked at, so nothing says that it still refuses
            raise
        self._metrics.reconciled(time.monotonic() - started)
        self._pulse.beat()
        return plan, pause

    async def _decide(self, snapshot: Snapshot, memory: Memory) -> float:
        now = datetime.now(UTC)
        plan = snapshot.plan
        actions = decide(snapshot, now)
        _log(plan, actions)
        try:
            await self._applier.apply(plan, actions, memory)
        finally:
            if any(isinstance(action, PinPod) for action in actions):
                self._observer.occupancy.forget()
        status = next((action.status for action in actions if isinstance(action, SetStatus)), plan.status)
        self._metrics.status_is(plan, status)
        if is_finished(snapshot):
            self._searches.forget(plan.uid)
        if any(not isinstance(action, SetStatus | EmitEvent) for action in actions):
            return _SOON_SECONDS
        return seconds_until_next_look(snapshot, now)


def _log(plan: PlanFacts, actions: Sequence[Action]) -> None:
    for action in actions:
        if isinstance(action, EmitEvent):
            logger.info("plan %s/%s: %s: %s", plan.namespace, plan.name, action.reason, action.message)
        elif not isinstance(action, SetStatus):
            name = getattr(action, "name", "")
            logger.info("plan %s/%s: %s %s", plan.namespace, plan.name, type(action).__name__, name)
