"""Hardware that would shorten a plan's iteration most: the same plan with one part of the machines twice as fast."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from trainwright.cluster import Cluster, Link, Port
from trainwright.cost.context import CostContext
from trainwright.cost.estimate import iteration_seconds
from trainwright.report.plan_summary import short_names
from trainwright.search import Candidate, Problem

Speed = TypeVar("Speed", Link, Port)

FACTOR: Final = 2.0
"""Speed of the changed part over its present one."""


@dataclass(frozen=True, slots=True)
class Lever:
    """Iteration of the same plan if one part of the machines were FACTOR times as fast."""

    change: str
    seconds: float


def levers(candidate: Candidate, problem: Problem) -> list[Lever]:
    """Return what each change would bring, the most effective first; a plan searched for the changed machines gains as much or more."""
    changed = [
        Lever(change, iteration_seconds(candidate.plan, context)) for change, context in _changed(candidate, problem)
    ]
    return sorted(changed, key=lambda lever: lever.seconds)


def _changed(candidate: Candidate, problem: Problem) -> Iterator[tuple[str, CostContext]]:
    cluster, names = problem.cluster, short_names(problem.cluster)
    used = {device.node for device in candidate.plan.devices}
    if len(used) > 1:
        yield f"links between nodes {FACTOR:g} times as fast", _context(problem, _faster_links(cluster, inside=False))
    if any(cluster.node(name).devices > 1 for name in used):
        yield f"links inside nodes {FACTOR:g} times as fast", _context(problem, _faster_links(cluster, inside=True))
    for accelerator in cluster.accelerators_of(candidate.plan.nodes):
        layers = tuple(
            replace(
                layer, forward_seconds=layer.forward_seconds / FACTOR, backward_seconds=layer.backward_seconds / FACTOR
            )
            if layer.accelerator == accelerator
            else layer
            for layer in problem.profiles.layers
        )
        faster = replace(problem, profiles=replace(problem.profiles, layers=layers))
        yield f"layers on {names[accelerator]} {FACTOR:g} times as fast", faster.cost_context


def _context(problem: Problem, cluster: Cluster) -> CostContext:
    return replace(problem, cluster=cluster).cost_context


def _faster_links(cluster: Cluster, *, inside: bool) -> Cluster:
    links = tuple(_faster(link) if (link.source == link.target) is inside else link for link in cluster.links)
    if inside:
        nodes = tuple(replace(node, inside=node.inside and _faster(node.inside)) for node in cluster.nodes)
    else:
        nodes = tuple(replace(node, network=node.network and _faster(node.network)) for node in cluster.nodes)
    return replace(cluster, nodes=nodes, links=links)


def _faster(link: Speed) -> Speed:
    flow = link.flow_bytes_per_second
    return replace(
        link,
        latency_seconds=link.latency_seconds / FACTOR,
        bandwidth_bytes_per_second=link.bandwidth_bytes_per_second * FACTOR,
        flow_bytes_per_second=None if flow is None else flow * FACTOR,
    )
