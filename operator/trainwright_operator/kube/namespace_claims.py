"""Claims of namespaces: the plans of a namespace belong to one release.

A Lease in the namespace names the release that works there. Two releases may watch overlapping sets of namespaces, all of them
included; neither needs rights outside of what it watches to see the other's claim. A pass renews the claim when it is due,
so the namespace of a release that is gone is free after a while.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from trainwright.outside.plain_text import plain_line
from trainwright_operator.flow.decide import IDLE_REQUEUE_SECONDS
from trainwright_operator.kube import client
from trainwright_operator.kube.client import Api, ApiError
from trainwright_operator.kube.write_guard import boot_time
from trainwright_operator.settings import Settings

logger = logging.getLogger(__name__)

CLAIM_NAME: Final = "trainwright-plans"
RETRY_SECONDS: Final = 60.0
"""Interval of looks at another release's claim."""
_RENEWAL_SECONDS: Final = 300.0
_REPEAT_SECONDS: Final = 30.0
"""Time for which a failed request stands for those of the namespace's other plans."""
_HELD_SECONDS: Final = IDLE_REQUEUE_SECONDS + RETRY_SECONDS
"""Age up to which a claim that cannot be renewed is trusted."""
DURATION_SECONDS: Final = 900
"""Time without renewal after which a claim counts as given up: longer than plans at rest go without a pass."""
_LONGEST_LOOK_SECONDS: Final = 2 * RETRY_SECONDS
"""Time between two answers up to which it counts as time without renewal: in an outage the holder cannot renew either."""

_FOREIGN: Final = "namespace %s: release %s works on its plans, so this one does nothing there; give each release watchNamespaces of its own"
_OURS: Final = "namespace %s: release %s works on its plans from now on"


@dataclass(slots=True)
class _Claim:
    """Claim of one namespace as far as it is known, with times of the clock.

    Attributes:
        holder: another release; empty where it is ours.
        seen: last record of another release.
        unchanged_seconds: how long that record was seen without a renewal, outages left out.
    """

    renewed_at: float = float("-inf")
    looked_at: float = float("-inf")
    holder: str = ""
    seen: tuple[str, str] = ("", "")
    unchanged_seconds: float = 0.0
    answered_at: float = 0.0
    failure: ApiError | None = None
    failed_at: float = 0.0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class NamespaceClaims:
    """Claims of this release, each made at the first plan of its namespace."""

    def __init__(self, api: Api, settings: Settings, clock: Callable[[], float] = boot_time) -> None:
        self._api = api
        self._release = f"{settings.lease_namespace}/{settings.lease_name}"
        self._clock = clock
        self._claims: dict[str, _Claim] = {}

    async def other_holder(self, namespace: str) -> str:
        """Claim the namespace, or renew the claim if it is due. Return which other release holds it, or an empty string.

        Raise ApiError where the claim can be neither made nor trusted any longer.
        """
        claim = self._claims.setdefault(namespace, _Claim())
        async with claim.lock:
            now = self._clock()
            if now - claim.renewed_at < _RENEWAL_SECONDS:
                return ""
            if now - claim.looked_at < RETRY_SECONDS and claim.holder:
                return claim.holder
            try:
                if claim.failure is not None and now - claim.failed_at < _REPEAT_SECONDS:
                    raise claim.failure.with_traceback(None)
                holder = await self._claim(namespace, claim, now)
            except ApiError as error:
                if error is not claim.failure:
                    claim.failure, claim.failed_at = error, now
                if now - claim.renewed_at < _HELD_SECONDS:
                    return ""
                raise
            if holder != claim.holder:
                logger.warning(_FOREIGN if holder else _OURS, namespace, holder or self._release)
            claim.holder, claim.looked_at, claim.failure = holder, now, None
            if not holder:
                claim.renewed_at = now
            return holder

    async def _claim(self, namespace: str, claim: _Claim, now: float) -> str:
        """Write the claim if it is free, given up or ours, and return the other holder."""
        path = f"{client.leases_path(namespace)}/{CLAIM_NAME}"
        try:
            lease = await self._api.get(path)
        except ApiError as error:
            if not error.is_missing:
                raise
            lease = None
        spec = (lease or {}).get("spec") or {}
        holder = plain_line(str(spec.get("holderIdentity") or ""))
        record = (holder, str(spec.get("renewTime")))
        since_answer = min(now - claim.answered_at, _LONGEST_LOOK_SECONDS)
        claim.unchanged_seconds = claim.unchanged_seconds + since_answer if record == claim.seen else 0.0
        claim.seen, claim.answered_at = record, now
        if holder not in ("", self._release) and claim.unchanged_seconds < DURATION_SECONDS:
            return holder
        try:
            await self._write(namespace, path, lease)
        except ApiError as error:
            if error.is_conflict:
                return "another one"  # it wrote just now; the next look tells its name
            raise
        return ""

    async def _write(self, namespace: str, path: str, lease: dict[str, Any] | None) -> None:
        """Write this release into the claim; the resource version lets only one of several succeed."""
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        spec = {"holderIdentity": self._release, "leaseDurationSeconds": DURATION_SECONDS, "renewTime": now}
        kind = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
        if lease is None:
            body = kind | {"metadata": {"name": CLAIM_NAME, "namespace": namespace}, "spec": spec}
            await self._api.create(client.leases_path(namespace), body)
        else:
            await self._api.replace(path, lease | {"spec": (lease.get("spec") or {}) | spec})
