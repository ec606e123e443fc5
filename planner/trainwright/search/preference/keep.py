"""Re-planning while something runs: plans that move less of what the devices already hold come first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from trainwright.cost.links import links_of
from trainwright.cost.setting import Setting
from trainwright.plan import Plan
from trainwright.search.preference import state
from trainwright.search.preference.alignment import aligned
from trainwright.search.preference.simplicity import Measure, iteration_seconds
from trainwright.search.protocol import Candidate, Preference, Problem


def moved_bytes(old: Plan, new: Plan, setting: Setting) -> int:
    """Bytes of weights, master weights and optimizer state that devices must newly hold to change plans.

    A device holds what the old plan put there, and nothing where it took no part in it. Raises ValueError where the
    plans are for different models.
    """
    return sum(state.by_node(old, new, setting).values())


def moved_seconds(old: Plan, new: Plan, setting: Setting) -> float:
    """Seconds until every device holds its part: nodes fill at once, each through its card, whatever the source.

    That is how long it takes from a checkpoint or from other nodes; what a neighbour in the same node might give
    faster is not told apart. On a cluster of one node the link inside it takes the card's place.
    """
    cluster = setting.cluster
    number = {node.name: index for index, node in enumerate(cluster.nodes)}
    links = links_of(cluster)
    seconds = 0.0
    for name, size in state.by_node(old, new, setting).items():
        column = links.bandwidth[:, number[name]]
        card = column[number[name]] if len(column) == 1 else np.delete(column, number[name]).max()
        seconds = max(seconds, size / (card * setting.runtime.link_ratio) if size else 0.0)
    return float(seconds)


def keep_order(
    candidates: Sequence[Candidate], preference: Preference, problem: Problem, measure: Measure = iteration_seconds
) -> list[tuple[float, Candidate]]:
    """Candidates in the roles that move least (`aligned`), by measure × (1 + weight × moved seconds / iteration seconds).

    Where time is measured that is: iteration seconds + weight × moved seconds. With each comes that value. Those that
    cannot be within the tolerance of the first, because already their measure is behind, are neither aligned nor
    charged: they follow by it. Raises ValueError where the preference keeps no plan.
    """
    old, weight = preference.keep, preference.keep_weight
    if old is None:
        raise ValueError("the preference keeps no plan")
    charged: list[tuple[float, Candidate]] = []
    rest: list[tuple[float, Candidate]] = []
    least = math.inf
    for candidate in sorted(candidates, key=measure):
        own = measure(candidate)
        if own > least * (1 + preference.tolerance):
            rest.append((own, candidate))
            continue
        moved = _in_roles(candidate, aligned(candidate.plan, old, problem))
        seconds = candidate.estimate.iteration_seconds
        extra = weight * moved_seconds(old, moved.plan, problem.setting)
        value = own * (1 + extra / seconds) if seconds > 0 else own
        least = min(least, value)
        charged.append((value, moved))
    return [*sorted(charged, key=lambda one: one[0]), *rest]


def _in_roles(candidate: Candidate, plan: Plan) -> Candidate:
    """The candidate with its devices renamed; what it costs stays."""
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
            memory_by_device=tuple((name[device], held) for device, held in estimate.memory_by_device),
        ),
    )
