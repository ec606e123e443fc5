"""Balance of senders: how much each holder of a slice sends, so that no NIC is busier than necessary."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainwright.cost.network import Edge, Network, Nic

Array = NDArray[np.float64]

_ROUNDING = 1e-9


class Job(NamedTuple):
    """Slices of one source tile for one node that holds none of it.

    Attributes:
        holders: number of devices that hold the tile, by node; any of them may send.
        target: receiving node.
        size: bytes of all slices together.
    """

    holders: Mapping[str, int]
    target: str
    size: int


def sender_shares(jobs: Sequence[Job], fabric: Network) -> list[dict[str, float]]:
    """Return by job and node the share of bytes that the node's holders send, in equal parts.

    It minimizes first the time of the busiest NIC (out of a node, into it, or of a listed pair), then the maximum that
    one device sends among jobs with the same possible senders. Slices can be cut anywhere, so both are linear programs,
    solved exactly by HiGHS; even shares over all holders need none if no NIC can be less busy.
    """
    even = [{node: count / sum(job.holders.values()) for node, count in job.holders.items()} for job in jobs]
    if all(len(job.holders) == 1 for job in jobs):
        return even
    per_use = fabric.nic_seconds(dict.fromkeys(_cards(jobs, fabric), 1.0))
    busiest = max(busy_seconds(jobs, even, fabric).values())
    if busiest <= _least_conceivable(jobs, per_use) * (1 + _ROUNDING):
        return even
    like = [_like(job, fabric) for job in jobs]
    together: dict[object, Job] = {}
    for job, key in zip(jobs, like, strict=True):
        so_far = together[key].size if key in together else 0
        together[key] = job._replace(size=so_far + job.size)
    arriving = max(size * per_use["in", node] for node, size in _arriving(jobs).items())
    shares = dict(zip(together, _programme(list(together.values()), fabric, per_use, arriving), strict=True))
    return [shares[key] for key in like]


def busy_seconds(jobs: Sequence[Job], shares: Sequence[Mapping[str, float]], fabric: Network) -> Mapping[Nic, float]:
    """Return the busy seconds of every NIC under these shares."""
    edges: defaultdict[Edge, float] = defaultdict(float)
    for job, share in zip(jobs, shares, strict=True):
        for node, part in share.items():
            edges[node, job.target] += part * job.size
    return fabric.nic_seconds(fabric.load(edges))


def _cards(jobs: Sequence[Job], fabric: Network) -> list[Nic]:
    """List the NICs that the jobs can use, each once."""
    used = (card for job in jobs for node in job.holders for card in fabric.nics((node, job.target)))
    return list(dict.fromkeys(used))


def _like(job: Job, fabric: Network) -> object:
    """Return a key: jobs with equal keys use the same NICs, except those into their targets, which no share relieves."""
    by_pair = any(card[0] == "pair" for node in job.holders for card in fabric.nics((node, job.target)))
    return tuple(job.holders.items()), job.target if by_pair else None


def _arriving(jobs: Sequence[Job]) -> Counter[str]:
    """Sum the bytes by receiving node."""
    found: Counter[str] = Counter()
    for job in jobs:
        found[job.target] += job.size
    return found


def _least_conceivable(jobs: Sequence[Job], per_use: Mapping[Nic, float]) -> float:
    """Return a lower bound: all bytes over all NICs that they can leave by, and each node's incoming bytes."""
    leaving = {("out", node) for job in jobs for node in job.holders}
    together = sum(job.size for job in jobs) / sum(1 / per_use[card] for card in leaving)
    return max(together, *(size * per_use["in", node] for node, size in _arriving(jobs).items()))


def _programme(
    jobs: Sequence[Job], fabric: Network, per_use: Mapping[Nic, float], arriving: float
) -> list[dict[str, float]]:
    """Solve both linear programs over the jobs' shares by node; some NIC is busy for `arriving` seconds in any case."""
    from scipy.sparse import coo_array, diags_array  # noqa: PLC0415 - slow to import, and seldom needed

    places = [(number, node) for number, job in enumerate(jobs) for node in job.holders]
    rows = {card: row for row, card in enumerate(per_use)}
    uses = [
        (rows[card], column, jobs[number].size * per_use[card])
        for column, (number, node) in enumerate(places)
        for card in fabric.nics((node, jobs[number].target))
        if card[0] != "in"
    ]
    row, column, seconds = (np.array(values) for values in zip(*uses, strict=True))
    busy = coo_array((seconds / seconds.max(), (row, column)), shape=(len(rows), len(places)))
    sent = np.array([jobs[number].size / jobs[number].holders[node] for number, node in places])
    owner = np.array([number for number, _ in places])
    whole = coo_array((np.ones(len(places)), (owner, np.arange(len(places)))), shape=(len(jobs), len(places)))
    _, least = _least_of_the_largest(busy, whole)
    limit = max(least, arriving / seconds.max()) * (1 + _ROUNDING) + _ROUNDING
    found, _ = _least_of_the_largest(diags_array(sent / sent.max()), whole, (busy, limit))
    shares: list[dict[str, float]] = [{} for _ in jobs]
    for (number, node), share in zip(places, found, strict=True):
        shares[number][node] = max(float(share), 0.0)
    return shares


def _least_of_the_largest(loads: Any, whole: Any, limit: tuple[Any, float] | None = None) -> tuple[Array, float]:
    """Minimize max(loads · x) over x >= 0 with whole · x = 1 (and limit[0] · x <= limit[1])."""
    from scipy.optimize import LinearConstraint, milp  # noqa: PLC0415 - slow to import, and seldom needed
    from scipy.sparse import block_array  # noqa: PLC0415 - slow to import, and seldom needed

    def beside(table: Any, maximum: float) -> Any:
        """Append the column of the maximum to a table over x."""
        blocks: Any = [[table, np.full((table.shape[0], 1), maximum)]]
        return block_array(blocks, format="csr")

    constraints = [LinearConstraint(beside(loads, -1.0), -np.inf, 0.0), LinearConstraint(beside(whole, 0.0), 1.0, 1.0)]
    if limit is not None:
        constraints.append(LinearConstraint(beside(limit[0], 0.0), -np.inf, limit[1]))
    found = milp(np.append(np.zeros(loads.shape[1]), 1.0), constraints=constraints)
    if found.x is None:
        raise RuntimeError(f"HiGHS did not solve a program that always has a solution: {found.message}")
    return found.x[:-1], float(found.x[-1])
