"""Lease for a single active operator, held before kopf starts because kopf's peering does not guarantee one."""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import UTC, datetime
from typing import Any, Final

from trainwright_operator.kube import client
from trainwright_operator.kube.client import Api, ApiError
from trainwright_operator.kube.health import Liveness
from trainwright_operator.settings import Settings

logger = logging.getLogger(__name__)

DURATION_SECONDS: Final = 15
"""Time without renewal after which a holder counts as dead."""
RENEW_DEADLINE_SECONDS: Final = 10.0
"""Time without renewal after which the holder gives up, well before another one may take over."""
RETRY_SECONDS: Final = 2.0


class LeaseLost(Exception):  # noqa: N818 - an event, and the end of this process
    """Loss of the lease: another operator may act from now on."""


class Lease:
    """One holder's view of the lease. Only changes of the record count, because other clocks are not trusted."""

    def __init__(self, api: Api, settings: Settings, pulse: Liveness) -> None:
        self._api = api.with_own_thread("lease")  # other hanging requests must not delay a renewal
        self._path = client.leases_path(settings.lease_namespace)
        self._namespace = settings.lease_namespace
        self._name = settings.lease_name
        self._identity = settings.identity
        self._liveness = pulse
        self._last_record: tuple[str, str] = ("", "")
        self._seen_at = 0.0

    async def acquire(self) -> None:
        """Wait until this operator holds the lease."""
        told = ""
        while True:
            try:
                holder = await self._acquire_or_renew()
            except ApiError as error:
                holder = f"unknown: {error}"
            self._liveness.record_success()  # also without an answer: waiting is healthy
            if holder == self._identity:
                logger.info("acquired lease %s/%s", self._namespace, self._name)
                return
            if holder != told:
                logger.info("waiting for lease %s/%s, held by %s", self._namespace, self._name, holder)
                told = holder
            await asyncio.sleep(RETRY_SECONDS)

    async def keep(self) -> None:
        """Renew forever. Raise LeaseLost when another operator holds the lease or it cannot be renewed in time."""
        renewed = time.monotonic()
        while True:
            await asyncio.sleep(RETRY_SECONDS)
            try:
                async with asyncio.timeout(max(RENEW_DEADLINE_SECONDS - (time.monotonic() - renewed), 0.1)):
                    holder = await self._acquire_or_renew()
            except (ApiError, TimeoutError) as error:
                if time.monotonic() - renewed >= RENEW_DEADLINE_SECONDS:
                    raise LeaseLost(f"not renewed for {RENEW_DEADLINE_SECONDS:.0f} s: {error}") from None
                continue
            if holder != self._identity:
                raise LeaseLost(f"held by {holder}")
            renewed = time.monotonic()
            self._liveness.record_success()

    async def release(self) -> None:
        """Release the lease, so that the next operator can start at once."""
        try:
            lease = await self._api.get(f"{self._path}/{self._name}")
            if lease["spec"].get("holderIdentity") == self._identity:
                lease["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
                await self._api.replace(f"{self._path}/{self._name}", lease)
        except ApiError as error:
            logger.warning("cannot release the lease, it will expire: %s", error)

    async def _acquire_or_renew(self) -> str:
        """Acquire or renew the lease if allowed, and return its holder."""
        try:
            lease = await self._api.get(f"{self._path}/{self._name}")
        except ApiError as error:
            if not error.is_missing:
                raise
            return await self._write(
                {"metadata": {"name": self._name, "namespace": self._namespace}, "spec": {}}, new=True
            )
        spec = lease.get("spec") or {}
        holder = str(spec.get("holderIdentity") or "")
        record = (holder, str(spec.get("renewTime")))
        if record != self._last_record:
            self._last_record, self._seen_at = record, time.monotonic()
        patience = float(spec.get("leaseDurationSeconds") or DURATION_SECONDS)
        if holder and holder != self._identity and time.monotonic() - self._seen_at < patience:
            return holder
        return await self._write(lease, new=False)

    async def _write(self, lease: dict[str, Any], *, new: bool) -> str:
        """Write this holder into the lease; the resource version lets only one of several succeed."""
        spec = lease.get("spec") or {}
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        if spec.get("holderIdentity") != self._identity:
            spec |= {"acquireTime": now, "leaseTransitions": int(spec.get("leaseTransitions") or 0) + (not new)}
        spec |= {"holderIdentity": self._identity, "leaseDurationSeconds": DURATION_SECONDS, "renewTime": now}
        body = lease | {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "spec": spec}
        try:
            if new:
                await self._api.create(self._path, body)
            else:
                await self._api.replace(f"{self._path}/{self._name}", body)
        except ApiError as error:
            if error.is_conflict:
                return "another operator"
            raise
        return self._identity
