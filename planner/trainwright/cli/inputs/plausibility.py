"""Plausibility of what people write: figures whose unit was probably mistaken."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import typer

from trainwright import documents
from trainwright.accelerators import data_sheet, has_data_sheet
from trainwright.cluster import Cluster, Link, Port
from trainwright.layer import LayerKind
from trainwright.model import Model
from trainwright.profiles import Profiles
from trainwright.quantity import format_bytes
from trainwright.throughput import PASSES

SLOWEST_RATE: Final = 10_000.0
"""Bytes per second below which no network of today is: 80 kbit/s."""
FASTEST_RATE: Final = 1e14
"""Most bytes per second of a link: more than ten times the memory of any accelerator."""
LONGEST_LATENCY_SECONDS: Final = 1.0
"""Longest latency of a link that trains."""
MIN_MEMORY_BYTES: Final = 64 * 2**20
"""Least memory of a real accelerator."""
MAX_OVER_PEAK: Final = 10.0
"""Ratio to the peak that another number format cannot explain: tensor cores compute at most 8 times as fast as other units."""

MAX_PERCENT: Final = 100


def check_figures(cluster: Cluster, file: Path) -> None:
    """Raise DocumentError for a memory, a latency or a bandwidth that cannot be one in bytes and seconds."""
    for accelerator in cluster.accelerators:
        size = accelerator.memory_bytes
        if accelerator.emulation is None and size < MIN_MEMORY_BYTES:
            raise documents.DocumentError(
                f"{file}: accelerators {accelerator.name}: memory_bytes: must be at least {MIN_MEMORY_BYTES:,} "
                f"({format_bytes(MIN_MEMORY_BYTES)}), got {size}, less than any accelerator has; {_bytes_meant(size)}"
            )
    for place, port in _ports(cluster):
        rate, latency = port.bandwidth_bytes_per_second, port.latency_seconds
        if rate < SLOWEST_RATE:
            raise documents.DocumentError(
                f"{file}: {place}bandwidth_bytes_per_second: must be at least {SLOWEST_RATE:,.0f}, got {rate:g}, slower than "
                "any network; write bytes per second, for example 1.25e9 for 10 Gbit/s"
            )
        if rate > FASTEST_RATE:
            raise documents.DocumentError(
                f"{file}: {place}bandwidth_bytes_per_second: must be at most {FASTEST_RATE:g}, got {rate:g}, faster than any "
                "link; write bytes per second, for example 1.25e9 for 10 Gbit/s"
            )
        if latency > LONGEST_LATENCY_SECONDS:
            raise documents.DocumentError(
                f"{file}: {place}latency_seconds: must be at most {LONGEST_LATENCY_SECONDS:g}, got {latency:g}, longer than "
                f"any network's; write seconds: {latency:g} µs are {latency * 1e-6:g}, {latency:g} ms are {latency * 1e-3:g}"
            )


def check_rates(profiles: Profiles, model: Model, file: Path) -> None:
    """Raise DocumentError if an accelerator would compute the profiled layers many times as fast as its peak allows."""
    name, ratio = _fastest(profiles, model)
    if ratio > MAX_OVER_PEAK:
        raise documents.DocumentError(
            f"{file}: {_impossible(name, ratio, model)}; give the profiles of this model, with their times in seconds"
        )


def rate_warning(profiles: Profiles, model: Model) -> str | None:
    """Return which accelerator would compute the profiled layers faster than its peak allows; None if none does."""
    name, ratio = _fastest(profiles, model)
    if ratio <= 1:
        return None
    return f"{_impossible(name, ratio, model)}; check that they are seconds, and of this model and number format"


def _impossible(name: str, ratio: float, model: Model) -> str:
    return (
        f"by the profiles' forward_seconds and backward_seconds, {name} computes at {ratio:,.0%} of its peak in "
        f"{model.dtype}, which cannot be"
    )


def _fastest(profiles: Profiles, model: Model) -> tuple[str, float]:
    """Return the accelerator whose profiled layers come closest to its peak or exceed it by most, and the ratio to the peak.

    Emulated accelerators, and others without a data sheet, have no peak. Causal attention is left out: kernels skip about half
    of what counts as its FLOPs.
    """
    flops_per_row = {kind.name: PASSES * _flops_per_row(kind) for kind in model.kinds}
    fastest = ("", 0.0)
    for name in dict.fromkeys(layer.accelerator for layer in profiles.layers):
        if not has_data_sheet(name):
            continue
        layers = [layer for layer in profiles.layers if layer.accelerator == name and flops_per_row.get(layer.kind)]
        flops = sum(flops_per_row[layer.kind] * layer.rows / layer.tensor_degree for layer in layers)
        seconds = sum(layer.forward_seconds + layer.backward_seconds for layer in layers)
        peak = data_sheet(name).flops_per_second(model.dtype, tensor_float32=True)
        if seconds and flops / seconds / peak > fastest[1]:
            fastest = name, flops / seconds / peak
    return fastest


def _flops_per_row(kind: LayerKind) -> float:
    return sum(operator.forward_flops_per_row for operator in kind.operators if not operator.is_causal)


def _bytes_meant(size: int) -> str:
    unit, factor = ("GiB", 2**30) if size < 2**10 else ("MiB", 2**20) if size < 2**20 else ("KiB", 2**10)
    return f"write bytes: {size} {unit} are {size * factor}"


def _ports(cluster: Cluster) -> Iterator[tuple[str, Port | Link]]:
    for link in cluster.links:
        yield f"links {link.source} -> {link.target}: ", link
    for node in cluster.nodes:
        for name, port in (("network", node.network), ("inside", node.inside)):
            if port is not None:
                yield f"nodes {node.name}: {name}.", port


def share_of(given: str | float) -> float:
    """Read a share, as an option's parser, which gets the default too.

    Raises typer.BadParameter with the number to write for a percentage.
    """
    text = str(given).strip()
    number = text.removesuffix("%")
    try:
        value = float(number)
    except ValueError:
        raise typer.BadParameter(f"expected a share such as 0.03 for 3%, got {text!r}") from None
    if number != text or 1 <= value <= MAX_PERCENT:
        raise typer.BadParameter(f"expected a share below 1, got {text!r}; write {value / 100:g} for {value:g}%")
    return value
