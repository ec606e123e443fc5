"""A logical mesh: devices seen as a rectangle, with what collectives cost along each of its two dimensions."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LogicalMesh:
    """Devices as a rectangle of shape (n_0, n_1); groups along one dimension communicate alike (paper §4.1).

    Attributes:
        accelerators: names of the types on it, each once; the slowest sets the pace.
        latency_seconds: of one message, along each dimension (α).
        seconds_per_byte: likewise (β), while all groups along the dimension communicate at once.
    """

    accelerators: tuple[str, ...]
    shape: tuple[int, int]
    latency_seconds: tuple[float, float] = (0.0, 0.0)
    seconds_per_byte: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        if not self.accelerators or min(self.shape) < 1:
            raise ValueError(f"a mesh needs an accelerator and a shape of at least 1 × 1, got {self}")
        if min(*self.latency_seconds, *self.seconds_per_byte) < 0:
            raise ValueError(f"a mesh's latencies and seconds per byte must be at least 0, got {self}")

    @property
    def devices(self) -> int:
        """How many there are."""
        return math.prod(self.shape)

    @property
    def dimensions(self) -> tuple[int, ...]:
        """Those with more than one device, slowest links first."""
        return tuple(sorted((d for d in (0, 1) if self.shape[d] > 1), key=lambda d: -self.seconds_per_byte[d]))


@dataclass(frozen=True, slots=True)
class Seconds:
    """Seconds that grow with a message: fixed + per_byte × bytes."""

    fixed: float = 0.0
    per_byte: float = 0.0

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.fixed + other.fixed, self.per_byte + other.per_byte)

    def of(self, size_bytes: float) -> float:
        """For a message of so many bytes."""
        return self.fixed + self.per_byte * size_bytes if size_bytes > 0 else 0.0


def all_gather(mesh: LogicalMesh, dimension: int) -> Seconds:
    """Along a ring, by the bytes that every device ends with; a reduce-scatter costs the same by those it starts with."""
    devices = mesh.shape[dimension]
    share = (devices - 1) / devices
    return Seconds((devices - 1) * mesh.latency_seconds[dimension], share * mesh.seconds_per_byte[dimension])


def all_to_all(mesh: LogicalMesh, dimension: int) -> Seconds:
    """By the bytes that one device holds: it keeps one part of n and sends the others."""
    return all_gather(mesh, dimension)


def reduce_scatter(mesh: LogicalMesh, dimensions: tuple[int, ...]) -> Seconds:
    """Over one dimension or both, by the bytes that one device starts with; fast links first, so slow ones carry less."""
    total, share = Seconds(), 1.0
    for dimension in reversed(mesh.dimensions):
        if dimension in dimensions:
            part = all_gather(mesh, dimension)
            total += Seconds(part.fixed, part.per_byte * share)
            share /= mesh.shape[dimension]
    return total


def all_reduce(mesh: LogicalMesh, dimensions: tuple[int, ...]) -> Seconds:
    """A reduce-scatter and an all-gather that goes the same way back."""
    half = reduce_scatter(mesh, dimensions)
    return half + half
