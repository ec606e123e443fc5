"""Plans and their jobs and pods as the watches last told, so that a pass which changes nothing reads memory.

Kopf's indexes are not used: they belong to the thread of the watch and tell neither an object's version nor whether they
are complete. Here a plan's objects are listed once, then kept up by events and by the answers to writes. They are listed
anew after a failure, after the deletion of a job, after the watch listed anew (it does not tell what was deleted
meanwhile), and after a while in any case. Only what decisions need is kept, without raw objects.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from trainwright_operator.flow.snapshot import JobFacts, PlanFacts, PodFacts, StoredConfigMap

PlanKey = tuple[str, str]
MAX_AGE_SECONDS: Final = 300.0
"""Age after which a plan's objects are listed again, should events have been lost."""
MEASUREMENTS_AGE_SECONDS: Final = 5.0
"""Age after which kept measurements are listed again, which no watch tells of: users delete them."""
_LISTING_GAP_SECONDS: Final = 1.0
"""Pause between events of a listing that tells two listings apart: nothing marks the begin of one."""


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """Event of a watch.

    Attributes:
        owner: uid of the plan.
        version: resource version of the object.
        is_listing: whether the watch listed the object, instead of telling a change.
        is_new: whether the object was created since the watch listed all objects.
    """

    facts: PlanFacts | PodFacts | JobFacts
    owner: str
    version: int
    deleted: bool
    is_listing: bool
    is_new: bool = False


class _ChildEvent(NamedTuple):
    child: PodFacts | JobFacts
    version: int
    deleted: bool


@dataclass(slots=True)
class Children:
    """Jobs, pods and ConfigMaps of a plan.

    Attributes:
        version: resource version of the listing; events of older objects are ignored.
        stored: None where it was dropped to save memory.
    """

    pods: dict[str, PodFacts]
    jobs: dict[str, JobFacts]
    stored: tuple[StoredConfigMap, ...] | None
    version: int
    listed_at: float
    versions: dict[str, int] = field(default_factory=dict)


class ObjectCache:
    """Plans by key, and the children of each by uid."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._plans: dict[PlanKey, tuple[PlanFacts, float]] = {}
        self._children: dict[str, Children] = {}
        self._listing: dict[str, list[_ChildEvent]] = {}
        self._reading: dict[PlanKey, PlanFacts | None] = {}
        self._listed_at: dict[type[PlanFacts | PodFacts | JobFacts], float] = {}
        self._measurements: dict[str, tuple[tuple[StoredConfigMap, ...], float]] = {}

    def plan(self, key: PlanKey) -> PlanFacts | None:
        """Return the plan, or None where it has to be read."""
        cached = self._plans.get(key)
        return cached[0] if cached is not None and self._is_recent(cached[1]) else None

    def begin_reading(self, key: PlanKey) -> None:
        """Note that a plan is being read: an event meanwhile may be newer than the answer."""
        self._reading[key] = None

    def store_plan(self, plan: PlanFacts) -> PlanFacts:
        """Keep a plan that was read or written, and return it, or what an event told meanwhile if that is newer."""
        key = plan.namespace, plan.name
        reading = self._reading.pop(key, None)
        if reading is not None and version_of(reading.resource_version) > version_of(plan.resource_version):
            plan = reading
        self._plans[key] = plan, self._clock()
        return plan

    def forget_plan(self, key: PlanKey) -> None:
        """Drop a plan, so that it is read again."""
        self._plans.pop(key, None)

    def children(self, uid: str) -> Children | None:
        """Return the plan's children, or None where they have to be listed."""
        children = self._children.get(uid)
        return children if children is not None and self._is_recent(children.listed_at) else None

    def begin_listing(self, uid: str) -> None:
        """Note that a plan's children are being listed: events meanwhile may be newer than the lists."""
        self._listing[uid] = []

    def store_children(
        self,
        uid: str,
        pods: Iterable[PodFacts],
        jobs: Iterable[JobFacts],
        stored: tuple[StoredConfigMap, ...],
        version: int,
    ) -> Children:
        """Keep children that were listed; `version`: of the oldest listing."""
        children = Children(
            {pod.name: pod for pod in pods}, {job.name: job for job in jobs}, stored, version, self._clock()
        )
        self._children[uid] = children
        for event in self._listing.pop(uid, ()):
            self.observe_child(uid, event.child, event.version, deleted=event.deleted)
        return children

    def forget_children(self, uid: str) -> None:
        """Drop a plan's children, so that they are listed again."""
        self._children.pop(uid, None)

    def drop_stored(self, uid: str) -> None:
        """Drop the plan's ConfigMaps, which are large, while nothing of it runs."""
        if uid in self._children:
            self._children[uid].stored = None

    def forget_all(self) -> None:
        """Drop everything: the watch listed anew."""
        self._plans.clear()
        self._children.clear()

    def observe_child(self, uid: str, child: PodFacts | JobFacts, version: int, *, deleted: bool) -> None:
        """Apply an event of a pod or job, unless it is older than what is known."""
        if uid in self._listing:
            self._listing[uid].append(_ChildEvent(child, version, deleted))
        children = self._children.get(uid)
        if children is None or version <= children.versions.get(child.name, children.version):
            return
        children.versions[child.name] = version
        if isinstance(child, PodFacts):
            children.pods.pop(child.name, None)
            children.pods |= {} if deleted else {child.name: child}
        else:
            children.jobs.pop(child.name, None)
            children.jobs |= {} if deleted else {child.name: child}

    def observe_stored(self, uid: str, stored: StoredConfigMap) -> None:
        """Keep a ConfigMap that was written."""
        children = self._children.get(uid)
        if children is not None and children.stored is not None:
            others = (config_map for config_map in children.stored if config_map.name != stored.name)
            children.stored = tuple(sorted((*others, stored), key=lambda config_map: config_map.name))

    def remove_stored(self, uid: str, name: str) -> None:
        """Drop a ConfigMap that was deleted."""
        children = self._children.get(uid)
        if children is not None and children.stored is not None:
            children.stored = tuple(config_map for config_map in children.stored if config_map.name != name)

    def observe_listing(self, kind: type[PlanFacts | PodFacts | JobFacts]) -> None:
        """Drop everything at the first event of a new listing of a kind; what is read after it is newer."""
        now = self._clock()
        if now - self._listed_at.get(kind, -_LISTING_GAP_SECONDS) >= _LISTING_GAP_SECONDS:
            self.forget_all()
        self._listed_at[kind] = now

    def observe_plan(self, plan: PlanFacts, *, deleted: bool, is_complete: bool = False, is_new: bool = False) -> None:
        """Apply an event of a plan that was read before, unless it is older than what is known.

        `is_complete`: whether the plan need not be read, as it was just listed or created. A new plan has no children:
        since the watch began, nobody else may write.
        """
        key = plan.namespace, plan.name
        if key in self._reading and not deleted:
            self._reading[key] = plan
        cached = self._plans.get(key)
        if deleted:
            self.forget_plan(key)
        elif cached is not None and version_of(cached[0].resource_version) < version_of(plan.resource_version):
            self._plans[key] = plan, cached[1]
        elif cached is None and is_complete:
            self._plans[key] = plan, self._clock()
        if is_new and not plan.status.conditions and plan.uid not in self._children:
            self.store_children(plan.uid, (), (), (), version_of(plan.resource_version))

    def measurements(
        self, namespace: str, age_seconds: float = MEASUREMENTS_AGE_SECONDS
    ) -> tuple[StoredConfigMap, ...] | None:
        """Return the kept measurements of a namespace, or None where they have to be listed."""
        config_maps, listed_at = self._measurements.get(namespace, ((), -age_seconds))
        return config_maps if self._clock() - listed_at < age_seconds else None

    def store_measurements(self, namespace: str, config_maps: Iterable[StoredConfigMap]) -> tuple[StoredConfigMap, ...]:
        """Keep and return measurements that were listed, without listings of other namespaces that are too old."""
        self._measurements = {
            name: cached for name, cached in self._measurements.items() if self.measurements(name) is not None
        }
        self._measurements[namespace] = tuple(config_maps), self._clock()
        return self._measurements[namespace][0]

    def forget_measurements(self, namespace: str) -> None:
        """Drop the measurements of a namespace, of which one was written or deleted."""
        self._measurements.pop(namespace, None)

    def _is_recent(self, since: float) -> bool:
        return self._clock() - since < MAX_AGE_SECONDS


def version_of(text: str) -> int:
    """Return a resource version as a number, whose order Kubernetes guarantees since 1.35 and etcd always had; else -1."""
    return int(text) if text.isdecimal() else -1
