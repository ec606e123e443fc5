"""Plausibility of documents that people write: figures whose unit was probably mistaken."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from trainwright import documents
from trainwright.cluster import Cluster

SLOWEST_RATE: Final = 10_000.0
"""Bytes per second below which no network of today is: 80 kbit/s."""


def check_rates(cluster: Cluster, file: Path) -> None:
    """Raise DocumentError for a bandwidth that is too low to be one in bytes per second."""
    for place, rate in _rates(cluster):
        if rate < SLOWEST_RATE:
            raise documents.DocumentError(
                f"{file}: {place}: must be at least {SLOWEST_RATE:,.0f}, got {rate:g}, slower than any network; write bytes per "
                "second, for example 1.25e9 for 10 Gbit/s"
            )


def _rates(cluster: Cluster) -> Iterator[tuple[str, float]]:
    for link in cluster.links:
        yield f"links {link.source} -> {link.target}: bandwidth_bytes_per_second", link.bandwidth_bytes_per_second
    for node in cluster.nodes:
        for name, port in (("network", node.network), ("inside", node.inside)):
            if port is not None:
                yield f"nodes {node.name}: {name}.bandwidth_bytes_per_second", port.bandwidth_bytes_per_second
