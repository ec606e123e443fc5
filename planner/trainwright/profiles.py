"""What layers cost on a device: measured (or estimated) seconds and bytes, by accelerator, kind, tensor degree, rows."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Literal

MORE_THAN_ANY_DEVICE_BYTES: Final = 2**42
"""What a layer is said to keep where it did not fit: no device has so much memory, so that no plan counts on it."""


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
    """All layer profiles of one model. `origin` says whether they were measured or estimated from data sheets.

    Attributes:
        too_large: what was tried and did not fit: no plan computes so many rows, or more, of such a layer there.
    """

    layers: tuple[LayerProfile, ...]
    origin: Literal["measured", "estimated"] = "measured"
    too_large: tuple[LayerTooLarge, ...] = ()

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

    @cached_property
    def _least_too_large(self) -> dict[tuple[str, str, int], int]:
        """The fewest rows that did not fit."""
        least: dict[tuple[str, str, int], int] = {}
        for one in self.too_large:
            key = (one.accelerator, one.kind, one.tensor_degree)
            least[key] = min(one.rows, least.get(key, one.rows))
        return least

    def tensor_degrees(self, accelerator: str, kind: str) -> tuple[int, ...]:
        """Tensor degrees at which the kind was profiled on the accelerator, ascending."""
        return tuple(sorted(degree for (a, k, degree) in self._series if (a, k) == (accelerator, kind)))

    def has(self, accelerator: str, kind: str, tensor_degree: int) -> bool:
        """Whether the kind was profiled on the accelerator at that degree."""
        return (accelerator, kind, tensor_degree) in self._series

    def without_room(self) -> dict[str, str]:
        """By accelerator that lacks the memory for some kind of layer, however few rows and however divided: that kind."""
        return {
            one.accelerator: one.kind
            for one in reversed(self.too_large)
            if not self.tensor_degrees(one.accelerator, one.kind)
        }

    def cost(self, accelerator: str, kind: str, tensor_degree: int, rows: int) -> LayerCost:
        """Cost of a layer for `rows` rows: linear between profiled row counts, beyond them along the nearest segment.

        With as many rows as did not fit, it keeps more bytes than there are. Raises ValueError where the kind was not
        profiled on that accelerator at that tensor degree.
        """
        key = (accelerator, kind, tensor_degree, rows)
        if key not in self._costs:
            least_too_large = self._least_too_large.get((accelerator, kind, tensor_degree))
            if self.has(accelerator, kind, tensor_degree):
                found = _interpolate(self._series[accelerator, kind, tensor_degree], rows)
            elif least_too_large is not None:
                found = self._cost_undivided(accelerator, kind, tensor_degree, rows)
            else:
                raise _not_profiled(accelerator, kind, tensor_degree)
            if least_too_large is not None and rows >= least_too_large:
                held = max(found.activation_bytes, float(MORE_THAN_ANY_DEVICE_BYTES))
                found = replace(found, activation_bytes=held)
            self._costs[key] = found
        return self._costs[key]

    def _cost_undivided(self, accelerator: str, kind: str, tensor_degree: int, rows: int) -> LayerCost:
        """About what would be measured where a layer fits only if it is divided further: it tells how fast devices are."""
        further = [degree for degree in self.tensor_degrees(accelerator, kind) if degree > tensor_degree]
        if not further:
            raise _not_profiled(accelerator, kind, tensor_degree)
        part = _interpolate(self._series[accelerator, kind, further[0]], rows)
        times = further[0] / tensor_degree
        return LayerCost(
            part.forward_seconds * times,
            part.backward_seconds * times,
            part.update_seconds * times,
            part.activation_bytes * times,
            part.parameter_bytes * times,
        )


def _not_profiled(accelerator: str, kind: str, tensor_degree: int) -> ValueError:
    return ValueError(
        f"there is no profile of layer kind {kind} on {accelerator} at tensor degree {tensor_degree}; "
        "profile it, or leave the accelerator or the degree out"
    )


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
