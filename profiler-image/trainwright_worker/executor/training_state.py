"""What a checkpoint tells about its training beside the tensors: a small document that anybody can read."""

from __future__ import annotations

from dataclasses import dataclass, fields

from trainwright.families import Family


@dataclass(frozen=True, slots=True)
class TrainingState:
    """The document beside a checkpoint's tensors.

    Attributes:
        family: of the model; a checkpoint loads into this one alone.
        iteration: how many iterations are done: the number of the next one.
        updates: how many of them updated the weights (float16's gradients may overflow).
        loss_scale: of float16's loss; None where it is not scaled.
        quiet_iterations: those since the loss scale last changed.
    """

    family: Family
    optimizer: str
    iteration: int
    updates: int
    loss_scale: float | None = None
    quiet_iterations: int = 0

    def misfit(self, family: Family, optimizer: str) -> str | None:
        """Why a training of that model by that optimizer cannot carry on from here, in words; None where it can."""
        if self.family.family != family.family:
            return f"it holds a model of family {self.family.family}, but this run trains {family.family}"
        for field in fields(family):
            there, here = getattr(self.family, field.name), getattr(family, field.name)
            if there != here:
                return (
                    f"{family.family}.{field.name} is {_shown(there)} in the checkpoint's model, but {_shown(here)} in "
                    "this run's; load it into the model that it was saved from"
                )
        if self.optimizer != optimizer:
            return (
                f"it was saved by optimizer {self.optimizer}, and the state of {optimizer} is not in it; "
                f"go on with {self.optimizer}"
            )
        return None


def _shown(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)
