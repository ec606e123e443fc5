"""Remark on a user's model that was not checked, or not all of it, when it was described."""

from __future__ import annotations

from trainwright.families import Custom
from trainwright.model import Model
from trainwright.report.remark import Remark


def unchecked(model: Model) -> Remark:
    """Return what of a user's model was not checked; empty for other families."""
    family = model.family
    if not isinstance(family, Custom):
        return Remark()
    if family.checks is None:
        return Remark((f"{family.unchecked[0].upper()}{family.unchecked[1:]}.",))
    if not family.checks.left_out:
        return Remark()
    first, *others = family.checks.left_out
    more = f", and {len(others)} more" if others else ""
    later = " Gangs that profile the layers check their values first." if family.checks.unchecked_kinds else ""
    return Remark((f"Not checked of {family.entrypoint}: {first}{more}.{later}",))
