"""A table of measured layers, one row count and one tensor degree, and how tables become profiles of a model's kinds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from trainwright.layer import LayerKind
from trainwright.model import Model
from trainwright.profiles import LayerProfile, Profiles


@dataclass(frozen=True, slots=True)
class MeasuredLayer:
    """One layer of the model in a table; bytes that the table does not tell are None and follow from the model."""

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
        samples: how many measurements stand behind each figure; 0 where it was derived from another measurement.
    """

    source: str
    tensor_degree: int
    rows: int
    layers: tuple[MeasuredLayer, ...]
    samples: int = 1


def profiles_of(measurements: Sequence[Measurement], *, model: Model, accelerator: str) -> Profiles:
    """Measured profiles of the model's kinds: of layers that share a kind the median, their spread recorded.

    A kind is profiled at every degree of the tables, whether or not this model divides it: what other runtimes divide
    (Megatron's embedding and head) was measured so. Where a model does not divide a kind, degree 1 is what it costs.

    Raises ValueError where a table is there twice, or where degree 1 is needed and missing.
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
    """Each layer's part of the optimizer's step, by its values; at any tensor degree, for whole tables divide all layers.

    The step updates a weight that several layers share once; each of them still gets the share that it has alone, as
    profiles of single layers do.
    """
    values = [model.kind_of(layer).parameters for layer in range(len(model.layers))]
    return tuple(count / model.parameters if model.parameters else 1 / len(values) for count in values)


def _used_kinds(model: Model) -> list[LayerKind]:
    return [kind for kind in model.kinds if kind.name in model.layers]


def check_layer_count(count: int, model: Model, where: str) -> None:
    """Raises ValueError where a table does not have as many layers as the model."""
    if count != len(model.layers):
        raise ValueError(
            f"{where}: there are {count} layers, but the model has {len(model.layers)} (embedding and head included); "
            "give the model that was measured"
        )


def check_degree(tensor_degree: int, model: Model, where: str) -> None:
    """Raises ValueError where the model cannot have been measured at that tensor degree."""
    if tensor_degree < 1 or model.max_tensor_degree % tensor_degree:
        raise ValueError(
            f"{where}: the tensor degree {tensor_degree} does not divide the model's largest "
            f"({model.max_tensor_degree}); give the model that was measured"
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
        forward_seconds=_median([layer.forward_seconds for layer in layers]),
        backward_seconds=_median([layer.backward_seconds for layer in layers]),
        update_seconds=_median([layer.update_seconds for layer in layers]),
        activation_bytes=round(
            _median(activations) if activations else rows * kind.saved_bytes_per_row(model.dtype, tensor)
        ),
        parameter_bytes=round(_median(weights) if weights else kind.parameters_at(tensor) * model.dtype.num_bytes),
        samples=measurement.samples * len(layers),
        relative_spread=(high - low) / middle if middle > 0 else 0.0,
    )


def _median(values: Sequence[float]) -> float:
    return float(np.median(values))
