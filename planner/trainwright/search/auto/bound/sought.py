"""The most seconds within which nothing keeps, by halving."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from trainwright.search.auto.bound.ledger import Ledger, SpentError

_NEAR_NOTHING = 1e-9


def sought(
    keeps: Callable[[float], bool], between: tuple[float, float], ledger: Ledger, most_spent: float, precision: float
) -> float:
    """The most seconds between both, about, that no plan keeps within; what is known of it when so much is spent."""
    low, high = between
    highest = high
    most = ledger.spent + most_spent
    with suppress(SpentError):
        while high > max(low * (1 + precision), highest * _NEAR_NOTHING) and ledger.spent <= most:
            middle = (max(low, high * precision) * high) ** 0.5
            low, high = (low, middle) if keeps(middle) else (middle, high)
        if low >= highest or (high == highest and ledger.spent <= most and not keeps(highest)):
            return highest
    return low
