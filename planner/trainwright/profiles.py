"""What layers cost on a device: measured (or estimated) seconds and bytes, by accelerator, kind, tensor degree, rows."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Literal


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """One measured layer kind.

    Attributes:
        rows: rows that one rank computes at a time (AMP's micro-batch size).
        forward_seconds: median, collectives not included; likewise backward_seconds and update_seconds (optimizer).
        activation_bytes: what the forward keeps for the backward, the layer's input included.
        parameter_bytes: what one rank holds of the layer's weights.
        relative_spread: (90th - 10th percentile) / median of forward plus backward.
        peak_bytes: the most that was held at once while the layer was computed and updated by itself: weights,
            gradients, optimizer state, activations and workspace; None where it was not measured.
    """

    accelerator: str
    kind: str
    tensor_degree: int
    rows: int
    forward_seconds: float
    backward_seconds: float
    update_seconds: float
    activation_bytes: int
    parameter_bytes: int
    samples: int = 1
    relative_spread: float = 0.0
    peak_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.rows < 1 or self.tensor_degree < 1:
            raise ValueError(
                f"profile of {self.kind} on {self.accelerator} needs rows and tensor_degree of at least 1, got "
                f"{self.rows} and {self.tensor_degree}"
            )
        for name in ("forward_seconds", "backward_seconds", "update_seconds", "activation_bytes", "parameter_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"profile of {self.kind} on {self.accelerator} has a negative {name}: {getattr(self, name)}"
                )


@dataclass(frozen=True, slots=True)
class LayerTooLarge:
    """A layer kind that does not fit into an accelerator's memory by itself with so many rows, or more."""

    accelerator: str
    kind: str
    tensor_degree: int
    rows: int


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Seconds and bytes of one layer for a given number of rows on one rank."""

    forward_seconds: float
    backward_seconds: float
    update_seconds: float
    activation_bytes: float
    parameter_bytes: float


@dataclass(frozen=True)
class Profiles:
    """All layer profiles of one model. `origin` says whether they were measured or estimated from data sheets."""

    layers: tuple[LayerProfile, ...]
    origin: Literal["measured", "estimated"] = "measured"

    def __post_init__(self) -> None:
        for (accelerator, kind, tensor, rows), uses in Counter(
            (layer.accelerator, layer.kind, layer.tensor_degree, layer.rows) for layer in self.layers
        ).items():
            if uses > 1:
                raise ValueError(
                    f"layer kind {kind} on {accelerator} at tensor degree {tensor} is profiled {uses} times for {rows} "
                    "rows; keep one of them"
                )

    @cached_property
    def _series(self) -> dict[tuple[str, str, int], list[LayerProfile]]:
        series: dict[tuple[str, str, int], list[LayerProfile]] = {}
        for profile in sorted(self.layers, key=lambda profile: profile.rows):
            series.setdefault((profile.accelerator, profile.kind, profile.tensor_degree), []).append(profile)
        return series

    @cached_property
    def _costs(self) -> dict[tuple[str, str, int, int], LayerCost]:
        return {}

    def tensor_degrees(self, accelerator: str, kind: str) -> tuple[int, ...]:
        """Tensor degrees at which the kind was profiled on the accelerator, ascending."""
        return tuple(sorted(degree for (a, k, degree) in self._series if (a, k) == (accelerator, kind)))

    def has(self, accelerator: str, kind: str, tensor_degree: int) -> bool:
        """Whether the kind was profiled on the accelerator at that degree."""
        return (accelerator, kind, tensor_degree) in self._series

    def cost(self, accelerator: str, kind: str, tensor_degree: int, rows: int) -> LayerCost:
        """Cost of a layer for `rows` rows: linear between profiled row counts, beyond them along the nearest segment.

        Raises ValueError where the kind was not profiled on that accelerator at that tensor degree.
        """
        key = (accelerator, kind, tensor_degree, rows)
        if key not in self._costs:
            try:
                series = self._series[accelerator, kind, tensor_degree]
            except KeyError:
                raise ValueError(
                    f"there is no profile of layer kind {kind} on {accelerator} at tensor degree {tensor_degree}; "
                    "profile it, or leave the accelerator or the degree out"
                ) from None
            self._costs[key] = _interpolate(series, rows)
        return self._costs[key]


def _interpolate(series: list[LayerProfile], rows: int) -> LayerCost:
    if len(series) == 1:
        only = series[0]
        scale = rows / only.rows
        return LayerCost(
            only.forward_seconds * scale,
            only.backward_seconds * scale,
            only.update_seconds,
            only.activation_bytes * scale,
            only.parameter_bytes,
        )
    right = min(max(bisect_left([profile.rows for profile in series], rows), 1), len(series) - 1)
    low, high = series[right - 1], series[right]
    share = (rows - low.rows) / (high.rows - low.rows)

    def between(start: float, end: float) -> float:
        return max(start + share * (end - start), 0.0)

    return LayerCost(
        between(low.forward_seconds, high.forward_seconds),
        between(low.backward_seconds, high.backward_seconds),
        between(low.update_seconds, high.update_seconds),
        between(low.activation_bytes, high.activation_bytes),
        low.parameter_bytes,
    )
