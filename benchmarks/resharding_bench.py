"""Benchmark of cross-mesh resharding: bytes and seconds of each kind of delivery, and CPU seconds to plan the messages."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from trainwright.accelerators import cluster_of
from trainwright.cost.network import Network
from trainwright.resharding import Delivery, MeshAxes, ShardedTensor, message_plan, resharding_seconds

R, S0, S1, S01 = (), (0,), (1,), (0, 1)
HALF = 2
"""Bytes of a float16 value."""
REPEATS = 5
GROWTH = (2, 8, 32, 128)
"""Numbers of nodes with eight devices, half on either side."""
Side = tuple[tuple[int, int], tuple[MeshAxes, ...]]
"""Mesh shape, and the sharding spec on it."""


@dataclass(frozen=True)
class Case:
    """Boundary between two consecutive meshes that together fill a cluster of equal machines."""

    name: str
    machines: dict[str, int]
    shape: tuple[int, ...]
    source: Side
    target: Side

    def sides(self) -> tuple[ShardedTensor, ShardedTensor, Network]:
        """Return the source and target layouts of the tensor, and the links."""
        cluster = cluster_of(self.machines)
        (before, source), (after, target) = self.source, self.target
        first = before[0] * before[1]
        devices = cluster.devices
        end = first + after[0] * after[1]
        return (
            ShardedTensor.on_mesh(self.shape, devices[:first], before, source),
            ShardedTensor.on_mesh(self.shape, devices[first:end], after, target),
            Network(cluster),
        )


IMAGES, TOKENS = (32, 56, 56, 640), (8, 1024, 8192)
CASES = (
    Case("images, equal meshes", {"p3.16xlarge": 2}, IMAGES, ((1, 8), (S1, R, R, R)), ((1, 8), (R, R, R, S1))),
    Case("images, 8 to 16", {"p3.16xlarge": 3}, IMAGES, ((1, 8), (S1, R, R, R)), ((2, 8), (S0, R, R, R))),
    Case("images, 16 to 8", {"p3.16xlarge": 3}, IMAGES, ((2, 8), (S01, R, R, R)), ((1, 8), (R, R, R, R))),
    Case("images, 8 to 24", {"p3.16xlarge": 4}, IMAGES, ((1, 8), (S1, R, R, R)), ((3, 8), (R, R, R, R))),
    Case("tokens, Megatron's", {"p3.16xlarge": 2}, TOKENS, ((1, 8), (R, R, R)), ((1, 8), (R, R, R))),
    Case(
        "tokens, uneven types",
        {"p3.16xlarge": 1, "g4dn.12xlarge": 2},
        TOKENS,
        ((1, 8), (R, R, R)),
        ((2, 4), (S0, R, R)),
    ),
)


def main() -> None:
    """Print milliseconds of the messages, and of the CPU to find them."""
    table = Table(
        "boundary", "GB between nodes: direct", "gathered", "ms: direct", "gathered", "relayed", "chosen", "CPU ms",
        title="Cross-mesh resharding, float16",
    )  # fmt: skip
    for case in CASES:
        source, target, fabric = case.sides()
        plans = {delivery: message_plan(source, target, fabric, HALF, delivery) for delivery in Delivery}
        chosen = message_plan(source, target, fabric, HALF)
        table.add_row(
            case.name,
            *(f"{plans[one].crossing_bytes() / 1e9:.3f}" for one in (Delivery.DIRECT, Delivery.GATHERED)),
            *(f"{plan.seconds(fabric) * 1e3:.1f}" for plan in plans.values()),
            str(chosen.delivery),
            f"{_cpu_seconds(case) * 1e3:.1f}",
        )
    console = Console(width=140)
    console.print(table)
    console.print(_growth())


def _cpu_seconds(case: Case) -> float:
    source, target, fabric = case.sides()
    start = time.process_time()
    for _ in range(REPEATS):
        resharding_seconds(source, target, fabric, HALF)
    return (time.process_time() - start) / REPEATS


def _growth() -> str:
    """Report the growth with the devices, where every tile overlaps several others and is replicated."""
    seconds = []
    for nodes in GROWTH:
        half = nodes // 2
        shape = (8 * half, 1024, 64 * half)
        case = Case("growth", {"dgx-a100": nodes}, shape, ((half, 8), (S0, R, S1)), ((half, 8), (R, R, S0)))
        seconds.append(_cpu_seconds(case))
    devices = [8 * nodes for nodes in GROWTH]
    exponent = np.polyfit(np.log(devices), np.log(seconds), 1)[0]
    shown = ", ".join(f"{count:,}: {spent * 1e3:.1f}" for count, spent in zip(devices, seconds, strict=True))
    return f"CPU ms by devices of both meshes together: {shown}; they grow as devices ^ {exponent:.2f}"
