"""Back-off of one plan's requests: none that was refused is sent again before its pause, which doubles, is over."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from trainwright_operator.kube.client import ApiError

FIRST_SECONDS: Final = 2.0
LONGEST_SECONDS: Final = 40.0
"""Longest pause: a plan goes on within a minute of the end of a refusal, and asks at most twice in one until then."""
_SHORTEST_SHARE: Final = 0.75
"""Share of a pause that is always kept; the rest is left to chance, so that plans do not ask together."""
_GAP_SECONDS: Final = 15.0
"""Pause between repeats of requests of one kind, such as the deletions of several jobs."""
_FORGOTTEN_SECONDS: Final = 600.0
"""Time after which a refusal of what nobody has wanted since is forgotten."""

PIN_KEY: Final = "PinPod"
"""First word of the keys of pins."""
_READ_KEY: Final = "read"
"""Key of all that a reconciliation reads first: without any of it there is no decision."""
QUEUE_KEY: Final = "queue"
"""Key of the reading of the plan's queue."""
WORKLOADS_KEY: Final = "workloads"
"""Key of what Kueue says about the plan's jobs."""
_HELPFUL: Final = frozenset({"log", "mounted", WORKLOADS_KEY})
"""First words of the keys of what only helps: no reconciliation is made for its sake."""


class _Refusal(NamedTuple):
    """Refusals of one request in a row, with the last one's error, and when it may be sent again."""

    times: int
    error: ApiError
    due_at: float


class BackOff:
    """Refused requests by key, such as the kind and name of what was to be created, by the loop's clock."""

    def __init__(self) -> None:
        self._refusals: dict[str, _Refusal] = {}
        self._wanted: set[str] = set()
        self._wanted_before: set[str] = set()
        self._repeats: dict[str, tuple[str, float]] = {}

    def begin_pass(self) -> None:
        """Forget which requests the last pass wanted, and refusals of long ago."""
        now = _now()
        self._wanted_before, self._wanted = self._wanted, set()
        self._refusals = {
            key: refusal for key, refusal in self._refusals.items() if now - refusal.due_at < _FORGOTTEN_SECONDS
        }

    def held(self, key: str) -> ApiError | None:
        """Return the last refusal of a request that this pass wants and that may not be sent yet; else None."""
        refusal = self._refusals.get(key)
        if refusal is None or (_now() >= self._due_at(key) and not self._is_after_another(key)):
            return None
        self._want(key)
        return refusal.error

    def held_pins(self, pods: Iterable[str]) -> frozenset[str]:
        """Return those of the pods whose pin may not be sent yet."""
        now = _now()
        keys = ((name, f"{PIN_KEY} {name}") for name in pods)
        return frozenset(name for name, key in keys if key in self._refusals and now < self._due_at(key))

    def refuse(self, key: str, error: ApiError) -> int:
        """Note that a request was refused, and return how often in a row.

        Its pause is as long as that of others of its kind: what refuses one job, for example, most often refuses all.
        """
        refusal = self._refusals.get(key)
        times = 1 if refusal is None else refusal.times + 1
        if refusal is not None:
            self._repeats[_kind(key)] = key, _now()
        most = max([times, *(refusal.times for other, refusal in self._refusals.items() if _kind(other) == _kind(key))])
        seconds = max(pause_seconds(most, random.random()), min(error.retry_after_seconds, LONGEST_SECONDS))  # noqa: S311 - jitter
        self._refusals[key] = _Refusal(times, error, _now() + seconds)
        self._want(key)
        return times

    def times(self, key: str) -> int:
        """Return how often in a row a request was refused."""
        refusal = self._refusals.get(key)
        return 0 if refusal is None else refusal.times

    def last(self, key: str) -> ApiError | None:
        """Return the last refusal of a request, or None where the last answer was none."""
        refusal = self._refusals.get(key)
        return None if refusal is None else refusal.error

    def accept(self, key: str) -> None:
        """Note that a request was answered."""
        self._refusals.pop(key, None)

    def clear(self) -> None:
        """Forget everything: an edit of the plan tries again at once."""
        self._refusals.clear()

    def pause(self) -> float | None:
        """Return seconds until the first of the requests that this pass wanted may be sent, or None without any."""
        keys = {_READ_KEY} if self.is_unread else self._wanted
        due = [self._turn_at(key) for key in keys if key in self._refusals]
        return max(min(due) - _now(), 0.0) if due else None

    def _want(self, key: str) -> None:
        if _kind(key) not in _HELPFUL:
            self._wanted.add(key)

    def _is_after_another(self, key: str) -> bool:
        """Return whether another refused request of the kind has waited for longer: they take turns."""
        return any(True for _ in self._before(key))

    def _before(self, key: str) -> Iterator[str]:
        others = (self._wanted | self._wanted_before) & self._refusals.keys() - {key}
        own = self._refusals[key].due_at
        return (other for other in others if _kind(other) == _kind(key) and self._refusals[other].due_at < own)

    def _turn_at(self, key: str) -> float:
        """Return when a refused request may be sent at the earliest: not before the first of those that come before it."""
        return max(self._due_at(key), min(map(self._due_at, self._before(key)), default=0.0))

    def _due_at(self, key: str) -> float:
        """Return when a refused request may be sent: after its pause, and not soon after another one of its kind."""
        last, repeated_at = self._repeats.get(_kind(key), (key, 0.0))
        return max(self._refusals[key].due_at, repeated_at + _GAP_SECONDS if last != key else 0.0)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Note where what a reconciliation reads first is refused."""
        try:
            yield
        except ApiError as error:
            self.refuse(_READ_KEY, error)
            raise

    def note_read(self) -> None:
        """Note that all was read."""
        self.accept(_READ_KEY)

    @property
    def is_unread(self) -> bool:
        """Return whether reading failed."""
        return _READ_KEY in self._refusals


def pause_seconds(times: int, chance: float) -> float:
    """Return the pause after that many refusals in a row; `chance`: from 0 to 1."""
    longest = min(FIRST_SECONDS * 2.0 ** min(max(times - 1, 0), 10), LONGEST_SECONDS)
    return longest * (_SHORTEST_SHARE + (1.0 - _SHORTEST_SHARE) * chance)


def _kind(key: str) -> str:
    return key.partition(" ")[0]


def _now() -> float:
    return asyncio.get_running_loop().time()
