"""Reconciler with one task for each plan: snapshot, decide, apply; woken by events and by its requeue delay."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

from trainwright_operator.flow.actions import SetStatus
from trainwright_operator.flow.decide import IDLE_REQUEUE_SECONDS, decide, is_finished, requeue_after_seconds
from trainwright_operator.flow.patience import seconds_until_deadline
from trainwright_operator.flow.quarantine import is_quarantined, released
from trainwright_operator.flow.snapshot import PlanFacts, Snapshot
from trainwright_operator.kube import client
from trainwright_operator.kube.apply import Applier, log_actions
from trainwright_operator.kube.claim_registry import ClaimRegistry
from trainwright_operator.kube.client import Api, ApiError
from trainwright_operator.kube.decision_runner import DecisionRunner, is_large
from trainwright_operator.kube.health import Liveness
from trainwright_operator.kube.isolation import BREAKS_BEFORE_QUARANTINE, VERSION, isolate
from trainwright_operator.kube.namespace_claims import RETRY_SECONDS, NamespaceClaims
from trainwright_operator.kube.object_cache import PlanKey, WatchEvent
from trainwright_operator.kube.orphaned_jobs import OrphanedJobs
from trainwright_operator.kube.search_pool import SearchPool
from trainwright_operator.kube.snapshot_reader import ReadCache, SnapshotReader, may_pin
from trainwright_operator.metrics import Metrics
from trainwright_operator.settings import SYSTEM_NAMESPACES, Settings

logger = logging.getLogger(__name__)

RESYNC_SECONDS = 30.0
"""Interval of listing all plans, which finds events that a lost watch missed, and probes the API server for the
health check."""
_IMMEDIATE_REQUEUE_SECONDS = 0.2
"""Requeue delay after a reconciliation with actions: most steps need no waiting."""
_DEBOUNCE_SECONDS = 0.2
"""Events of a gang's pods come together; one reconciliation is enough for them."""
_KEEP_STORED_SECONDS = 15.0
"""Requeue delay above which a plan's ConfigMaps are not kept in memory."""
_QUARANTINE_RETRY_SECONDS = 40.0
"""Pause after a quarantine that the API server refused."""
_PASSES_AT_ONCE = 8
_LARGE_PASSES_AT_ONCE = 3
"""Slots that large plans may hold: they wait for one process, and the others are read and written meanwhile."""


class Reconciler:
    """Tasks of all plans."""

    def __init__(self, api: Api, settings: Settings, metrics: Metrics, pulse: Liveness) -> None:
        self._api = api
        self._settings = settings
        self._metrics = metrics
        self._liveness = pulse
        self._snapshot_reader = SnapshotReader(api, settings)
        self._searches = SearchPool(settings.concurrent_searches, self.wake_owner)
        metrics.observe_searches(self._searches.running, self._searches.waiting)
        self._decisions = DecisionRunner()
        self._applier = Applier(api, self._searches, self._snapshot_reader.cache)
        self._tasks: dict[PlanKey, asyncio.Task[None]] = {}
        self._wake_events: dict[PlanKey, asyncio.Event] = {}
        self._names: dict[str, PlanKey] = {}
        self._generations: dict[PlanKey, int] = {}
        self._edited: set[PlanKey] = set()
        self._placement = asyncio.Lock()
        self._claims = ClaimRegistry()
        self._namespaces = NamespaceClaims(api, settings)
        self._orphans = OrphanedJobs(api, self._namespaces)
        self._passes = asyncio.Semaphore(_PASSES_AT_ONCE)
        self._large_passes = asyncio.Semaphore(_LARGE_PASSES_AT_ONCE)
        self._stopping = False

    def wake(self, namespace: str, name: str) -> None:
        """Requeue the plan now. Stale events do no harm, because the reconciliation reads anew."""
        if self._stopping:
            return  # the lease is about to be released: start no reconciliation
        if namespace in SYSTEM_NAMESPACES:
            logger.warning("plan %s/%s: Kubernetes' own namespaces are left alone", namespace, name)
            return
        key = (namespace, name)
        self._wake_events.setdefault(key, asyncio.Event()).set()
        if key not in self._tasks:
            self._tasks[key] = asyncio.create_task(self._run_plan(key), name=f"plan {namespace}/{name}")

    def _wake_edited(self, key: PlanKey) -> None:
        """Requeue a plan that was edited or deleted, also while it could not be read."""
        self._edited.add(key)
        self.wake(*key)

    def observe(self, event: WatchEvent) -> None:
        """Keep what the watch tells of a plan or of its child, and requeue the plan."""
        cache = self._snapshot_reader.cache
        if event.is_listing:
            cache.observe_listing(type(event.facts))
        if isinstance(event.facts, PlanFacts):
            is_complete = event.is_listing or event.is_new
            cache.observe_plan(event.facts, deleted=event.deleted, is_complete=is_complete, is_new=event.is_new)
            key = event.facts.namespace, event.facts.name
            # A change of the status alone is this operator's own.
            if event.deleted or self._generations.get(key) != event.facts.generation:
                self._wake_edited(key)
        else:
            cache.observe_child(event.owner, event.facts, event.version, deleted=event.deleted)
            self.wake_owner(event.owner)

    def wake_owner(self, uid: str) -> None:
        """Requeue the plan with that uid, if it is known."""
        if uid in self._names:
            self.wake(*self._names[uid])

    async def resync(self) -> None:
        """List all plans forever and wake those that are new, changed or deleted, to repair missed events."""
        versions: dict[str, int] = {}
        while True:
            for namespace in self._settings.namespaces or ("",):
                # Handle failures by namespace: a deleted one must not hide the others' plans.
                try:
                    owned = await self._orphans.find(namespace)
                    items = await self._api.list_metadata(client.plans_path(namespace))
                except ApiError as error:
                    if versions.get(namespace) != error.status:
                        logger.warning("listing the plans of %s failed: %s", namespace or "all namespaces", error)
                    versions[namespace] = error.status
                    if error.is_missing or error.status == 403:
                        self._liveness.record_success()  # any answer proves that the API server is reachable
                    continue
                if versions.pop(namespace, None) is not None:
                    logger.info("listing the plans of %s succeeds again", namespace or "all namespaces")
                self._wake_changed(namespace, items)
                await self._orphans.delete(owned, {item["metadata"]["uid"] for item in items} if owned else ())
                self._metrics.record_listing()
                self._liveness.record_success()
            self._claims.expect(self._tasks)
            await asyncio.sleep(RESYNC_SECONDS)

    def _wake_changed(self, namespace: str, items: Sequence[dict[str, Any]]) -> None:
        """Wake listed plans that are new or changed, and plans of the namespace that are gone."""
        listed = {(item["metadata"]["namespace"], item["metadata"]["name"]): item["metadata"] for item in items}
        for key, meta in listed.items():
            if key not in self._tasks or self._generations.get(key) not in (None, meta.get("generation")):
                self._snapshot_reader.cache.forget_plan(key)
                self._wake_edited(key)
        for key in set(self._tasks).difference(listed):
            if namespace in ("", key[0]):
                self._snapshot_reader.cache.forget_plan(key)
                self._wake_edited(key)

    async def stop(self) -> None:
        """Cancel all tasks; the cluster holds all state."""
        self._stopping = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._decisions.stop()

    async def _run_plan(self, key: PlanKey) -> None:
        """Reconcile until the plan is gone."""
        memory = ReadCache()
        uid = message = ""
        breaks, is_unread = 0, False
        try:
            while True:
                self._wake_events[key].clear()
                self._edited.discard(key)
                try:
                    plan, pause = await self._reconcile_once(key, memory)
                    breaks, message, is_unread = 0, "", False
                    if plan is None or (uid and plan.uid != uid):
                        if plan is not None:
                            self._wake_events[key].set()
                        return
                    uid = plan.uid
                    if plan.hidden_fields:
                        self._names.pop(uid, None)  # no news of its pods would do more than repeat the warning
                    else:
                        self._names[uid] = key
                except ApiError as error:
                    is_unread, held_for = memory.back_off.is_unread, memory.held_seconds()
                    pause = _IMMEDIATE_REQUEUE_SECONDS if memory.has_changed or held_for is None else held_for
                    level = logging.DEBUG if str(error) == message else logging.WARNING
                    logger.log(level, "plan %s/%s: %s; retrying in %.1f s", *key, error, pause)
                    message = str(error)
                except Exception as error:  # noqa: BLE001 - the process continues for the other plans
                    breaks += 1
                    pause = await self._record_break(key, error, breaks)
                self._wake_next(key, uid)
                await self._pause(key, pause, is_held=is_unread)
        finally:
            self._forget(key, uid)

    async def _record_break(self, key: PlanKey, error: Exception, breaks: int) -> float:
        """Record a reconciliation that broke, and quarantine the plan after several in a row. Return the requeue delay."""
        logger.error("plan %s/%s: reconciliation failed", *key, exc_info=error)
        self._metrics.record_reconcile_error()
        if breaks < BREAKS_BEFORE_QUARANTINE:
            return 2.0**breaks
        try:
            plan = await isolate(self._api, self._applier, key, error)
        except ApiError as refusal:
            logger.warning("plan %s/%s: cannot be quarantined: %s", *key, refusal)
            return _QUARANTINE_RETRY_SECONDS
        self._snapshot_reader.cache.forget_plan(key)
        if plan is not None:
            self._drop_work(plan.uid)
        return 0.0

    def _drop_work(self, uid: str) -> None:
        """Drop the plan's search and its places in the queue."""
        self._searches.discard(uid)
        self._claims.forget(uid)

    def _forget(self, key: PlanKey, uid: str) -> None:
        self._tasks.pop(key, None)
        self._names.pop(uid, None)
        self._generations.pop(key, None)
        self._drop_work(uid)
        self._snapshot_reader.cache.forget_plan(key)
        self._snapshot_reader.cache.forget_children(uid)
        self._wake_next(key, uid)
        self._metrics.forget(*key)
        if self._wake_events.pop(key).is_set():
            asyncio.get_running_loop().call_soon(self.wake, *key)

    def _wake_next(self, key: PlanKey, uid: str) -> None:
        """Wake the other plans that are next in the queue, if this one released a node."""
        self._claims.record_pass(key)
        for waiting in self._claims.plans_to_wake() - {uid}:
            self.wake_owner(waiting)

    async def _pause(self, key: PlanKey, seconds: float, *, is_held: bool = False) -> None:
        """Wait for an event, then for those that come with it; or until the requeue delay is over.

        `is_held`: only an edit or the deletion of the plan ends the delay, since any pass would ask again what failed.
        """
        try:
            async with asyncio.timeout(seconds):
                await self._wake_events[key].wait()
                while is_held and key not in self._edited:
                    self._wake_events[key].clear()
                    await self._wake_events[key].wait()
                await asyncio.sleep(_DEBOUNCE_SECONDS)
        except TimeoutError:
            return

    async def _reconcile_once(self, key: PlanKey, memory: ReadCache) -> tuple[PlanFacts | None, float]:
        """Reconcile once and return the plan as read, and seconds until the next reconciliation without an event."""
        if not memory.is_large:
            return await self._read_and_apply(key, memory)
        # Before the slot and before reading: plans that wait for the process keep neither slots nor documents.
        async with self._large_passes:
            return await self._read_and_apply(key, memory)

    async def _read_and_apply(self, key: PlanKey, memory: ReadCache) -> tuple[PlanFacts | None, float]:
        """Reconcile once, except a plan that turns out to be large: its next reconciliation waits for its turn first."""
        due, plan = time.monotonic(), None
        memory.has_changed, memory.deadline_seconds = False, None
        memory.back_off.begin_pass()
        try:
            async with self._slot():
                started = time.monotonic()
                self._metrics.record_wait(started - due)
                with memory.back_off.reading():
                    plan = await self._snapshot_reader.plan(*key)
                    if plan is None:
                        return None, 0.0
                    plan = released(plan, VERSION)
                    self._note_generation(key, plan, memory)
                    untouched = await self._seconds_untouched(plan)
                    if untouched is not None:
                        return plan, untouched
                    snapshot = await self._snapshot_reader.snapshot(plan, memory, self._searches.facts(plan.uid))
                if self._is_found_large(snapshot, memory):
                    return plan, 0.0
                is_placing = may_pin(snapshot.pods, memory.back_off)
                if not is_placing:
                    pause = await self._decide_and_apply(snapshot, memory)
            if is_placing:
                # The lock before the slot: plans that wait for it must not keep the others from theirs.
                async with self._placement, self._slot():
                    # Read again under the lock: two plans must never see the same devices as free. Logs do not affect
                    # placement.
                    facts = self._searches.facts(plan.uid)
                    with memory.back_off.reading():
                        snapshot = await self._snapshot_reader.snapshot(plan, memory, facts, known_pods=snapshot.pods)
                    pause = await self._decide_and_apply(snapshot, memory)
        except ApiError:
            self._metrics.record_reconcile_error()
            if memory.back_off.is_unread:
                memory.failing = None  # refusals of writes are unknown
            raise
        except BaseException:
            self._drop_read(key, plan)
            raise
        if pause > _KEEP_STORED_SECONDS and not memory.is_refused:
            self._snapshot_reader.cache.drop_stored(plan.uid)
        self._metrics.record_reconcile(time.monotonic() - started)
        self._liveness.record_success()
        return plan, pause

    def _note_generation(self, key: PlanKey, plan: PlanFacts, memory: ReadCache) -> None:
        """Note which spec this pass is about. What was refused to another one is asked again at once."""
        if memory.generation != plan.generation:
            memory.back_off.clear()
        memory.generation = self._generations[key] = plan.generation

    def _drop_read(self, key: PlanKey, plan: PlanFacts | None) -> None:
        """Drop what was read in a reconciliation that broke, after which pods may be pinned."""
        self._snapshot_reader.node_cache.invalidate()
        self._snapshot_reader.cache.forget_plan(key)
        if plan is not None:
            self._snapshot_reader.cache.forget_children(plan.uid)

    def _is_found_large(self, snapshot: Snapshot, memory: ReadCache) -> bool:
        """Remember whether the plan is large. Return True when it newly is: then its claims are recorded alone."""
        was_large, memory.is_large = memory.is_large, is_large(snapshot)
        if was_large or not memory.is_large:
            return False
        self._claims.with_claims(snapshot)  # the queue counts every plan that was read
        self._snapshot_reader.cache.drop_stored(snapshot.plan.uid)
        return True

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        """Wait for one of the slots for passes, and hold it."""
        async with self._passes:
            with self._liveness.reconciling():
                yield

    async def _seconds_untouched(self, plan: PlanFacts) -> float | None:
        """Return for how long to leave a plan alone that another release works on, or that is quarantined; else None."""
        # Without the claim only a metric tells: the status, and Events on it, are another release's to write.
        try:
            release = await self._namespaces.other_holder(plan.namespace)
        except ApiError:
            self._metrics.record_unclaimed(plan.namespace, plan.name, "")
            raise
        if release:
            self._drop_work(plan.uid)
            self._snapshot_reader.cache.forget_children(plan.uid)
            self._metrics.forget(plan.namespace, plan.name)
            self._metrics.record_unclaimed(plan.namespace, plan.name, release)
            return RETRY_SECONDS
        self._metrics.record_claimed(plan.namespace, plan.name)
        if not is_quarantined(plan):
            return None
        self._metrics.record_status(plan, plan.status)
        return IDLE_REQUEUE_SECONDS

    async def _decide_and_apply(self, snapshot: Snapshot, memory: ReadCache) -> float:
        memory.back_off.note_read()
        snapshot = self._claims.with_claims(snapshot)
        now = datetime.now(UTC)
        plan = snapshot.plan
        if is_large(snapshot):
            actions = await self._decisions.decide(snapshot, now)
        else:
            actions = decide(snapshot, now)
        log_actions(plan, actions)
        memory.deadline_seconds = seconds_until_deadline(plan, now)
        status = next((action.status for action in actions if isinstance(action, SetStatus)), plan.status)
        self._claims.record_decision(snapshot, status)
        effect = await self._applier.apply(snapshot, actions, memory)
        memory.has_changed = effect.has_changed
        self._metrics.record_status(plan, status if effect.wrote_status else plan.status)
        if effect.has_pinned:
            self._claims.record_placement(snapshot)
            self._snapshot_reader.node_cache.invalidate()
        effect.check()
        if is_finished(snapshot):
            self._searches.discard_search(plan.uid)
        if effect.has_changed:
            return _IMMEDIATE_REQUEUE_SECONDS
        pause, seconds = memory.back_off.pause(), requeue_after_seconds(snapshot, now)
        if pause is None:
            return seconds
        return pause if is_finished(snapshot) else min(seconds, pause)
