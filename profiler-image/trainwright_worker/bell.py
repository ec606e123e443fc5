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

Board = Any
"""The store as torch has it, whose types are not published."""

PATIENCE_SECONDS = 3.0
"""All processes that can answer to an alarm have done so by then."""
_TALK_SECONDS = 2.0
_POLL_SECONDS = 0.1
_ALARM = "alarm"
_ANSWERS = "answers"
"""How many have answered."""
_TOLD = "told"
"""How many have told of a failure of their own."""


class Bell:
    """One process's end of it.

    Attributes:
        devices: of all processes, by rank; a launcher that only tells may leave them out.
    """

    def __init__(self, address: str, port: int, devices: Sequence[Device] = ()) -> None:
        self._address, self._port = address, port
        self.devices = tuple(devices)
        self._is_closed = False

    def listen(self, heard: Callable[[Cause], None], *, start_up_seconds: float = _TALK_SECONDS) -> None:
        """Call `heard` once, from a thread of its own, when the alarm is rung or the store's host is gone.

        The host may come up to `start_up_seconds` later.
        """
        threading.Thread(target=self._listen, args=(heard, start_up_seconds), name="bell", daemon=True).start()

    def close(self) -> None:
        """From now on nothing is heard: the order is done, and the others end, too."""
        self._is_closed = True

    def ring(self, alarm: Cause) -> bool:
        """Raise the alarm. Returns whether this was the first one; a later one is not heard."""
        body = documents.dumps(alarm)
        return bool(self._talk().compare_set(_ALARM, "", body) == body.encode())

    def answer(self, stand: Stand) -> None:
        """Say where this process stands."""
        board = self._talk()
        board.set(f"rank {stand.rank}", documents.dumps(stand))
        board.add(_TOLD, int(stand.failure is not None))
        board.add(_ANSWERS, 1)

    def tell_of_pod(self, cause: Cause) -> None:
        """A launcher's words, where its processes could not speak, or as a whole were told to end."""
        board = self._talk()
        board.set(f"node {cause.node}", documents.dumps(cause))
        board.add(_TOLD, 1)

    def gather(self, *, is_enough: Callable[[Stands], bool] = lambda _stands: False) -> Stands:
        """What the others answered. Those who have not are waited for, until what was told meanwhile is enough."""
        board = self._talk()
        end = time.monotonic() + PATIENCE_SECONDS
        told_before = 0
        while board.add(_ANSWERS, 0) < len(self.devices) and time.monotonic() < end:
            told = board.add(_TOLD, 0)
            if told > told_before and is_enough(self._read(board)):
                break
            told_before = told
            time.sleep(_POLL_SECONDS)
        return self._read(board)

    def _read(self, board: Board) -> Stands:
        nodes = dict.fromkeys(device.node for device in self.devices)
        answers = [_present(board, f"rank {rank}", Stand) for rank in range(len(self.devices))]
        pods = [_present(board, f"node {node}", Cause) for node in nodes]
        return Stands(
            self.devices,
            tuple(answer for answer in answers if answer is not None),
            tuple(pod for pod in pods if pod is not None),
        )

    def _talk(self) -> Board:
        """A connection for a few words. Raises OSError where the store's host is gone.

        It is tried first, since the store's own client would try for long and write pages about it.
        """
        socket.create_connection((self._address, self._port), timeout=_TALK_SECONDS).close()
        return self._connect(timedelta(seconds=_TALK_SECONDS))

    def _connect(self, timeout: timedelta) -> Board:
        store = dist.TCPStore(self._address, self._port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
        board: Board = dist.PrefixStore("bell", store)  # type: ignore[attr-defined]
        return board

    def _listen(self, heard: Callable[[Cause], None], start_up_seconds: float) -> None:
        while not self._is_closed:
            try:
                board = self._connect(timedelta(seconds=start_up_seconds))
                start_up_seconds = _TALK_SECONDS
                board.wait([_ALARM], timedelta(days=1))
                alarm: Cause = documents.loads(board.get(_ALARM), Cause)
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
            socket.create_connection((self._address, self._port), timeout=_TALK_SECONDS).close()
        except OSError:
            return False
        return True


def _present(board: Board, key: str, noun: Any) -> Any:
    return documents.loads(board.get(key), noun) if board.check([key]) else None
