"""A cluster's nodes listed by what they are and how they are linked, whatever they are called."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from trainwright.cluster import Cluster
from trainwright.cost.links import Links, links_of, node_classes


def relisted(cluster: Cluster) -> Cluster:
    """The same cluster, its nodes in an order that depends neither on their names nor on how they were listed.

    Nodes are told apart by their devices, then again and again by the links to nodes that are told apart already (colour
    refinement). Those that remain alike keep their order: which of them comes first makes no difference, but for
    clusters of a symmetry that hardly occurs.
    """
    colours = _ranks([(node.accelerator, node.devices) for node in cluster.nodes])
    classes = len(set(node_classes(cluster)))
    links, known = links_of(cluster), 0
    while known < len(set(colours)) < classes:
        known = len(set(colours))
        colours = _ranks([_seen_from(number, colours, links) for number in range(len(colours))])
    order = sorted(range(len(colours)), key=lambda number: (colours[number], number))
    return replace(cluster, nodes=tuple(cluster.nodes[number] for number in order))


def _seen_from(number: int, colours: Sequence[int], links: Links) -> tuple[Hashable, ...]:
    columns = (links.bandwidth[number], links.bandwidth[:, number], links.latency[number], links.latency[:, number])
    others = sorted(zip(colours, *(column.tolist() for column in columns), strict=True))
    return colours[number], links.bandwidth[number, number], tuple(others)


def _ranks(keys: Sequence[tuple[Hashable, ...]]) -> list[int]:
    place = {key: rank for rank, key in enumerate(sorted(set(keys)))}
    return [place[key] for key in keys]
