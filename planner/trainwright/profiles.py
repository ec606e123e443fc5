"""Layer costs on a device: measured (or estimated) seconds and bytes by accelerator, kind, tensor degree and rows."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Final, Literal

from trainwright.bounds import OMITTED_DEFAULT, Bytes, Count, Ratio, Rows, Seconds
from trainwright.document_kind import document

MORE_THAN_ANY_DEVICE_BYTES: Final = 2**42
"""Activation bytes of a layer that did not fit: more than any device has, so that no plan counts on it."""
STORES_SCORES: Final = "math"
"""Kernel of PyTorch's fused attention that stores all scores."""
HOST_BOUND_SHARE: Final = 0.9
"""Share of a layer's seconds in whose submission the host, not the GPU, determines them."""


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """Measured figures of one layer kind on one rank.

    Attributes:
        rows: rows that one rank computes at a time (AMP's micro-batch size).
        forward_seconds: median, without collectives; likewise backward_seconds and update_seconds (optimizer).
        activation_bytes: saved by the forward for the backward, including the layer's input.
        parameter_bytes: one rank's weights of the layer.
        relative_spread: (90th - 10th percentile) / median of forward plus backward.
        peak_bytes: peak while the layer was computed and updated alone: weights, gradients, optimizer state,
            activations and workspace; None if it was not measured.
        attention: kernels of PyTorch's fused attention that the forward took on a GPU (`flash`, `cudnn`, `memory_efficient`,
            `math`); empty on other devices and without attention.
        submission_seconds: time that the process takes to submit a forward and a backward to an idle GPU, with what it waits
            for the GPU meanwhile, as some mixtures of experts do; None on other devices.
    """

    accelerator: str
    kind: str
    tensor_degree: Rows
    rows: Rows
    forward_seconds: Seconds
    backward_seconds: Seconds
    update_seconds: Seconds
    activation_bytes: Bytes
    parameter_bytes: Bytes
    samples: Count = 1
    relative_spread: Ratio = 0.0
    peak_bytes: Bytes | None = None
    attention: Annotated[tuple[str, ...], OMITTED_DEFAULT] = ()
    submission_seconds: Annotated[Seconds | None, OMITTED_DEFAULT] = None

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

    @property
    def is_host_bound(self) -> bool:
        """True if the GPU computes the layer as fast as the process submits its operators, and no faster."""
        submitted = self.submission_seconds
        return submitted is not None and submitted >= HOST_BOUND_SHARE * (self.forward_seconds + self.backward_seconds)


@dataclass(frozen=True, slots=True)
class LayerTooLarge:
    """Layer kind that does not fit alone into an accelerator's memory with `rows` rows or more."""

    accelerator: str
    kind: str
    tensor_degree: Rows
    rows: Rows


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Seconds and bytes of one layer at a number of rows on one rank."""

    forward_seconds: float
    backward_seconds: float
    update_seconds: float
    activation_bytes: float
    parameter_bytes: float


@document("Profiles")
@dataclass(frozen=True)
class Profiles:
    """All layer profiles of one model, measured or estimated from data sheets.

    Attributes:
        too_large: layers that were tried and did not fit: no plan computes as many rows, or more, of them there.
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

    def __repr__(self) -> str:
        names = ", ".join(dict.fromkeys(layer.accelerator for layer in self.layers))
        return f"<Profiles of {names}: {len(self.layers)} layers, {self.origin}>"

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
        """Minimum number of rows that did not fit."""
        least: dict[tuple[str, str, int], int] = {}
        for large in self.too_large:
            key = (large.accelerator, large.kind, large.tensor_degree)
            least[key] = min(large.rows, least.get(key, large.rows))
        return least

    def tensor_degrees(self, accelerator: str, kind: str) -> tuple[int, ...]:
        """Return the tensor degrees at which the kind was profiled on the accelerator, ascending."""
        return tuple(sorted(degree for (a, k, degree) in self._series if (a, k) == (accelerator, kind)))

    def has(self, accelerator: str, kind: str, tensor_degree: int) -> bool:
        return (accelerator, kind, tensor_degree) in self._series

    def accelerators_without_memory(self) -> dict[str, str]:
        """Return accelerators without the memory for some layer kind at any rows and tensor degree, with that kind."""
        return {
            large.accelerator: large.kind
            for large in reversed(self.too_large)
            if not self.tensor_degrees(large.accelerator, large.kind)
        }

    def kinds_that_store_scores(self) -> dict[str, tuple[str, ...]]:
        """Return the kinds of layers whose attention stores all scores, by accelerator."""
        return _kinds_by_accelerator(layer for layer in self.layers if STORES_SCORES in layer.attention)

    def host_bound_kinds(self) -> dict[str, tuple[str, ...]]:
        """Return the kinds of layers that the host bounds wherever they are profiled on an accelerator, by accelerator.

        That is, at every tensor degree and number of rows.
        """
        others = {(layer.accelerator, layer.kind) for layer in self.layers if not layer.is_host_bound}
        return _kinds_by_accelerator(layer for layer in self.layers if (layer.accelerator, layer.kind) not in others)

    def cost(self, accelerator: str, kind: str, tensor_degree: int, rows: int) -> LayerCost:
        """Interpolate a layer's cost between profiled row counts; beyond them the nearest segment continues.

        At rows that did not fit, its activations exceed any device's memory. Raises ValueError if the kind was not
        profiled on that accelerator at that tensor degree.
        """
        key = (accelerator, kind, tensor_degree, rows)
        if key not in self._costs:
            least_too_large = self._least_too_large.get((accelerator, kind, tensor_degree))
            if self.has(accelerator, kind, tensor_degree):
                cost = _interpolate(self._series[accelerator, kind, tensor_degree], rows)
            elif least_too_large is not None:
                cost = self._extrapolate_from_larger_degree(accelerator, kind, tensor_degree, rows)
            else:
                raise _not_profiled(accelerator, kind, tensor_degree)
            if least_too_large is not None and rows >= least_too_large:
                activation_bytes = max(cost.activation_bytes, float(MORE_THAN_ANY_DEVICE_BYTES))
                cost = replace(cost, activation_bytes=activation_bytes)
            self._costs[key] = cost
        return self._costs[key]

    def workspace_bytes(
        self, accelerator: str, kind: str, tensor_degree: int, rows: int, state_bytes: float
    ) -> float | None:
        """Return what a layer takes at its peak besides its training state and what it saves for the backward.

        It is interpolated as costs are; None where no peak was measured.
        """
        profiles = self._series.get((accelerator, kind, tensor_degree), [])
        series = [
            replace(
                profile, activation_bytes=max(round(profile.peak_bytes - state_bytes) - profile.activation_bytes, 0)
            )
            for profile in profiles
            if profile.peak_bytes is not None
        ]
        return _interpolate(series, rows).activation_bytes if series else None

    def _extrapolate_from_larger_degree(self, accelerator: str, kind: str, tensor_degree: int, rows: int) -> LayerCost:
        """Scale the cost at a larger degree to one at which the layer did not fit; it shows how fast devices are."""
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


def _kinds_by_accelerator(layers: Iterable[LayerProfile]) -> dict[str, tuple[str, ...]]:
    kinds_of: dict[str, dict[str, None]] = {}
    for layer in layers:
        kinds_of.setdefault(layer.accelerator, {})[layer.kind] = None
    return {accelerator: tuple(kinds) for accelerator, kinds in kinds_of.items()}


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
