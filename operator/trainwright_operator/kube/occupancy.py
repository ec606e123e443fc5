"""Nodes, and how many of their devices are held: what placing depends on, read once for all plans that wait."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from typing import Final, NamedTuple

from trainwright_operator.flow.snapshot import NodeFacts
from trainwright_operator.kube import facts, paths
from trainwright_operator.kube.api import Api, ApiError

SHARED_SECONDS: Final = 2.0
"""So long one reading serves all plans, at least: each that waits looks again about so often."""
_REST: Final = 5.0
"""And at least so many times as long as it took: of 100,000 pods it takes seconds, and the API server has others to serve."""


class Occupied(NamedTuple):
    """All nodes, and by node the devices of one resource that pods hold."""

    nodes: tuple[NodeFacts, ...]
    devices: dict[str, int]


class _Reading(NamedTuple):
    until: float
    occupied: Occupied


class Occupancy:
    """Reads the cluster's nodes and pods, for one plan at a time, and shares what was read.

    Whoever sends pods to nodes says so with `forget`, behind which no plan is told what was read before.
    """

    def __init__(self, api: Api, namespaces: tuple[str, ...]) -> None:
        self._api = api
        self._namespaces = namespaces
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._readings: dict[str, _Reading] = {}
        self._forgotten = 0

    def forget(self) -> None:
        """What was read holds no longer, nor does what is being read now."""
        self._readings.clear()
        self._forgotten += 1

    async def of(self, resource_name: str) -> Occupied:
        """As it is, or was a short while ago and no pod was sent to a node since."""
        clock = asyncio.get_running_loop().time
        async with self._locks[resource_name]:
            found = self._readings.get(resource_name)
            if found is not None and clock() < found.until:
                return found.occupied
            began, forgotten = clock(), self._forgotten
            nodes, held = await asyncio.gather(self._api.list(paths.core("nodes")), self._held(resource_name))
            occupied = Occupied(tuple(facts.node_facts(node) for node in nodes), held)
            if self._forgotten == forgotten:
                ended = clock()
                self._readings[resource_name] = _Reading(ended + max(SHARED_SECONDS, _REST * (ended - began)), occupied)
            return occupied

    async def _held(self, resource_name: str) -> dict[str, int]:
        """By node. Where only some namespaces are watched all pods are counted if the operator may, else those in these."""
        try:
            return dict(await self._held_in("", resource_name))
        except ApiError as error:
            if error.status != 403 or not self._namespaces:
                raise
        counts = await asyncio.gather(*(self._held_in(namespace, resource_name) for namespace in self._namespaces))
        return dict(sum(counts, Counter[str]()))

    async def _held_in(self, namespace: str, resource_name: str) -> Counter[str]:
        """By node, in one namespace or in all. A page of pods is let go before the next is read."""
        held: Counter[str] = Counter()
        living = "status.phase!=Succeeded,status.phase!=Failed"
        try:
            async for pods in self._api.pages(paths.core("pods", namespace), fieldSelector=living):
                held.update(facts.devices_held(pods, resource_name))
        except ApiError as error:
            if namespace and (error.is_missing or error.status == 403):
                return held  # a watched namespace that was deleted, and the rights there with it
            raise
        return held
