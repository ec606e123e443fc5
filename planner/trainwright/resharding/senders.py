"""How much each holder of a slice sends of it, so that no network card has more to do than it must."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainwright.cost.fabric import Card, Edge, Fabric

Array = NDArray[np.float64]

_ROUNDING = 1e-9


class Job(NamedTuple):
    """Slices of one source tile that go to one node, where nobody holds it.

    Attributes:
        holders: by node: how many of its devices hold the tile, and any of them may send.
        target: the node that they go to.
        size: bytes of all slices together.
    """

    holders: Mapping[str, int]
    target: str
    size: int


def sender_shares(jobs: Sequence[Job], fabric: Fabric) -> list[dict[str, float]]:
    """By job and node: the share of its bytes that the node's holders send, each of them as much as the other.

    Least is, first, the time of the busiest card, out of a node, into it or of a given pair; then, the most that one
    device sends, of the jobs that the same nodes can do. Slices can be cut anywhere, so both are linear programmes, solved
    exactly by HiGHS; even shares over all holders are taken without one where no card can be less busy.
    """
    even = [{node: count / sum(job.holders.values()) for node, count in job.holders.items()} for job in jobs]
    if all(len(job.holders) == 1 for job in jobs):
        return even
    per_use = fabric.card_seconds(dict.fromkeys(_cards(jobs, fabric), 1.0))
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


def busy_seconds(jobs: Sequence[Job], shares: Sequence[Mapping[str, float]], fabric: Fabric) -> Mapping[Card, float]:
    """Seconds of work on every card where the jobs are shared out like that."""
    edges: defaultdict[Edge, float] = defaultdict(float)
    for job, share in zip(jobs, shares, strict=True):
        for node, part in share.items():
            edges[node, job.target] += part * job.size
    return fabric.card_seconds(fabric.load(edges))


def _cards(jobs: Sequence[Job], fabric: Fabric) -> list[Card]:
    """All that the jobs can use, each once."""
    used = (card for job in jobs for node in job.holders for card in fabric.cards((node, job.target)))
    return list(dict.fromkeys(used))


def _like(job: Job, fabric: Fabric) -> object:
    """Jobs with the same key use the same cards, but for those into their targets, which no sharing out relieves."""
    by_pair = any(card[0] == "pair" for node in job.holders for card in fabric.cards((node, job.target)))
    return tuple(job.holders.items()), job.target if by_pair else None


def _arriving(jobs: Sequence[Job]) -> Counter[str]:
    """By node: bytes that go there."""
    found: Counter[str] = Counter()
    for job in jobs:
        found[job.target] += job.size
    return found


def _least_conceivable(jobs: Sequence[Job], per_use: Mapping[Card, float]) -> float:
    """What no sharing out can beat: all bytes over all cards that they can leave by, and what arrives at every node."""
    leaving = {("out", node) for job in jobs for node in job.holders}
    together = sum(job.size for job in jobs) / sum(1 / per_use[card] for card in leaving)
    return max(together, *(size * per_use["in", node] for node, size in _arriving(jobs).items()))


def _programme(
    jobs: Sequence[Job], fabric: Fabric, per_use: Mapping[Card, float], arriving: float
) -> list[dict[str, float]]:
    """Both programmes; their variables are the jobs' shares by node. Cards are busy for `arriving` seconds anyway."""
    from scipy.sparse import coo_array, diags_array  # noqa: PLC0415 - slow to import, and seldom needed

    places = [(number, node) for number, job in enumerate(jobs) for node in job.holders]
    rows = {card: row for row, card in enumerate(per_use)}
    uses = [
        (rows[card], column, jobs[number].size * per_use[card])
        for column, (number, node) in enumerate(places)
        for card in fabric.cards((node, jobs[number].target))
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
    """The x >= 0 with whole · x = 1 (and limit[0] · x <= limit[1]) whose max(loads · x) is least, and that maximum."""
    from scipy.optimize import LinearConstraint, milp  # noqa: PLC0415 - slow to import, and seldom needed
    from scipy.sparse import block_array  # noqa: PLC0415 - slow to import, and seldom needed

    def beside(table: Any, maximum: float) -> Any:
        """Rows over x and the maximum."""
        blocks: Any = [[table, np.full((table.shape[0], 1), maximum)]]
        return block_array(blocks, format="csr")

    constraints = [LinearConstraint(beside(loads, -1.0), -np.inf, 0.0), LinearConstraint(beside(whole, 0.0), 1.0, 1.0)]
    if limit is not None:
        constraints.append(LinearConstraint(beside(limit[0], 0.0), -np.inf, limit[1]))
    found = milp(np.append(np.zeros(loads.shape[1]), 1.0), constraints=constraints)
    if found.x is None:
        raise RuntimeError(f"HiGHS did not solve a programme that always has a solution: {found.message}")
    return found.x[:-1], float(found.x[-1])
