"""Lease for a single active operator, held before kopf starts because kopf's peering does not guarantee one.

A thread of its own renews it, with its own connection, so that neither a blocked event loop nor other requests delay a
renewal. Whether the operator gets anything done is the health check's to say.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

from trainwright_operator.kube import client
from trainwright_operator.kube.client import ApiError, TimedClient
from trainwright_operator.kube.health import Liveness
from trainwright_operator.kube.write_guard import WRITE_SECONDS, WriteGuard, boot_time
from trainwright_operator.settings import Settings

logger = logging.getLogger(__name__)

DURATION_SECONDS: Final = 15
"""Time without renewal after which a holder counts as dead."""
RETRY_SECONDS: Final = 2.0


class LeaseLost(Exception):  # noqa: N818 - an event, and the end of this process
    """Loss of the lease: another operator may act from now on."""


class Lease:
    """One holder's view of the lease. Only changes of the record count, because other clocks are not trusted.

    `acquired` and `lost` are called from the lease's thread.
    """

    def __init__(  # noqa: PLR0913 - its collaborators
        self,
        requests: TimedClient,
        settings: Settings,
        guard: WriteGuard,
        *,
        pulse: Liveness,
        acquired: Callable[[], None],
        lost: Callable[[BaseException], None],
    ) -> None:
        self._requests = requests
        self._collection = client.leases_path(settings.lease_namespace)
        self._path = f"{self._collection}/{settings.lease_name}"
        self._namespace, self._name = settings.lease_namespace, settings.lease_name
        self._identity = settings.identity
        self._guard = guard
        self._liveness = pulse
        self._acquired = acquired
        self._lost = lost
        self._stop = threading.Event()
        self._last_record: tuple[str, str] = ("", "")
        self._seen_at = 0.0
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    def start(self) -> None:
        """Start to wait for the lease, then to renew it."""
        self._thread.start()

    def stop(self) -> None:
        """End the waiting or the renewals."""
        self._stop.set()
        self._thread.join(WRITE_SECONDS)

    def release(self) -> None:
        """Release the lease, so that the next operator can start at once. Call it when no write is under way."""
        try:
            lease = self._get()
            if lease["spec"].get("holderIdentity") == self._identity:
                lease["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
                self._requests.request("PUT", self._path, lease, {})
        except ApiError as error:
            logger.warning("cannot release the lease, it will expire: %s", error)

    def _run(self) -> None:
        try:
            if self._wait():
                self._acquired()
                self._keep()
        except Exception as error:  # noqa: BLE001 - without this thread nobody renews the lease
            self._lost(error)

    def _wait(self) -> bool:
        """Wait until this operator holds the lease, or return False when it is to stop."""
        message = ""
        while not self._stop.is_set():
            try:
                holder = self._acquire_or_renew()
            except ApiError as error:
                holder = f"unknown: {error}"
            self._liveness.record_success()  # also without an answer: waiting is healthy
            if holder == self._identity:
                logger.info("acquired lease %s/%s", self._namespace, self._name)
                return True
            if holder != message:
                logger.info("waiting for lease %s/%s, held by %s", self._namespace, self._name, holder)
                message = holder
            self._stop.wait(RETRY_SECONDS)
        return False

    def _keep(self) -> None:
        """Renew until stopped. Raise LeaseLost when another operator holds the lease or it is not renewed in time."""
        error: ApiError | None = None
        while not self._stop.wait(RETRY_SECONDS):
            # Before a request: after a pause of the process the lease may be another's, and must not be taken back.
            if self._guard.seconds_left <= 0:
                raise LeaseLost(f"not renewed for {WRITE_SECONDS:.0f} s: {error}")
            try:
                holder = self._acquire_or_renew()
            except ApiError as failure:
                error = failure
                continue
            if holder != self._identity:
                raise LeaseLost(f"held by {holder}")

    def _acquire_or_renew(self) -> str:
        """Acquire or renew the lease if allowed, and return its holder."""
        started = boot_time()
        try:
            lease = self._get()
        except ApiError as error:
            if not error.is_missing:
                raise
            lease = {"metadata": {"name": self._name, "namespace": self._namespace}, "spec": {}}
            return self._write(lease, started, new=True)
        spec = lease.get("spec") or {}
        holder = str(spec.get("holderIdentity") or "")
        record = (holder, str(spec.get("renewTime")))
        if record != self._last_record:
            self._last_record, self._seen_at = record, started
        patience = float(spec.get("leaseDurationSeconds") or DURATION_SECONDS)
        if holder and holder != self._identity and started - self._seen_at < patience:
            return holder
        return self._write(lease, started, new=False)

    def _get(self) -> Any:
        return json.loads(self._requests.request("GET", self._path, None, {}))

    def _write(self, lease: dict[str, Any], started: float, *, new: bool) -> str:
        """Write this holder into the lease; the resource version lets only one of several succeed."""
        spec = lease.get("spec") or {}
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        if spec.get("holderIdentity") != self._identity:
            spec |= {"acquireTime": now, "leaseTransitions": int(spec.get("leaseTransitions") or 0) + (not new)}
        spec |= {"holderIdentity": self._identity, "leaseDurationSeconds": DURATION_SECONDS, "renewTime": now}
        body = lease | {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "spec": spec}
        method, path = ("POST", self._collection) if new else ("PUT", self._path)
        try:
            self._requests.request(method, path, body, {})
        except ApiError as error:
            if error.is_conflict:
                return "another operator"
            raise
        self._guard.renewed(started)
        return self._identity
