"""What a plan costs: seconds of one iteration and bytes on every device."""

from __future__ import annotations

from trainwright.cost.estimate import Breakdown, Estimate, estimate

__all__ = ["Breakdown", "Estimate", "estimate"]
