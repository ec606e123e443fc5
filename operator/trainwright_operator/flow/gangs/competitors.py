"""Competitors of a gang for its devices: who holds them or gets them before it, and sentences on that.

Plans and pods are named only where they are in the namespace of the plan that waits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Final

from trainwright_operator.api.installation import join_names
from trainwright_operator.flow.gangs.child_metadata import plan_label
from trainwright_operator.flow.gangs.placement_queue import gangs_ahead
from trainwright_operator.flow.nodes.published_devices import DeviceRequest
from trainwright_operator.flow.snapshot import DeviceHolder, HolderKind, PlanFacts, Snapshot

_MAX_HOLDERS: Final = 8
"""Holders that are kept of a node: 5,000 nodes are read at a time."""


def holders_by_node(requests: Iterable[DeviceRequest]) -> dict[str, tuple[DeviceHolder, ...]]:
    """Return who holds devices of each node, a plan once; of a node with many pods the first ones."""
    holders_of: defaultdict[str, dict[DeviceHolder, None]] = defaultdict(dict)
    for request in requests:
        holders = holders_of[request.node]
        holders[request.holder if request.holder in holders or len(holders) < _MAX_HOLDERS else DeviceHolder()] = None
    return {node: tuple(holders) for node, holders in holders_of.items()}


def describe_gangs_ahead(snapshot: Snapshot, gang: str) -> str:
    """Return how many gangs come before the plan's gang in the queue, and whose they are, or an empty string."""
    ahead = gangs_ahead(snapshot, gang)
    if not ahead:
        return ""
    owners = _describe(
        snapshot.plan, (DeviceHolder(claim.namespace, HolderKind.PLAN, claim.plan_name) for claim in ahead)
    )
    number = "1 gang is" if len(ahead) == 1 else f"{len(ahead)} gangs are"
    return f"{number} before it in the queue for its nodes, of {owners}"


def describe_holders(snapshot: Snapshot, node_name: str) -> str:
    """Return a clause on who holds the node's devices, or an empty string where nobody is known to."""
    holders = snapshot.holders.get(node_name, ())
    return f", held by {_describe(snapshot.plan, holders)}" if holders else ""


def _describe(plan: PlanFacts, holders: Iterable[DeviceHolder]) -> str:
    own: list[str] = []
    foreign: set[str] = set()
    for namespace, kind, name in holders:
        if namespace != plan.namespace:
            foreign.add(namespace)
        elif (kind, name) == (HolderKind.PLAN, plan_label(plan)):
            own.append("this plan")
        else:
            own.append(f"{kind} {name}")
    rest = ["others"] if "" in foreign else []
    foreign.discard("")
    namespaces = [] if not foreign else ["another namespace" if len(foreign) == 1 else "other namespaces"]
    return join_names([*dict.fromkeys(own), *namespaces, *rest])
