"""States of the optimizer that a run does not take from a checkpoint, whose run trained other weights."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from trainwright_worker.executor.checkpoint_chunks import weight_with_state


@dataclass(frozen=True, slots=True)
class TrainedChange:
    """Weights that a run trains and the checkpoint's run did not, and the other way round.

    Attributes:
        newly_trained, newly_frozen: names of weights.
        resets: whether all states start at zero, since the optimizer counts the updates of all weights as one number.
    """

    newly_trained: tuple[str, ...] = ()
    newly_frozen: tuple[str, ...] = ()
    resets: bool = False

    @classmethod
    def of(cls, own: Collection[str], stored: Collection[str], *, counts_updates: bool) -> TrainedChange:
        """Compare the names of a run's tensors, as the checkpoint has them, with those of the checkpoint's."""
        trained, saved = ({weight_with_state(name) for name in names} - {None} for names in (own, stored))
        if not (trained and saved):  # an optimizer without states, or another one's
            return cls()
        newly_trained = tuple(sorted(filter(None, trained - saved)))
        newly_frozen = tuple(sorted(filter(None, saved - trained)))
        return cls(newly_trained, newly_frozen, resets=counts_updates and bool(newly_trained))

    def reads(self, name: str) -> bool:
        """Return whether a tensor of the checkpoint, or of this run, is read."""
        weight = weight_with_state(name)
        return weight is None or not (self.resets or weight in self.newly_trained or weight in self.newly_frozen)

    def sentence(self) -> str:
        """Return what happens to states; empty if all of them go on."""
        parts = []
        if self.resets:
            parts.append(
                f"the optimizer starts anew, since it counts the updates of all weights as one number, and the checkpoint's run did "
                f"not train {_some(self.newly_trained)}"
            )
        elif self.newly_trained:
            parts.append(
                f"states of {_some(self.newly_trained)} start at zero, since the checkpoint's run did not train them"
            )
        if self.newly_frozen:
            parts.append(f"states of {_some(self.newly_frozen)} are left out, since this run does not train them")
        return "; ".join(parts)


def _some(weights: Sequence[str]) -> str:
    return f"{weights[0]} and {len(weights) - 1} more" if len(weights) > 1 else weights[0]
