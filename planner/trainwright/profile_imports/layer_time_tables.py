"""Tables of layer times as profiles of a model's kinds, and which entries are its blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainwright.layer import LayerKind
from trainwright.model import Model
from trainwright.profiles import LayerProfile, Profiles

Array = NDArray[np.float64]

GAP_PENALTY = 1.0
"""Penalty for leaving out entries between two blocks, in units of a factor e between measured and expected time."""
CHANGE_PENALTY = 0.1
"""Penalty per block of a kind whose factor differs from the previous kind's, in the same units."""
MAX_FACTORS = 33


def find_blocks(seconds: Sequence[float], expected: Sequence[float], kinds: Sequence[str]) -> tuple[int, ...]:
    """Find the ascending entries whose times best match the blocks' expected times, up to a factor per kind.

    A dynamic program over (block, logarithm of the factor, entry) minimizes the sum of |log(time / expected) - factor|,
    of the gaps between blocks, and of the factor's changes where one kind follows another. Without gaps and with one
    kind it finds the best window.
    """
    smallest = min((value for value in seconds if value > 0), default=1.0)
    times = np.log(np.maximum(seconds, smallest * 1e-3))
    log_expected = np.log(np.maximum(expected, 1e-30))
    # A kind may need another factor than the others, so each wanted time meets every quantile.
    factors = np.unique(np.quantile(times, np.linspace(0, 1, MAX_FACTORS))[:, None] - np.unique(log_expected)).ravel()
    deviations = np.abs(times[None, None, :] - log_expected[:, None, None] - factors[None, :, None])
    changes = np.abs(factors[:, None] - factors[None, :])[:, :, None]
    total = deviations[0]
    entry_before = np.zeros((len(expected), *total.shape), dtype=np.int64)
    factor_before = np.zeros_like(entry_before)
    for block in range(1, len(expected)):
        total, entry_before[block] = _extended(total)
        factor_before[block] = np.arange(len(factors))[:, None]
        if kinds[block] != kinds[block - 1]:
            changed = total[None, :, :] + CHANGE_PENALTY * kinds.count(kinds[block]) * changes
            factor_before[block] = np.argmin(changed, axis=1)
            total = np.min(changed, axis=1)
            entry_before[block] = np.take_along_axis(entry_before[block], factor_before[block], axis=0)
        total = total + deviations[block]
    factor, entry = (int(place) for place in np.unravel_index(int(np.argmin(total)), total.shape))
    entries = [entry]
    for block in range(len(expected) - 1, 0, -1):
        factor, entry = int(factor_before[block, factor, entry]), int(entry_before[block, factor, entry])
        entries.append(entry)
    return tuple(reversed(entries))


def _extended(total: Array) -> tuple[Array, NDArray[np.int64]]:
    """Return [factor, entry] minimum sums of the blocks before the next one, and the last entry of each."""
    count = total.shape[1]
    positions = np.broadcast_to(np.arange(count), total.shape)
    least = np.minimum.accumulate(total, axis=1)
    is_new = np.concatenate([np.full((total.shape[0], 1), True), least[:, 1:] < least[:, :-1]], axis=1)
    least_at = np.maximum.accumulate(np.where(is_new, positions, 0), axis=1)
    previous = np.full(total.shape, np.inf)
    origin = np.zeros(total.shape, dtype=np.int64)
    previous[:, 1:], origin[:, 1:] = total[:, :-1], positions[:, :-1]
    gapped = np.full(total.shape, np.inf)
    gapped[:, 2:] = least[:, :-2] + GAP_PENALTY
    better = gapped < previous
    origin[:, 2:] = np.where(better[:, 2:], least_at[:, :-2], origin[:, 2:])
    return np.where(better, gapped, previous), origin


def layer_seconds(
    seconds: Sequence[float], entries: Sequence[int], model: Model, expected: Sequence[float]
) -> tuple[float, ...]:
    """Return the time of every layer of the model, with all entries counted once.

    Entries between two blocks (before the first, after the last) belong to the model's layers there, in proportion to
    their expected times; without such layers, to the nearest layer that is no block, or else to the adjacent block. A
    layer without any entry takes its expected time.
    """
    blocks = model.blocks
    seconds_of_layer = [0.0] * len(model.layers)
    for layer, entry in zip(blocks, entries, strict=True):
        seconds_of_layer[layer] = seconds[entry]
    layer_ends = zip((-1, *blocks), (*blocks, len(model.layers)), strict=True)
    entry_ends = zip((-1, *entries), (*entries, len(seconds)), strict=True)
    for (layer_before, layer_behind), (entry_before, entry_behind) in zip(layer_ends, entry_ends, strict=True):
        between = range(layer_before + 1, layer_behind)
        total = sum(seconds[entry_before + 1 : entry_behind])
        if entry_behind - entry_before == 1:
            for layer in between:
                seconds_of_layer[layer] += expected[layer]
        elif between:
            whole = sum(expected[layer] for layer in between)
            for layer in between:
                seconds_of_layer[layer] += total * (expected[layer] / whole if whole > 0 else 1 / len(between))
        else:
            seconds_of_layer[_nearest(layer_before, layer_behind, model)] += total
    return tuple(seconds_of_layer)


def _nearest(before: int, behind: int, model: Model) -> int:
    """Return the layer nearest to the middle of two layers that is no block; else the adjacent block."""
    middle = (before + behind) / 2
    others = [layer for layer in range(len(model.layers)) if layer not in model.blocks]
    return min(others or [max(before, 0)], key=lambda layer: (abs(layer - middle), layer))


@dataclass(frozen=True, slots=True)
class MeasuredLayer:
    """Layer of the model in a table; bytes that the table lacks are None and follow from the model."""

    forward_seconds: float
    backward_seconds: float
    update_seconds: float
    activation_bytes: float | None = None
    parameter_bytes: float | None = None


@dataclass(frozen=True)
class Measurement:
    """All layers of the model, in order, as one rank of a tensor group computes them.

    Attributes:
        source: the file, for errors.
    """

    source: str
    tensor_degree: int
    rows: int
    layers: tuple[MeasuredLayer, ...]


def profiles_of(measurements: Sequence[Measurement], *, model: Model, accelerator: str) -> Profiles:
    """Return measured profiles of the model's kinds: means over the layers of a kind, with their spread.

    Means add up to the whole table's time; medians would not.

    A kind is profiled at every degree of the tables, even if this model does not split it: other runtimes do, and
    measured it so (Megatron's embedding and head). Plans cost such a kind at degree 1.

    Raises ValueError if a table occurs twice, or if degree 1 is needed and missing.
    """
    if not measurements:
        raise ValueError("there is no table to import; give at least one file")
    seen: dict[tuple[int, int], str] = {}
    for measurement in measurements:
        check_degree(measurement.tensor_degree, model, measurement.source)
        cell = measurement.tensor_degree, measurement.rows
        if cell in seen:
            raise ValueError(
                f"{measurement.source}: tensor degree {cell[0]} at {cell[1]} rows is in {seen[cell]} too; keep one of them"
            )
        seen[cell] = measurement.source
    _check_degree_one([degree for degree, _ in seen], measurements, model)
    ordered = sorted(measurements, key=lambda measurement: (measurement.tensor_degree, measurement.rows))
    layers = tuple(
        _profile(kind, measurement, model, accelerator) for measurement in ordered for kind in _used_kinds(model)
    )
    return Profiles(layers, origin="measured")


def update_shares(model: Model) -> tuple[float, ...]:
    """Return each layer's share of the optimizer's step, by parameters.

    It holds at any tensor degree, since the tables split all layers. The step updates a tied weight once; each of its
    layers still gets the share that it has alone, as in profiles of single layers.
    """
    values = [model.kind_of(layer).parameters for layer in range(len(model.layers))]
    return tuple(count / model.parameters if model.parameters else 1 / len(values) for count in values)


def _used_kinds(model: Model) -> list[LayerKind]:
    return [kind for kind in model.kinds if kind.name in model.layers]


def check_layer_count(count: int, model: Model, where: str) -> None:
    """Raise ValueError if a table's number of layers differs from the model's."""
    if count != len(model.layers):
        blocks = model.blocks
        others = len(model.layers) - len(blocks)
        remedy = "give the model that was measured"
        if len({model.layers[layer] for layer in blocks}) == 1 and count > others:
            remedy = f"give the model that was measured, with layers: {count - others}"
        raise ValueError(
            f"{where}: there are {count} layers, but the model has {len(model.layers)} (embedding and head included); {remedy}"
        )


def check_degree(tensor_degree: int, model: Model, where: str) -> None:
    """Raise ValueError if the model cannot have been measured at a tensor degree."""
    if tensor_degree < 1 or model.max_tensor_degree % tensor_degree:
        raise ValueError(
            f"{where}: the tensor degree {tensor_degree} does not divide the model's largest "
            f"({model.max_tensor_degree}); give the model that was measured, with a multiple of {tensor_degree} heads"
        )


def _check_degree_one(degrees: Iterable[int], measurements: Sequence[Measurement], model: Model) -> None:
    whole = [kind.name for kind in _used_kinds(model) if not kind.is_tensor_parallel]
    if 1 not in degrees and whole:
        raise ValueError(
            f"{measurements[0].source}: tensor degree 1 is missing, at which {' and '.join(whole)} are computed whatever "
            "the degree of the plan; import that table with the others"
        )


def _profile(kind: LayerKind, measurement: Measurement, model: Model, accelerator: str) -> LayerProfile:
    layers = [layer for layer, name in zip(measurement.layers, model.layers, strict=True) if name == kind.name]
    tensor, rows = measurement.tensor_degree, measurement.rows
    both = np.array([layer.forward_seconds + layer.backward_seconds for layer in layers])
    low, middle, high = (float(value) for value in np.percentile(both, (10, 50, 90)))
    activations = [layer.activation_bytes for layer in layers if layer.activation_bytes is not None]
    weights = [layer.parameter_bytes for layer in layers if layer.parameter_bytes is not None]
    return LayerProfile(
        accelerator=accelerator,
        kind=kind.name,
        tensor_degree=tensor,
        rows=rows,
        forward_seconds=_mean([layer.forward_seconds for layer in layers]),
        backward_seconds=_mean([layer.backward_seconds for layer in layers]),
        update_seconds=_mean([layer.update_seconds for layer in layers]),
        activation_bytes=round(_mean(activations) if activations else kind.saved_bytes(model.dtype, tensor, rows)),
        parameter_bytes=round(_mean(weights) if weights else kind.parameters_at(tensor) * model.dtype.num_bytes),
        samples=len(layers),
        relative_spread=(high - low) / middle if middle > 0 else 0.0,
    )


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))
