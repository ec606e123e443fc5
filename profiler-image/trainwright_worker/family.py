"""The one family that this worker has layers for; needs no torch."""

from __future__ import annotations

from trainwright.families import Gpt
from trainwright.model import Model
from trainwright.orders import FailureReason
from trainwright_worker.failures import WorkerError


def gpt_of(model: Model) -> Gpt:
    """The model's family. Raises WorkerError where it is another than GPT."""
    if isinstance(model.family, Gpt):
        return model.family
    raise WorkerError(
        FailureReason.ORDER_INVALID,
        f"model.family {model.family.family} cannot be run: this worker has the layers of gpt alone; order that",
    )
