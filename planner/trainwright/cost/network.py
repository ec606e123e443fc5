"""Transfers that run at the same time, advanced from one event to the next."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from trainwright.cost.collectives import Fabric, Route

T = TypeVar("T")

_DONE = 1e-9
"""Share of a transfer that rounding may leave over."""


@dataclass(slots=True)
class _Transfer(Generic[T]):
    route: Route
    total_bytes: float
    left_bytes: float
    token: T


@dataclass
class Network(Generic[T]):
    """What is being sent now. Rates change only when a transfer starts or ends.

    Attributes:
        now: seconds since the start of the iteration.
    """

    fabric: Fabric
    now: float = 0.0
    _active: list[_Transfer[T]] = field(default_factory=list)
    _rates: tuple[float, ...] = ()
    _next_end: float = math.inf
    _stale: bool = False

    def start(self, route: Route, message_bytes: float, token: T) -> None:
        """Start a transfer between nodes now; `token` comes back from `advance` when its last byte has left."""
        self._active.append(_Transfer(route, message_bytes, message_bytes, token))
        self._stale = True

    def next_end(self) -> float:
        """When the next transfer ends, if none starts before; infinity where there is none."""
        if self._stale:
            self._active.sort(key=_sort_key)
            self._rates = self.fabric.rates(tuple(transfer.route for transfer in self._active))
            self._next_end = self.now + min(
                (t.left_bytes / rate for t, rate in zip(self._active, self._rates, strict=True)), default=math.inf
            )
            self._stale = False
        return self._next_end

    def advance(self, until: float) -> list[T]:
        """Let time pass until then (at most next_end()); the tokens of transfers that ended."""
        if not self._active:
            self.now = until
            return []
        self.next_end()
        passed = until - self.now
        self.now = until
        ended: list[T] = []
        for transfer, rate in zip(self._active, self._rates, strict=True):
            transfer.left_bytes -= passed * rate
            if transfer.left_bytes <= _DONE * transfer.total_bytes:
                ended.append(transfer.token)
        if ended:
            self._active = [t for t in self._active if t.left_bytes > _DONE * t.total_bytes]
            self._stale = True
        elif until >= self._next_end:  # rounding kept a rest: it ends now, lest time stand still
            self._next_end = math.nextafter(until, math.inf)
        return ended


def _sort_key(transfer: _Transfer[T]) -> tuple[tuple[tuple[str, str], ...], float]:
    """The same constellation of routes in the same order, so that its rates are computed once."""
    return transfer.route.crossings, transfer.route.alone_bytes_per_second
