"""What no plan of a problem takes less than, proven: the measure of how good an answer can still get."""

from __future__ import annotations

from trainwright.search.auto.bound.lower_bound import lower_bound_seconds

__all__ = ["lower_bound_seconds"]
