"""Values of a model that change its results but neither time nor memory: stated by the model file, or assumed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from trainwright.families import Family, Gpt, Llama, Moe
from trainwright.families.fields import NORM_EPSILON, ROTARY_BASE, RotaryScaling
from trainwright.families.moe import BALANCE_LOSS_WEIGHT
from trainwright.layer import Attention
from trainwright.model import Model

MAX_GRADIENT_NORM: Final = 1.0
"""Norm to which every export clips the gradients of all weights; Megatron, torchtitan and transformers have it as default."""

_DEFAULTS: Final = {
    "rotary_base": ROTARY_BASE,
    "norm_epsilon": NORM_EPSILON,
    "balance_loss_weight": BALANCE_LOSS_WEIGHT,
}
"""Values that are assumed where the model file does not state them, which are those of our worker."""


def stated_or_assumed(family: Gpt | Llama | Moe, field: str) -> tuple[float, str]:
    """Return the value of a field, and the reason for it."""
    value = getattr(family, field)
    return (_DEFAULTS[field], "assumed: the model file has none") if value is None else (value, "model")


def assumed_values(family: Family | None) -> Iterator[str]:
    """Yield a sentence on the values that are assumed, if there are any."""
    if not isinstance(family, Llama | Moe) and not (isinstance(family, Gpt) and family.rotary_size is not None):
        return
    absent = [f"{name} {value:,g}" for name, value in _DEFAULTS.items() if getattr(family, name, 0) is None]
    if absent:
        yield (
            f"Assumed, since the model file does not state it: {', '.join(absent)}; state it under {family.family}, or give the "
            "model's config.json."
        )


def stores_scores(model: Model) -> bool:
    """Return whether attention stores its scores, as the model file says, in place of a fused kernel."""
    return model.kinds != model.family.stack(Attention.FUSED).kinds


def is_llama3(scaling: RotaryScaling) -> bool:
    """Return whether a scaling is Llama 3.1's in all but its factor."""
    return scaling == RotaryScaling("llama3", scaling.factor)
