"""`spec.model`: the planner's families with bounds that the API server checks. One file a family."""

from __future__ import annotations

from trainwright_operator.api.families.family import FamilySpec
from trainwright_operator.api.families.model import ModelSpec

__all__ = ["FamilySpec", "ModelSpec"]
