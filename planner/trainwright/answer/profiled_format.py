"""Number format of measured profiles, by the bytes of their weights."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Final

from trainwright.layer import Dtype
from trainwright.profiles import LayerProfile, Profiles
from trainwright.training import Training

WEIGHT_TOLERANCE: Final = 0.05
"""Maximum relative difference of weight bytes: runtimes pad a vocabulary or omit a bias."""
_HALF: Final = 0.5


def profiled_format(profiles: Profiles, training: Training, native: Dtype) -> Dtype:
    """Return the format of profiled weights: where they take two bytes `native` or else float16, float32 otherwise."""
    ratios = [ratio for _, ratio in weight_ratios(profiles, training.in_format(Dtype.FLOAT32))]
    if not ratios or abs(median(ratios) / _HALF - 1) > WEIGHT_TOLERANCE:
        return Dtype.FLOAT32
    return native if native.num_bytes < Dtype.FLOAT32.num_bytes else Dtype.FLOAT16


def weight_ratios(profiles: Profiles, training: Training) -> Iterator[tuple[LayerProfile, float]]:
    """Yield the ratio of profiled weight bytes to the model's, where both are known.

    Kinds without tensor parallelism count at degree 1 only: the measured runtime may have sharded them (Megatron's
    vocabulary).
    """
    kinds = {kind.name: kind for kind in training.model.kinds}
    for layer in profiles.layers:
        kind = kinds.get(layer.kind)
        if kind is None:
            continue
        if layer.parameter_bytes and kind.parameters and (kind.is_tensor_parallel or layer.tensor_degree == 1):
            yield (
                layer,
                layer.parameter_bytes / (kind.parameters_at(layer.tensor_degree) * training.model.dtype.num_bytes),
            )
