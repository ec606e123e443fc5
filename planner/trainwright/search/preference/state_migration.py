"""Migration of state to a new plan: bytes, seconds, and the assignment of devices that moves least."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from trainwright.cluster import Device
from trainwright.cost.context import CostContext
from trainwright.cost.network import link_matrices, node_classes
from trainwright.plan import Plan
from trainwright.rank_layout import WHOLE
from trainwright.search.preference.device_state import DeviceState, MigrationCost, device_states, missing_bytes_by_node
from trainwright.search.preference.simplicity import Measure, iteration_seconds
from trainwright.search.problem import Candidate, Preference, Problem

MAX_PAIRS = 20_000
"""Maximum number of pairs of distinct roles and nodes; above it, data-parallel shards are ignored when matching nodes."""


def match_devices(new: Plan, old: Plan, problem: Problem) -> Plan:
    """Return the new plan with interchangeable nodes and each node's slots permuted so that least state moves.

    Its cost stays the same, since nodes are swapped only within a class (`node_classes`), and only with nodes that plans may
    use. The new plan itself is returned if nothing is gained.
    """
    mapping = _DeviceMatching(new, old, problem).mapping()
    moved = new.map_stages(lambda stage: replace(stage, devices=tuple(mapping[device] for device in stage.devices)))
    return new if moved == new else moved


class _DeviceMatching:
    def __init__(self, new: Plan, old: Plan, problem: Problem) -> None:
        self.problem, self.migration_cost = problem, MigrationCost(problem.cost_context)
        self.old_states, self.new_states = device_states(old), device_states(new)
        self.devices_by_role: dict[str, list[Device]] = {}
        for device in new.devices:
            self.devices_by_role.setdefault(device.node, []).append(device)

    def mapping(self) -> dict[Device, Device]:
        """Return, for each device of the new plan, the device that takes its role."""
        cluster = self.problem.cluster
        class_of = dict(zip((node.name for node in cluster.nodes), node_classes(cluster), strict=True))
        nodes_by_class: dict[int, list[str]] = {}
        for name in self.problem.nodes:
            nodes_by_class.setdefault(class_of[name], []).append(name)
        device_of: dict[Device, Device] = {}
        for number, nodes in nodes_by_class.items():
            roles = [name for name in self.devices_by_role if class_of[name] == number]
            for role, node in self._match_nodes(roles, nodes) if roles else ():
                device_of |= self._match_slots(role, node)
        # A plan made for another problem may have nodes that this one does not allow: they stay.
        return {device: device_of.get(device, device) for device in self.new_states}

    def _match_nodes(self, roles: list[str], nodes: list[str]) -> list[tuple[str, str]]:
        """Return pairs of a role (a node of the new plan) and the node that takes it."""
        if len(nodes) == 1:
            return [(roles[0], nodes[0])]
        required_states, resident_states = self._signatures(roles, nodes)
        distinct_required, distinct_resident = (
            list(dict.fromkeys(states)) for states in (required_states, resident_states)
        )
        table = np.array(
            [
                [_min_cost_assignment(self._bytes_to_move(needed, resident))[0] for resident in distinct_resident]
                for needed in distinct_required
            ]
        )
        rows = [distinct_required.index(state) for state in required_states]
        columns = [distinct_resident.index(state) for state in resident_states]
        # Half a byte breaks ties in favour of a node's own role.
        is_own_role = np.array([[role == node for node in nodes] for role in roles])
        chosen = _min_cost_assignment(table[np.ix_(rows, columns)] - 0.5 * is_own_role)[1]
        return [(role, nodes[column]) for role, column in zip(roles, chosen, strict=True)]

    def _signatures(
        self, roles: list[str], nodes: list[str]
    ) -> tuple[list[tuple[DeviceState, ...]], list[tuple[DeviceState, ...]]]:
        """Return the states that roles require and those resident on nodes, coarser if there are too many pairs."""
        required_states = [tuple(sorted(self._required_states(role))) for role in roles]
        resident_states = [tuple(sorted(self._resident_states(node))) for node in nodes]
        if len(set(required_states)) * len(set(resident_states)) > MAX_PAIRS:
            required_states, resident_states = (
                [tuple(map(_without_sharding, state)) for state in states]
                for states in (required_states, resident_states)
            )
        return required_states, resident_states

    def _required_states(self, role: str) -> list[DeviceState]:
        return [self.new_states[device] for device in self.devices_by_role[role]]

    def _resident_states(self, node: str) -> list[DeviceState]:
        return [self.old_states.get(Device(node, slot), ()) for slot in range(self.problem.cluster.node(node).devices)]

    def _match_slots(self, role: str, node: str) -> dict[Device, Device]:
        """Return the slot of the node for each device of the role."""
        devices = self.devices_by_role[role]
        table = self._bytes_to_move(self._required_states(role), self._resident_states(node))
        is_own_slot = np.array([[device.slot == slot for slot in range(table.shape[1])] for device in devices])
        chosen = _min_cost_assignment(table - 0.5 * is_own_slot)[1]
        return {device: Device(node, slot) for device, slot in zip(devices, chosen, strict=True)}

    def _bytes_to_move(self, required: Sequence[DeviceState], resident: Sequence[DeviceState]) -> NDArray[np.float64]:
        """Return `[required, resident]` bytes to move."""
        missing_bytes = self.migration_cost.missing_bytes
        return np.array([[missing_bytes(state, needed) for state in resident] for needed in required], dtype=float)


def _min_cost_assignment(cost: NDArray[np.float64]) -> tuple[float, list[int]]:
    """Return the minimum cost of assigning every row its own column, and the columns."""
    if len(cost) == 1:
        column = int(np.argmin(cost[0]))
        return float(cost[0, column]), [column]
    from scipy.optimize import linear_sum_assignment  # noqa: PLC0415 - SciPy is slow to load

    rows, columns = linear_sum_assignment(cost)
    return float(cost[rows, columns].sum()), [int(column) for column in columns]


def _without_sharding(device_state: DeviceState) -> DeviceState:
    return tuple(run._replace(shard=run.shard._replace(weights=WHOLE, optimizer=WHOLE)) for run in device_state)


def migration_bytes(old: Plan, new: Plan, context: CostContext) -> int:
    """Return the bytes of weights, master weights and optimizer state that devices must fetch to change plans.

    A device without a part in the old plan has no state. Raises ValueError if the plans are for different models.
    """
    return sum(missing_bytes_by_node(old, new, context).values())


def migration_seconds(old: Plan, new: Plan, context: CostContext) -> float:
    """Return seconds until every device has its state: nodes fetch at once, each through its NIC.

    The source may be a checkpoint or other nodes; faster copies within a node are not modelled. On a cluster of one node, the
    link inside it replaces the NIC.
    """
    cluster = context.cluster
    number = {node.name: index for index, node in enumerate(cluster.nodes)}
    links = link_matrices(cluster)
    seconds = 0.0
    for name, size in missing_bytes_by_node(old, new, context).items():
        column = links.bandwidth[:, number[name]]
        bandwidth = column[number[name]] if len(column) == 1 else np.delete(column, number[name]).max()
        seconds = max(seconds, size / (bandwidth * context.runtime.link_ratio) if size else 0.0)
    return float(seconds)


def order_by_migration(
    candidates: Sequence[Candidate], preference: Preference, problem: Problem, measure: Measure = iteration_seconds
) -> list[tuple[float, Candidate]]:
    """Order candidates by measure × (1 + weight × migration seconds / iteration seconds), with devices matched.

    If the measure is time, this value is iteration seconds + weight × migration seconds. Candidates whose measure alone is
    beyond the tolerance of the first are neither matched (`match_devices`) nor charged; they follow by their measure. Raises
    ValueError if the preference has no plan to keep.
    """
    old, weight = preference.keep, preference.keep_weight
    if old is None:
        raise ValueError("the preference keeps no plan")
    with_migration: list[tuple[float, Candidate]] = []
    too_slow: list[tuple[float, Candidate]] = []
    least = math.inf
    for candidate in sorted(candidates, key=measure):
        measured = measure(candidate)
        if measured > least * (1 + preference.tolerance):
            too_slow.append((measured, candidate))
            continue
        moved = _rename_devices(candidate, match_devices(candidate.plan, old, problem))
        seconds = candidate.estimate.iteration_seconds
        weighted_migration = weight * migration_seconds(old, moved.plan, problem.cost_context)
        value = measured * (1 + weighted_migration / seconds) if seconds > 0 else measured
        least = min(least, value)
        with_migration.append((value, moved))
    return [*sorted(with_migration, key=lambda item: item[0]), *too_slow]


def _rename_devices(candidate: Candidate, plan: Plan) -> Candidate:
    """Return the candidate with its devices renamed and its cost unchanged."""
    if plan is candidate.plan:
        return candidate
    name = dict(zip(candidate.plan.devices, plan.devices, strict=True))
    estimate = candidate.estimate
    return replace(
        candidate,
        plan=plan,
        estimate=replace(
            estimate,
            critical_device=name[estimate.critical_device],
            memory_by_device=tuple((name[device], device_bytes) for device, device_bytes in estimate.memory_by_device),
        ),
    )
