"""Cache of nodes and their device usage, shared by all waiting plans.

It is listed, not watched: kubelets write a node's status every ten seconds and a pod's at every probe, so on thousands of
nodes a watch of both tells far more than the few facts that plans need, all the time, also while none waits.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, NamedTuple, TypeVar

from trainwright_operator import device_resource
from trainwright_operator.flow.gangs.competitors import holders_by_node
from trainwright_operator.flow.nodes.device_classes import DeviceClass
from trainwright_operator.flow.nodes.published_devices import (
    Allocation,
    DeviceRequest,
    NodeInventory,
    PoolPart,
    PublishedDevices,
    used_devices,
    used_network,
)
from trainwright_operator.flow.snapshot import DeviceHolder, NodeFacts
from trainwright_operator.kube import client, object_facts
from trainwright_operator.kube.client import Api, ApiError
from trainwright_operator.node_resource import node_facts

SHARED_SECONDS: Final = 2.0
"""Minimum lifetime of a reading, about the requeue delay of a waiting plan."""
_CACHE_TIME_FACTOR: Final = 5.0
"""Minimum lifetime as a multiple of the reading's duration, which is seconds for 100,000 pods: bounds the API
server's load."""
WATCH_SECONDS: Final = 30.0
"""Age of a reading that serves plans under way, which only look for nodes that changed."""
_REFUSED_SECONDS: Final = 300.0
"""Time for which lists of dynamic allocation that were refused are not asked for again."""
Part = TypeVar("Part")


class NodeUsage(NamedTuple):
    """All nodes, the used devices of one resource by node, who holds them, and the used network devices by resource."""

    inventory: NodeInventory
    devices: dict[str, int]
    holders: dict[str, tuple[DeviceHolder, ...]]
    network: dict[str, dict[str, int]]


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
    return tuple([node_facts(node) async for page in pages for node in page])


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
        self._refused_until: dict[str, float] = {}
        self._forgotten = 0

    def invalidate(self) -> None:
        """Drop the last reading and any reading in progress."""
        self._cached.clear()
        self._forgotten += 1

    async def inventory(self, age_seconds: float = SHARED_SECONDS) -> NodeInventory:
        """Return the nodes as read at most that long ago, or longer where a reading takes long."""
        clock = asyncio.get_running_loop().time
        async with self._locks[""]:
            cached, now = self._inventory, clock()
            if cached is not None and now < cached.read_at + max(age_seconds, _CACHE_TIME_FACTOR * cached.seconds):
                return cached.inventory
            nodes, published = await asyncio.gather(list_nodes(self._api), self._published())
            inventory = NodeInventory(nodes)
            if published.by_node:
                # In a thread, as the devices below: those of thousands of nodes would hold the loop for a second.
                inventory = await asyncio.to_thread(NodeInventory.of, nodes, published)
            self._inventory = _CachedInventory(now, clock() - now, inventory)
            return inventory

    async def _published(self) -> PublishedDevices:
        """Return the devices of all slices, with the DeviceClasses where some are accelerators."""
        parts: list[PoolPart] = []
        classes: dict[str, DeviceClass] | None = {}
        is_asked = False
        try:
            async for page in self._api.pages(client.device_path("resourceslices")):
                slices = [item for item in page if device_resource.has_accelerators(item)]
                if slices and not is_asked:
                    classes, is_asked = await self._classes(), True
                if slices:
                    parts += await asyncio.to_thread(device_resource.pool_parts, slices, classes or {})
        except ApiError as error:
            if not _is_unreadable(error):
                raise
            parts = []  # labels are next
        return await asyncio.to_thread(PublishedDevices.of, parts, classes) if parts else PublishedDevices()

    async def _classes(self) -> dict[str, DeviceClass] | None:
        try:
            pages = [page async for page in self._pages(client.device_path("deviceclasses"))]
        except ApiError as error:
            if not _is_unreadable(error):
                raise
            return None
        return device_resource.device_classes(item for page in pages for item in page)

    async def usage(self, resource_name: str, age_seconds: float = SHARED_SECONDS) -> NodeUsage:
        """Return the current node usage, or a recent one if no pod was pinned since; the nodes as of at most that long ago."""
        clock = asyncio.get_running_loop().time
        async with self._locks[resource_name]:
            cached = self._cached.get(resource_name)
            if cached is not None and clock() < cached.until:
                return cached.occupied
            began, forgotten = clock(), self._forgotten
            (inventory, allocations), requests = await asyncio.gather(
                self._claimed_inventory(age_seconds),
                self._everywhere(lambda namespace: self._requests(namespace, resource_name)),
            )
            used = used_devices(requests, allocations, inventory.published, resource_name)
            occupied = NodeUsage(
                inventory,
                used,
                holders_by_node(request for request in requests if request.devices),
                used_network(requests),
            )
            if self._forgotten == forgotten:
                ended = clock()
                self._cached[resource_name] = _CachedUsage(
                    ended + max(SHARED_SECONDS, _CACHE_TIME_FACTOR * (ended - began)), occupied
                )
            return occupied

    async def _claimed_inventory(self, age_seconds: float) -> tuple[NodeInventory, list[Allocation]]:
        """Return the inventory, and the allocated claims where they may hold devices of it."""
        inventory = await self.inventory(age_seconds)
        if not inventory.published.by_node:
            return inventory, []
        try:
            return inventory, await self._everywhere(self._allocations)
        except ApiError as error:
            if not _is_unreadable(error):
                raise
            return inventory, []

    async def _everywhere(self, read: Callable[[str], Awaitable[list[Part]]]) -> list[Part]:
        """Read all namespaces, or the watched ones where the operator may not list all."""
        try:
            return await read("")
        except ApiError as error:
            if error.status != 403 or not self._namespaces:
                raise
        return [member for part in await asyncio.gather(*map(read, self._namespaces)) for member in part]

    async def _requests(self, namespace: str, resource_name: str) -> list[DeviceRequest]:
        """Return the pods' requests in one namespace or all, with one page of pods in memory at a time."""
        requests: list[DeviceRequest] = []
        living = "status.phase!=Succeeded,status.phase!=Failed"
        try:
            async for pods in self._api.pages(client.core_path("pods", namespace), fieldSelector=living):
                requests += object_facts.device_requests(pods, resource_name)
        except ApiError as error:
            if namespace and _is_unreadable(error):
                return requests  # a watched namespace that was deleted, and the rights there with it
            raise
        return requests

    async def _allocations(self, namespace: str) -> list[Allocation]:
        allocations: list[Allocation] = []
        try:
            async for claims in self._pages(client.device_path("resourceclaims", namespace)):
                allocations += device_resource.allocations(claims)
        except ApiError as error:
            if namespace and _is_unreadable(error):
                return allocations
            raise
        return allocations

    async def _pages(self, path: str) -> AsyncIterator[list[dict[str, Any]]]:
        """Iterate over the pages of a list, which is not asked for again for a while once it was refused."""
        clock = asyncio.get_running_loop().time
        if clock() < self._refused_until.get(path, 0.0):
            raise ApiError(403, f"{path} was refused a while ago")
        try:
            async for page in self._api.pages(path):
                yield page
        except ApiError as error:
            if _is_unreadable(error):
                self._refused_until[path] = clock() + _REFUSED_SECONDS
            raise


def _is_unreadable(error: ApiError) -> bool:
    """Return whether a list is not served, or not to this operator."""
    return error.is_missing or error.status == 403
