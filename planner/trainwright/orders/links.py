"""Links between nodes and within them: what is to be measured of them, and what was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainwright.cluster import Device, Link
from trainwright.orders.gang import Gang


@dataclass(frozen=True, slots=True)
class LinksOrder:
    """Measure the links between the gang's nodes, and within each node that has two slots.

    Rounds of disjoint pairs; each pair ping-pongs messages of these sizes in both directions.

    Attributes:
        pairs: the nodes between which links are measured, each pair once in either order; None: every two nodes.
        collective_bytes: whole messages of collectives that are measured as well, ascending; empty for none.
        collective_seconds: about as long as all collectives may take; sizes that would take longer are left out.
        overlap: measure by how much computation slows down while a device communicates.
    """

    gang: Gang
    pairs: tuple[tuple[str, str], ...] | None = None
    message_bytes: tuple[int, ...] = (1_024, 131_072, 524_288)
    repeats: int = 5
    collective_bytes: tuple[int, ...] = ()
    collective_seconds: float = 20.0
    overlap: bool = False
    kind: Literal["links"] = "links"


CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter"]


@dataclass(frozen=True, slots=True)
class CollectiveTime:
    """A collective as it was measured, alone on its links but for those inside other nodes.

    Attributes:
        members: in the order of their ranks.
        message_bytes: the whole message: what every member reduces, has gathered in the end, or reduces to share out.
        seconds: the slowest member's, median.
    """

    collective: CollectiveKind
    members: tuple[Device, ...]
    message_bytes: int
    seconds: float
    samples: int


@dataclass(frozen=True, slots=True)
class Overlap:
    """Seconds of computation while its device communicates, over those that it takes alone."""

    node: str
    compute_slowdown_ratio: float


@dataclass(frozen=True, slots=True)
class LinksReport:
    """Directed links fitted from the messages' times, between nodes and within nodes.

    Attributes:
        collectives, overlaps: where they were asked for.
    """

    links: tuple[Link, ...]
    collectives: tuple[CollectiveTime, ...] = ()
    overlaps: tuple[Overlap, ...] = ()
    kind: Literal["links"] = "links"
