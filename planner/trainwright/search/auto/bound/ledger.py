"""What a proof has looked at so far, and tables that it keeps for its next questions."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from trainwright.search.auto.bound.options import Array

STEP = 20_000
"""Numbers that are looked at in the time of one step beside those that it looks at."""
_MOST_KEPT_BYTES = 2**28


class SpentError(Exception):
    """More is looked at than there was to spend; what was asked then has no answer."""


class Ledger:
    """Of all tables of a problem."""

    def __init__(self, most: float = float("inf")) -> None:
        """So much may be spent, counted in numbers that are looked at."""
        self.most, self.spent = most, 0
        self._tables: dict[Hashable, Array] = {}
        self._bytes = 0

    def spend(self, count: int) -> None:
        """So many numbers are looked at."""
        self.spent += count
        if self.spent > self.most:
            raise SpentError

    def table(self, key: Hashable, made: Callable[[], Array]) -> Array:
        """A table as it was made, or made anew; where too much is kept, what was not asked for the longest is forgotten."""
        found = self._tables.pop(key, None)
        if found is None:
            found = made()
            self._bytes += found.nbytes
            while self._tables and self._bytes > _MOST_KEPT_BYTES:
                self._bytes -= self._tables.pop(next(iter(self._tables))).nbytes
        self._tables[key] = found
        return found
