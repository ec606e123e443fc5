"""Cluster and runtime from measured links, and the size of a link report before it is requested."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations, product
from typing import Final

from trainwright.cluster import Cluster, Link, Node
from trainwright.measurement.collective_check import (
    CollectiveCheck,
    check_collectives,
    measured_runtime,
    overlap_slowdown,
)
from trainwright.measurement.link_kinds import Pair
from trainwright.measurement.link_sampling import (
    LinkSampling,
    further_pairs,
    heterogeneous_kinds,
    heterogeneous_machines,
    links_bytes,
    take_within,
)
from trainwright.measurement.sampled_cluster import sampled_cluster
from trainwright.runtime import Runtime
from trainwright.worker_api import MAX_REPORT_BYTES, LinkReport
from trainwright_operator.api.status import LinksStatus
from trainwright_operator.flow.documents.discovered_devices import DiscoveredDevices

LINK_REPORT_BUDGET_BYTES: Final = MAX_REPORT_BYTES * 9 // 10
"""Budget below the report limit, because metric values may be longer than estimated."""
_COLLECTIVE_BYTES: Final = 140
_MEMBER_BYTES: Final = 26
_OVERLAP_BYTES: Final = 60
"""Estimated bytes in a report, each without the names of its nodes."""

NodeSlots = Sequence[tuple[str, tuple[int, ...]]]
"""Nodes of a gang, each with its used slots."""


def all_pairs(nodes: Iterable[str]) -> tuple[Pair, ...]:
    """Return all links between these nodes and inside them."""
    names = tuple(nodes)
    return (*combinations(names, 2), *intra_node_links(names))


def intra_node_links(nodes: Iterable[str]) -> tuple[Pair, ...]:
    """Return the links inside these nodes."""
    return tuple((name, name) for name in nodes)


def fit_collective_sizes(
    sizes: tuple[int, ...], places: NodeSlots, pairs: Iterable[Pair], kinds: int
) -> tuple[int, ...]:
    """Return as many sizes as the report has bytes for besides the links of these pairs, evenly spread, each of `kinds` collectives.

    The smallest size is dropped last: the worker continues from it to larger ones while time remains.
    """
    room = LINK_REPORT_BUDGET_BYTES - links_bytes(pairs) - sum(_OVERLAP_BYTES + len(name) for name, _ in places)
    for step in range(1, len(sizes) + 1):
        if collective_report_bytes(places, kinds * len(sizes[::step])) <= room:
            return sizes[::step]
    return ()


def collective_report_bytes(places: NodeSlots, messages: int) -> int:
    """Return report bytes of each collective and size: inside each node, over one device of each node, over all devices."""
    members = sum((2 * len(slots) + 1) * (_MEMBER_BYTES + len(name)) for name, slots in places)
    groups = len(places) + 2
    return messages * (members + groups * _COLLECTIVE_BYTES)


SMALL_ERROR: Final = 0.25
"""Mean error up to which nothing follows: plans that differ by less in their communication are near each other anyway."""
_LARGE_RATIO: Final = 1.25
"""Ratio of measured to predicted seconds, or its inverse, from which errors have a direction."""
_MAX_NAMED = 3
_MAX_SHOWN = 64


@dataclass(frozen=True, slots=True)
class InconsistentLinks:
    """Link kinds whose samples are inconsistent, and the follow-up measurements.

    Attributes:
        kinds: names of inconsistent link kinds or machine types.
        pairs: node pairs to measure.
        intra_nodes: nodes whose internal links are to be measured.
    """

    kinds: tuple[str, ...] = ()
    pairs: tuple[Pair, ...] = ()
    intra_nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LinkFindings:
    """Cluster with its links.

    Attributes:
        runtime: measured runtime of plans on the cluster.
        measured, inferred: numbers of directed links.
        unlike_kinds: names of inconsistent link kinds.
        is_cautious: see `SampledCluster`.
        check: predictions against measured collectives, with the runtime's ratios.
        overlap_slowdown: median over the nodes; None where not measured.
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
        """Return the links' entry in the plan's status."""
        return LinksStatus(
            measured=self.measured,
            inferred=self.inferred,
            unlike_kinds=tuple(name[:1024] for name in self.unlike_kinds[:_MAX_SHOWN]),
            collective_error=self.check.mean_error if self.check else None,
            worst_collective_error=self.check.worst.error if self.check else None,
            overlap_slowdown=self.overlap_slowdown,
        )

    def summary(self, *, has_trials: bool) -> str:
        """Return clauses to append to the number of measured links."""
        parts = []
        if self.inferred:
            parts.append(f"{self.inferred} inferred from links of the same kind")
        if self.unlike_kinds:
            more = len(self.unlike_kinds) - _MAX_NAMED
            named = ", ".join(self.unlike_kinds[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
            parts.append(f"links differ within a kind, so more were measured: {named}")
        if self.is_cautious:
            parts.append(
                "too many links differ to store each, so every node is assumed to be as slow as its slowest link"
            )
        if self.check is not None:
            parts.append(explain_check(self.check, is_emulated=self.cluster.is_emulated, has_trials=has_trials))
        if self.overlap_slowdown is not None:
            parts.append(f"computation takes {self.overlap_slowdown:.3g} times as long during communication")
        return "".join(f"; {part}" for part in parts)


def explain_check(check: CollectiveCheck, *, is_emulated: bool, has_trials: bool) -> str:
    """Return a clause on the errors, of the figures alone where they are small."""
    worst = check.worst.measured
    figures = (
        f"{check.count} measured, mean error {check.mean_error:.0%}, largest {check.worst.error:+.0%} for {worst.collective} of "
        f"{worst.message_bytes} bytes on {len(worst.members)} devices"
    )
    if check.mean_error <= SMALL_ERROR:
        return f"collectives are predicted well ({figures})"
    if check.measured_ratio >= _LARGE_RATIO:
        sentence = f"collectives took {check.measured_ratio:.2g} times as long as predicted ({figures})"
        rank, causes = "too high", _causes_of_slow(is_emulated=is_emulated)
    elif check.measured_ratio <= 1 / _LARGE_RATIO:
        sentence = f"collectives took only {check.measured_ratio:.2g} of the predicted time ({figures})"
        rank, causes = "too low", _causes_of_fast(is_emulated=is_emulated)
    else:
        sentence = f"collectives took partly more and partly less than predicted ({figures})"
        rank, causes = "wrongly", "other traffic while they were measured"
    decides = (
        "trials decide, and a higher trials.topK tries more"
        if has_trials
        else "without trials (trials.topK is 0) nothing corrects that"
    )
    return f"{sentence}, so plans that communicate much may rank {rank}: {decides}; look for {causes}"


def _causes_of_slow(*, is_emulated: bool) -> str:
    traffic = "other traffic on the network while they were measured"
    if is_emulated:
        return f"{traffic}, or a busy machine"
    return (
        f"{traffic}, and for NCCL on TCP instead of RDMA or NVLink (with NCCL_DEBUG=INFO in the environment of worker.podTemplate the "
        "log says NET/Socket)"
    )


def _causes_of_fast(*, is_emulated: bool) -> str:
    traffic = "other traffic that slowed the links while they were measured one by one"
    if is_emulated:
        return traffic
    return f"{traffic}, or a network that sums by itself (NVLink SHARP, InfiniBand SHARP), of which predictions know nothing"


@lru_cache(maxsize=16)
def report_of_nodes(report: LinkReport, nodes: tuple[Node, ...]) -> LinkReport | None:
    """Return the part of a report that is about these nodes, or None where it lacks one of their links."""
    if len(nodes) * (len(nodes) - 1) > len(report.links):
        return None
    names = {node.name for node in nodes}
    links = tuple(link for link in report.links if link.source in names and link.target in names)
    pairs = {pair for pair in product(names, repeat=2) if pair[0] != pair[1]}
    pairs |= {(node.name, node.name) for node in nodes if node.devices > 1}
    if not pairs <= _by_edge(links).keys():
        return None
    return LinkReport(
        links,
        tuple(
            collective
            for collective in report.collectives
            if names.issuperset(device.node for device in collective.members)
        ),
        tuple(overlap for overlap in report.overlaps if overlap.node in names),
    )


@lru_cache(maxsize=16)
def findings_from_all_links(discovery: DiscoveredDevices, report: LinkReport) -> LinkFindings:
    """Return findings where every link was measured. Raise ValueError where one is missing."""
    findings = _findings(discovery.cluster(report.links), report)
    return replace(findings, measured=len(report.links))


@lru_cache(maxsize=16)
def find_inconsistent_links(sampling: LinkSampling, report: LinkReport) -> InconsistentLinks:
    """Return the follow-up measurements that fit into one report. Raise ValueError as `heterogeneous_kinds` does."""
    measured = _by_edge(report.links)
    kinds = heterogeneous_kinds(sampling.kinds, measured)
    machines = heterogeneous_machines(sampling.machines, measured)
    unknown = [name for machine in machines for name in sampling.machines[machine] if (name, name) not in measured]
    within = take_within(intra_node_links(unknown), LINK_REPORT_BUDGET_BYTES / 2)
    return InconsistentLinks(
        kinds=(*(kind.name for kind in kinds), *(f"inside {machine}" for machine in machines)),
        pairs=further_pairs(kinds, max_bytes=LINK_REPORT_BUDGET_BYTES - links_bytes(within)),
        intra_nodes=tuple(name for name, _ in within),
    )


@lru_cache(maxsize=16)
def findings_from_samples(
    discovery: DiscoveredDevices, report: LinkReport, follow_up: LinkReport | None
) -> LinkFindings:
    """Return findings from samples of all kinds and the follow-up report.

    Raise ValueError as `sampled_cluster` does.
    """
    sampling = discovery.sampling
    measured = _by_edge((*(follow_up.links if follow_up else ()), *report.links))
    sampled = sampled_cluster(discovery.accelerators, sampling, measured)
    count = len(discovery.nodes)
    everything = count * (count - 1) + sum(node.devices > 1 for node in discovery.nodes)
    return replace(
        _findings(replace(sampled.cluster, priced_by=discovery.priced_by), report),
        measured=len(measured),
        inferred=everything - len(measured),
        unlike_kinds=find_inconsistent_links(sampling, report).kinds,
        is_cautious=sampled.uses_slowest_links,
    )


def _findings(cluster: Cluster, report: LinkReport) -> LinkFindings:
    """Return the findings from the report's collectives and overlaps."""
    runtime = measured_runtime(cluster, report.collectives, report.overlaps)
    return LinkFindings(
        cluster,
        runtime,
        check=check_collectives(report.collectives, cluster, runtime.collective_ratios),
        overlap_slowdown=overlap_slowdown(report.overlaps),
    )


def _by_edge(links: Sequence[Link]) -> dict[Pair, Link]:
    return {(link.source, link.target): link for link in links}
