"""An alarm that all processes of a gang hear at once, and beside it a board on which each says where it stands.

Both live in the store through which the gang meets. A process waits for the alarm in a thread of its own, so it hears
it also while a collective keeps its main thread; nothing passes over the network while all is well.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import DistStoreError

from trainwright import documents
from trainwright.cluster import Device
from trainwright.orders import Cause, FailureReason
from trainwright_worker.stands import Stand, Stands

PATIENCE_SECONDS = 3.0
"""All processes that can answer to an alarm have done so by then."""
_TALK_SECONDS = 2.0
_POLL_SECONDS = 0.1
_ALARM = "alarm"
_ANSWERS = "answers"
"""How many have answered."""
_TOLD = "told"
"""How many have told of a failure of their own."""


class Board:
    """A connection to the store, for what processes of a gang tell one another when one of them fails.

    Attributes:
        devices: of all processes, by rank.
    """

    def __init__(self, store: Any, devices: Sequence[Device]) -> None:
        self._store = store
        self.devices = tuple(devices)

    def ring(self, alarm: Cause) -> bool:
        """Raise the alarm. Returns whether this was the first one; a later one is not heard."""
        body = documents.dumps(alarm)
        return bool(self._store.compare_set(_ALARM, "", body) == body.encode())

    def wait_for_alarm(self, at_most: timedelta) -> Cause:
        """Raises DistStoreError where none was rung in that time, another RuntimeError where the host is gone."""
        self._store.wait([_ALARM], at_most)
        alarm: Cause = documents.loads(self._store.get(_ALARM), Cause)
        return alarm

    def answer(self, stand: Stand) -> None:
        """Say where this process stands."""
        self._store.set(f"rank {stand.rank}", documents.dumps(stand))
        self._store.add(_TOLD, int(stand.failure is not None))
        self._store.add(_ANSWERS, 1)

    def tell_of_pod(self, cause: Cause) -> None:
        """A launcher's words, where its processes could not speak, or as a whole were told to end."""
        self._store.set(f"node {cause.node}", documents.dumps(cause))
        self._store.add(_TOLD, 1)

    def gather(self, *, is_enough: Callable[[Stands], bool] = lambda _stands: False) -> Stands:
        """What the others answered. Those who have not are waited for, until what was told meanwhile is enough."""
        end = time.monotonic() + PATIENCE_SECONDS
        told_before = 0
        while self._store.add(_ANSWERS, 0) < len(self.devices) and time.monotonic() < end:
            told = self._store.add(_TOLD, 0)
            if told > told_before and is_enough(self._read()):
                break
            told_before = told
            time.sleep(_POLL_SECONDS)
        return self._read()

    def _read(self) -> Stands:
        nodes = dict.fromkeys(device.node for device in self.devices)
        answers = [self._present(f"rank {rank}", Stand) for rank in range(len(self.devices))]
        pods = [self._present(f"node {node}", Cause) for node in nodes]
        return Stands(
            self.devices,
            tuple(answer for answer in answers if answer is not None),
            tuple(pod for pod in pods if pod is not None),
        )

    def _present(self, key: str, noun: Any) -> Any:
        return documents.loads(self._store.get(key), noun) if self._store.check([key]) else None


class Bell:
    """One process's end of the alarm.

    Args:
        devices: of all processes, by rank; a launcher that only tells may leave them out.
    """

    def __init__(self, address: str, port: int, devices: Sequence[Device] = ()) -> None:
        self._address, self._port, self._devices = address, port, devices
        self._is_closed = False

    def listen(self, heard: Callable[[Cause], None], *, start_up_seconds: float = _TALK_SECONDS) -> None:
        """Call `heard` once, from a thread of its own, when the alarm is rung or the store's host is gone.

        The host may come up to `start_up_seconds` later.
        """
        threading.Thread(target=self._listen, args=(heard, start_up_seconds), name="bell", daemon=True).start()

    def close(self) -> None:
        """From now on nothing is heard: the order is done, and the others end, too."""
        self._is_closed = True

    def board(self) -> Board:
        """A connection for a few words. Raises OSError where the store's host is gone.

        It is tried first, since the store's own client would try for long and write pages about it.
        """
        self._try()
        return self._connect(_TALK_SECONDS)

    def _try(self) -> None:
        socket.create_connection((self._address, self._port), timeout=_TALK_SECONDS).close()

    def _connect(self, seconds: float) -> Board:
        timeout = timedelta(seconds=seconds)
        store = dist.TCPStore(self._address, self._port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
        return Board(dist.PrefixStore("bell", store), self._devices)  # type: ignore[attr-defined]

    def _listen(self, heard: Callable[[Cause], None], start_up_seconds: float) -> None:
        patience_seconds = start_up_seconds
        while not self._is_closed:
            try:
                board = self._connect(patience_seconds)
                patience_seconds = _TALK_SECONDS
                alarm = board.wait_for_alarm(timedelta(days=1))
            except DistStoreError:
                continue  # a day without an alarm
            except (OSError, RuntimeError):
                if self._is_reachable():
                    time.sleep(_TALK_SECONDS)
                    continue  # it was this connection alone
                alarm = Cause(FailureReason.PEER_LOST, f"{self._address}:{self._port}, where the gang meets, is gone")
            if not self._is_closed:
                heard(alarm)
            return

    def _is_reachable(self) -> bool:
        try:
            self._try()
        except OSError:
            return False
        return True
