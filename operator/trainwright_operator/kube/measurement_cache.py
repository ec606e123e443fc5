"""Cache of the kept measurements of each namespace, shared by its plans."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Final, NamedTuple

from trainwright_operator.flow.actions import StoredRole
from trainwright_operator.flow.names import ROLE_LABEL
from trainwright_operator.flow.snapshot import StoredConfigMap
from trainwright_operator.kube import client, object_facts
from trainwright_operator.kube.client import Api

_SECONDS: Final = 5.0
"""Lifetime of a listing: that of a pass of a plan whose gang runs. What another plan measured meanwhile is measured twice."""


class _Listing(NamedTuple):
    until: float
    found: tuple[StoredConfigMap, ...]


class MeasurementCache:
    """Measurements by namespace, with one listing at a time of each; a listing is dropped once it is too old."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._listings: dict[str, _Listing] = {}

    async def of_namespace(self, namespace: str) -> tuple[StoredConfigMap, ...]:
        """Return the measurements of a namespace as of a moment ago."""
        clock = asyncio.get_running_loop().time
        async with self._locks[namespace]:
            self._listings = {name: one for name, one in self._listings.items() if clock() < one.until}
            if namespace not in self._listings:
                selector = f"{ROLE_LABEL}={StoredRole.MEASUREMENT}"
                items = await self._api.list(client.core_path("configmaps", namespace), labelSelector=selector)
                found = tuple(map(object_facts.stored_config_map, items))
                self._listings[namespace] = _Listing(clock() + _SECONDS, found)
            return self._listings[namespace].found
