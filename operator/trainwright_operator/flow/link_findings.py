"""What measured links come to: the cluster, how the runtime behaves on it, and what people are told of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from trainwright.cluster import Cluster, Link
from trainwright.collective_check import CollectiveCheck, check_collectives
from trainwright.link_sampling import (
    Pair,
    Sampling,
    first_within,
    further_pairs,
    links_bytes,
    unlike,
    unlike_machines,
)
from trainwright.measured_runtime import measured_runtime, overlap_slowdown
from trainwright.orders import LinksReport
from trainwright.runtime import Runtime
from trainwright.sampled_cluster import sampled_cluster
from trainwright_operator.api.status import LinksStatus
from trainwright_operator.flow.discovery import Discovery
from trainwright_operator.flow.links_room import ROOM_BYTES, insides

_MOST_NAMED = 3
_MOST_SHOWN = 64


@dataclass(frozen=True, slots=True)
class Doubts:
    """What samples leave open.

    Attributes:
        kinds: of links, or of machines inside, that are not alike.
        pairs: of nodes that are to be measured too.
        insides: nodes within which is to be measured too.
    """

    kinds: tuple[str, ...] = ()
    pairs: tuple[Pair, ...] = ()
    insides: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LinkFindings:
    """The cluster with its links.

    Attributes:
        runtime: how plans run here, as far as it was measured.
        measured, inferred: directed links.
        unlike_kinds: by name, kinds of links that are not alike.
        is_cautious: see `SampledCluster`.
        check: with the runtime's ratios of collectives.
        overlap_slowdown: median of the nodes; None where it was not measured.
    """

    cluster: Cluster
    runtime: Runtime
    measured: int = 0
    inferred: int = 0
    unlike_kinds: tuple[str, ...] = ()
    is_cautious: bool = False
    check: CollectiveCheck | None = None
    overlap_slowdown: float | None = None

    def status(self) -> LinksStatus:
        """What the plan's status shows of it."""
        return LinksStatus(
            measured=self.measured,
            inferred=self.inferred,
            unlike_kinds=tuple(name[:1024] for name in self.unlike_kinds[:_MOST_SHOWN]),
            collective_error=self.check.mean_error if self.check else None,
            worst_collective_error=self.check.worst.error if self.check else None,
            overlap_slowdown=self.overlap_slowdown,
        )

    def told(self) -> str:
        """What there is to say beyond the number of measured links, to be put behind it."""
        parts = []
        if self.inferred:
            parts.append(f"{self.inferred} taken to be like others of their kind")
        if self.unlike_kinds:
            more = len(self.unlike_kinds) - _MOST_NAMED
            named = ", ".join(self.unlike_kinds[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
            parts.append(f"not alike, so further ones were measured: {named}")
        if self.is_cautious:
            parts.append("too many differ to list them, so every node is taken to be as slow as its slowest link")
        if self.check is not None:
            parts.append(_told_check(self.check))
        if self.overlap_slowdown is not None:
            parts.append(f"computation takes {self.overlap_slowdown:.3g} times as long beside communication")
        return "".join(f"; {part}" for part in parts)


def _told_check(check: CollectiveCheck) -> str:
    worst = check.worst.measured
    return (
        f"predictions of {check.count} collectives are off by {check.mean_error:.0%} of their time, furthest "
        f"({check.worst.error:+.0%}) for {worst.collective} of {worst.message_bytes} bytes by {len(worst.members)} devices"
    )


@lru_cache(maxsize=16)
def findings_of_all(discovery: Discovery, report: LinksReport) -> LinkFindings:
    """Where every link was measured. Raises ValueError where one is missing."""
    found = _findings(Cluster(discovery.accelerators, discovery.nodes, report.links), report)
    return replace(found, measured=len(report.links))


@lru_cache(maxsize=16)
def doubts(sampling: Sampling, report: LinksReport) -> Doubts:
    """What is to be measured after the samples, as far as one report can tell it. Raises ValueError as `unlike` does."""
    measured = _by_edge(report.links)
    kinds = unlike(sampling.kinds, measured)
    machines = unlike_machines(sampling.machines, measured)
    unknown = [name for machine in machines for name in sampling.machines[machine] if (name, name) not in measured]
    within = first_within(insides(unknown), ROOM_BYTES / 2)
    return Doubts(
        kinds=(*(kind.name for kind in kinds), *(f"inside {machine}" for machine in machines)),
        pairs=further_pairs(kinds, most_bytes=ROOM_BYTES - links_bytes(within)),
        insides=tuple(name for name, _ in within),
    )


@lru_cache(maxsize=16)
def findings_of_samples(discovery: Discovery, report: LinksReport, further: LinksReport | None) -> LinkFindings:
    """Where samples of all kinds were measured, and more of those that are not alike. Raises ValueError as those do."""
    sampling = discovery.sampling
    measured = _by_edge((*(further.links if further else ()), *report.links))
    found = sampled_cluster(discovery.accelerators, sampling, measured)
    count = len(discovery.nodes)
    everything = count * (count - 1) + sum(node.devices > 1 for node in discovery.nodes)
    return replace(
        _findings(found.cluster, report),
        measured=len(measured),
        inferred=everything - len(measured),
        unlike_kinds=doubts(sampling, report).kinds,
        is_cautious=found.is_cautious,
    )


def _findings(cluster: Cluster, report: LinksReport) -> LinkFindings:
    """What the collectives and the slow-down of computation say on a cluster with its links."""
    runtime = measured_runtime(cluster, report.collectives, report.overlaps)
    return LinkFindings(
        cluster,
        runtime,
        check=check_collectives(report.collectives, cluster, runtime.collective_ratios),
        overlap_slowdown=overlap_slowdown(report.overlaps),
    )


def _by_edge(links: Sequence[Link]) -> dict[Pair, Link]:
    return {(link.source, link.target): link for link in links}
