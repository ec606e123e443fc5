"""Cache of nodes and their device usage, shared by all waiting plans.

It is listed, not watched: kubelets write a node's status every ten seconds and a pod's at every probe, so on thousands of
nodes a watch of both tells far more than the few facts that plans need, all the time, also while none waits.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from typing import Any, Final, NamedTuple

from trainwright_operator.flow.snapshot import NodeFacts, SliceDevice
from trainwright_operator.kube import client, object_facts
from trainwright_operator.kube.client import Api, ApiError

SHARED_SECONDS: Final = 2.0
"""Minimum lifetime of a reading, about the requeue delay of a waiting plan."""
_CACHE_TIME_FACTOR: Final = 5.0
"""Minimum lifetime as a multiple of the reading's duration, which is seconds for 100,000 pods: bounds the API
server's load."""
WATCH_SECONDS: Final = 30.0
"""Age of a reading that serves plans under way, which only look for nodes that changed."""


class NodeInventory(NamedTuple):
    """All nodes, and the devices of all ResourceSlices."""

    nodes: tuple[NodeFacts, ...] = ()
    slice_devices: tuple[SliceDevice, ...] = ()


class NodeUsage(NamedTuple):
    """All nodes, and the used devices of one resource by node."""

    inventory: NodeInventory
    devices: dict[str, int]


class _CachedUsage(NamedTuple):
    until: float
    occupied: NodeUsage


class _CachedInventory(NamedTuple):
    read_at: float
    seconds: float
    inventory: NodeInventory


async def list_nodes(api: Api) -> tuple[NodeFacts, ...]:
    """List all nodes with one page of objects in memory at a time: each has up to 40 kB, most of them images' names."""
    pages = api.pages(client.core_path("nodes"))
    return tuple([object_facts.node_facts(node) async for page in pages for node in page])


class NodeCache:
    """Cache of the cluster's nodes and pods, with one reading at a time.

    After `invalidate`, to be called when pods are pinned, no plan sees an earlier reading.
    """

    def __init__(self, api: Api, namespaces: tuple[str, ...]) -> None:
        self._api = api
        self._namespaces = namespaces
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._cached: dict[str, _CachedUsage] = {}
        self._inventory: _CachedInventory | None = None
        self._forgotten = 0

    def invalidate(self) -> None:
        """Drop the last reading and any reading in progress."""
        self._cached.clear()
        self._forgotten += 1

    async def inventory(self, age_seconds: float = SHARED_SECONDS) -> NodeInventory:
        """Return the nodes as read at most that long ago, or longer where a reading takes long."""
        clock = asyncio.get_running_loop().time
        async with self._locks[""]:
            known, now = self._inventory, clock()
            if known is not None and now < known.read_at + max(age_seconds, _CACHE_TIME_FACTOR * known.seconds):
                return known.inventory
            nodes, slices = await asyncio.gather(list_nodes(self._api), self._slices())
            devices = tuple(device for part in slices for device in object_facts.slice_devices(part))
            self._inventory = _CachedInventory(now, clock() - now, NodeInventory(nodes, devices))
            return self._inventory.inventory

    async def _slices(self) -> list[dict[str, Any]]:
        try:
            return await self._api.list(client.RESOURCE_SLICES)
        except ApiError as error:
            if error.is_missing or error.status == 403:
                return []  # not served or not readable; labels are next
            raise

    async def usage(self, resource_name: str) -> NodeUsage:
        """Return the current node usage, or a recent one if no pod was pinned since."""
        clock = asyncio.get_running_loop().time
        async with self._locks[resource_name]:
            found = self._cached.get(resource_name)
            if found is not None and clock() < found.until:
                return found.occupied
            began, forgotten = clock(), self._forgotten
            occupied = NodeUsage(*await asyncio.gather(self.inventory(), self._used_devices(resource_name)))
            if self._forgotten == forgotten:
                ended = clock()
                self._cached[resource_name] = _CachedUsage(
                    ended + max(SHARED_SECONDS, _CACHE_TIME_FACTOR * (ended - began)), occupied
                )
            return occupied

    async def _used_devices(self, resource_name: str) -> dict[str, int]:
        """Count used devices by node in all namespaces, or in the watched ones where the operator may not list all."""
        try:
            return dict(await self._used_devices_in("", resource_name))
        except ApiError as error:
            if error.status != 403 or not self._namespaces:
                raise
        counts = await asyncio.gather(
            *(self._used_devices_in(namespace, resource_name) for namespace in self._namespaces)
        )
        return dict(sum(counts, Counter[str]()))

    async def _used_devices_in(self, namespace: str, resource_name: str) -> Counter[str]:
        """Count used devices by node in one namespace or all, with one page of pods in memory at a time."""
        held: Counter[str] = Counter()
        living = "status.phase!=Succeeded,status.phase!=Failed"
        try:
            async for pods in self._api.pages(client.core_path("pods", namespace), fieldSelector=living):
                held.update(object_facts.used_devices_by_node(pods, resource_name))
        except ApiError as error:
            if namespace and (error.is_missing or error.status == 403):
                return held  # a watched namespace that was deleted, and the rights there with it
            raise
        return held
