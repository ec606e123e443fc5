"""Gang-wide abort signal and a status board of all ranks.

Both live in the gang's TCPStore, signed with the gang's secret: whoever reaches the store can read and write it, but
without the secret neither forge a message nor find the keys that the gang's messages have. Each process waits for the
abort key in its own thread, so it receives an abort even while a collective blocks its main thread; nothing crosses the
network while all is well.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import DistStoreError

from trainwright import documents
from trainwright.cluster import Device
from trainwright.worker_api import SECRET_FILE, Cause, FailureReason
from trainwright_worker.gang.rank_status import GangStatus, RankStatus

STATUS_TIMEOUT_SECONDS = 3.0
"""Time within which every process that can respond to an abort has posted its status."""
_CONNECT_TIMEOUT_SECONDS = 2.0
_POLL_SECONDS = 0.1
_ABORT_KEY = "alarm"
_STATUS_COUNT_KEY = "answers"
"""Number of ranks that have posted their status."""
_FAILURE_COUNT_KEY = "told"
"""Number of failures posted so far, by ranks and launchers."""


class ForgedMessageError(RuntimeError):
    """Message that somebody without the gang's secret wrote."""


@dataclass(frozen=True, slots=True)
class GangSecret:
    """Secret of a gang; an empty one proves nothing."""

    key: bytes = field(repr=False)

    @classmethod
    def beside(cls, task_path: Path) -> GangSecret:
        """Return the secret in the folder of the task; empty where an operator of a former version stored none."""
        path = task_path.with_name(SECRET_FILE)
        return cls(path.read_bytes() if path.exists() else b"")

    @classmethod
    def new(cls) -> GangSecret:
        """Return a random secret."""
        return cls(secrets.token_bytes())

    def sign(self, topic: str, text: str) -> str:
        """Return the text with a signature (HMAC-SHA256, RFC 2104) in front, valid for that topic only."""
        return f"{self.digest(topic, text)} {text}"

    def verify(self, topic: str, message: bytes) -> str:
        """Return the text of a signed message. Raise ForgedMessageError if the signature is another one."""
        signature, _, text = message.decode(errors="replace").partition(" ")
        if not hmac.compare_digest(signature.encode(), self.digest(topic, text).encode()):
            raise ForgedMessageError(f"{topic}: the message is not signed with the gang's secret")
        return text

    def digest(self, topic: str, text: str = "") -> str:
        """Return what only holders of the secret can compute for the topic and text, as 64 hexadecimal digits."""
        return hmac.new(self.key, f"{topic}\n{text}".encode(), hashlib.sha256).hexdigest()


class StatusBoard:
    """Connection to the store, used by processes of a gang when one of them fails.

    Attributes:
        devices: all devices of the gang, by rank.
    """

    def __init__(self, store: Any, secret: GangSecret, devices: Sequence[Device]) -> None:
        self._store = dist.PrefixStore(secret.digest("bell"), store)  # type: ignore[attr-defined]
        self._secret = secret
        self.devices = tuple(devices)

    def raise_abort(self, cause: Cause) -> bool:
        """Raise the abort signal. Returns whether it was the first; later ones are ignored."""
        body = self._secret.sign(_ABORT_KEY, documents.dumps(cause))
        return bool(self._store.compare_set(_ABORT_KEY, "", body) == body.encode())

    def wait_for_abort(self, timeout: timedelta) -> Cause:
        """Wait for the abort signal and return its cause.

        Raises DistStoreError after the timeout, ForgedMessageError if somebody without the secret raised it, or another
        RuntimeError if the store's host is gone.
        """
        self._store.wait([_ABORT_KEY], timeout)
        cause: Cause = self._read(_ABORT_KEY, Cause)
        return cause

    def post_status(self, status: RankStatus) -> None:
        """Post this process's status."""
        self._post(f"rank {status.rank}", status)
        self._store.add(_FAILURE_COUNT_KEY, int(status.failure is not None))
        self._store.add(_STATUS_COUNT_KEY, 1)

    def report_pod_failure(self, cause: Cause) -> None:
        """Post a failure for a pod, by its launcher: a process died silently or the pod was asked to terminate."""
        self._post(f"node {cause.node}", cause)
        self._store.add(_FAILURE_COUNT_KEY, 1)

    def gather_statuses(self, *, is_enough: Callable[[GangStatus], bool] = lambda _stands: False) -> GangStatus:
        """Return the posted statuses, after all ranks have posted, the timeout, or a new failure that `is_enough` accepts."""
        end = time.monotonic() + STATUS_TIMEOUT_SECONDS
        failures_before = 0
        while self._store.add(_STATUS_COUNT_KEY, 0) < len(self.devices) and time.monotonic() < end:
            failures = self._store.add(_FAILURE_COUNT_KEY, 0)
            if failures > failures_before and is_enough(self._read_gang_status()):
                break
            failures_before = failures
            time.sleep(_POLL_SECONDS)
        return self._read_gang_status()

    def _read_gang_status(self) -> GangStatus:
        nodes = dict.fromkeys(device.node for device in self.devices)
        statuses = [self._read_if_present(f"rank {rank}", RankStatus) for rank in range(len(self.devices))]
        pods = [self._read_if_present(f"node {node}", Cause) for node in nodes]
        return GangStatus(
            self.devices,
            tuple(answer for answer in statuses if answer is not None),
            tuple(pod for pod in pods if pod is not None),
        )

    def _post(self, key: str, document: RankStatus | Cause) -> None:
        self._store.set(key, self._secret.sign(key, documents.dumps(document)))

    def _read(self, key: str, document_type: Any) -> Any:
        return documents.loads(self._secret.verify(key, self._store.get(key)), document_type)

    def _read_if_present(self, key: str, document_type: Any) -> Any:
        try:
            return self._read(key, document_type) if self._store.check([key]) else None
        except ForgedMessageError:
            return None


class AbortListener:
    """Access of one process to the abort signal.

    Args:
        devices: all devices of the gang, by rank; may be empty in a launcher, which reads no statuses.
    """

    def __init__(self, address: str, port: int, secret: GangSecret, devices: Sequence[Device] = ()) -> None:
        self._address, self._port, self._secret, self._devices = address, port, secret, devices
        self._is_closed = False

    def listen(self, on_abort: Callable[[Cause], None], *, start_up_seconds: float = _CONNECT_TIMEOUT_SECONDS) -> None:
        """Call `on_abort` once, from a separate thread, when the abort signal is raised or the store's host is gone.

        The host may start up to `start_up_seconds` later.
        """
        threading.Thread(target=self._listen, args=(on_abort, start_up_seconds), name="bell", daemon=True).start()

    def close(self) -> None:
        """Ignore aborts from now on: the task is done and other processes exit too."""
        self._is_closed = True

    def connect_board(self) -> StatusBoard:
        """Connect to the store for a few messages. Raises OSError if its host is gone.

        A plain connection is probed first, because torch's store client retries for long and logs pages of errors.
        """
        self._probe_host()
        return self._connect(_CONNECT_TIMEOUT_SECONDS)

    def _probe_host(self) -> None:
        socket.create_connection((self._address, self._port), timeout=_CONNECT_TIMEOUT_SECONDS).close()

    def _connect(self, seconds: float) -> StatusBoard:
        timeout = timedelta(seconds=seconds)
        store = dist.TCPStore(self._address, self._port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
        return StatusBoard(store, self._secret, self._devices)

    def _listen(self, on_abort: Callable[[Cause], None], start_up_seconds: float) -> None:
        connect_timeout = start_up_seconds
        while not self._is_closed:
            try:
                board = self._connect(connect_timeout)
                connect_timeout = _CONNECT_TIMEOUT_SECONDS
                cause = board.wait_for_abort(timedelta(days=1))
            except DistStoreError:
                continue  # no abort within a day
            except ForgedMessageError:
                time.sleep(_CONNECT_TIMEOUT_SECONDS)
                continue
            except (OSError, RuntimeError):
                if self._is_reachable():
                    time.sleep(_CONNECT_TIMEOUT_SECONDS)
                    continue  # only this connection broke
                cause = Cause(FailureReason.PEER_LOST, f"{self._address}:{self._port}, the gang's store, is gone")
            if not self._is_closed:
                on_abort(cause)
            return

    def _is_reachable(self) -> bool:
        try:
            self._probe_host()
        except OSError:
            return False
        return True
