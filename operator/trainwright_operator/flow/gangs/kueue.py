"""Queue of Kueue that a plan's gangs stand in: which nodes it may use, and which labels keep other flavors away.

Kueue admits a gang's pods group by group to a flavor whose labels do not contradict the group's node affinity, then adds
these labels to the pods' node selector. A group whose nodes are alike in all labels that flavors name, and whose affinity
excludes the other values of these labels, gets a flavor that all of its nodes have.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from trainwright_operator.flow.device_types import NodeUnusable
from trainwright_operator.flow.phase import ReconcileContext
from trainwright_operator.flow.reasons import Explanation, Reason, explain
from trainwright_operator.flow.snapshot import FlavorFacts, NodeFacts, QueueFacts

API_GROUP: Final = "kueue.x-k8s.io"
QUEUE_LABEL: Final = f"{API_GROUP}/queue-name"
PRIORITY_LABEL: Final = f"{API_GROUP}/priority-class"

LabelValues = tuple[tuple[str, tuple[str, ...]], ...]
"""Label keys, each with values, in order."""


def explain_problem(context: ReconcileContext) -> Explanation | None:
    """Return why the plan's queue cannot be used now, or None where it can or the plan has none."""
    queue = context.snapshot.queue
    if context.spec.queue_name is None or (queue is not None and queue.is_installed and not queue.problem):
        return None
    if queue is not None and not queue.is_installed:
        return explain(Reason.KUEUE_MISSING, queue=queue.name)
    what = queue.problem if queue is not None else "it has not been read yet"
    return explain(Reason.QUEUE_UNUSABLE, queue=context.spec.queue_name, what=what)


def take_quota(node: NodeFacts, devices: int, queue: QueueFacts | None, used: Mapping[str, int]) -> Mapping[str, int]:
    """Return the used devices by flavor with the node's, of its first flavor with enough quota left.

    Raise NodeUnusable where there is none.
    """
    flavors = find_flavors(node, queue)
    if flavors is None:
        return used
    for flavor in flavors:
        total = used.get(flavor.name, 0) + devices
        if flavor.quota is None or total <= flavor.quota:
            return {**used, flavor.name: total}
    left = ", ".join(f"{(one.quota or 0) - used.get(one.name, 0)} of {one.name}" for one in flavors)
    raise NodeUnusable(f"its {devices} devices exceed the quota of spec.queueName, of which is left: {left}")


def find_flavors(node: NodeFacts, queue: QueueFacts | None) -> tuple[FlavorFacts, ...] | None:
    """Return the flavors whose labels the node has, in Kueue's order, or None where no usable queue limits the plan.

    Raise NodeUnusable where there is none, or where Kueue places the pods of one itself.
    """
    if queue is None or queue.problem or not queue.is_installed:
        return None
    found = tuple(one for one in queue.flavors if one.node_labels.items() <= node.labels.items())
    if not found:
        names = ", ".join(one.name for one in queue.flavors)
        raise NodeUnusable(f"it has the labels of no flavor of spec.queueName {queue.name} ({names})")
    placed = next((one for one in found if one.topology), None)
    if placed is not None:
        raise NodeUnusable(
            f"its flavor {placed.name} has topologyName {placed.topology}, with which Kueue places pods on nodes of its own "
            "choice; use a queue whose flavors have none"
        )
    return found


def other_labels(node: NodeFacts, queue: QueueFacts) -> LabelValues:
    """Return the values, of each label that flavors name, that the node does not have."""
    values: dict[str, set[str]] = {}
    for flavor in queue.flavors:
        for key, value in flavor.node_labels.items():
            values.setdefault(key, set()).add(value)
    others = ((key, tuple(sorted(known - {node.labels.get(key, "")}))) for key, known in sorted(values.items()))
    return tuple((key, rest) for key, rest in others if rest)


def dump_labels(context: ReconcileContext, node_names: tuple[str, ...]) -> str:
    """Return the excluded labels of a gang's nodes as JSON, which is kept with the gang's task."""
    queue = context.snapshot.queue
    nodes = (context.nodes[name] for name in node_names if name in context.nodes)
    return json.dumps({node.name: dict(other_labels(node, queue)) for node in nodes} if queue is not None else {})


def parse_labels(text: str) -> Mapping[str, LabelValues]:
    """Parse what `dump_labels` wrote; what somebody modified counts as empty."""
    try:
        found = json.loads(text)
        return {
            str(node): tuple((str(key), tuple(map(str, values))) for key, values in labels.items())
            for node, labels in found.items()
        }
    except (ValueError, AttributeError, TypeError, RecursionError):
        return {}
