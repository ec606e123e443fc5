"""Claims of all plans and their gangs on nodes, as of each plan's last reconciliation; rebuilt after a restart."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from trainwright_operator.api.conditions import ConditionType
from trainwright_operator.api.status import TrainingPlanStatus
from trainwright_operator.flow.placement_queue import gang_claims, next_in_line, respected_claims
from trainwright_operator.flow.snapshot import GangClaim, PlanFacts, Snapshot

PlanKey = tuple[str, str]
_FIRST_READING_SECONDS: Final = 60.0
"""Patience with plans that cannot be read after a start: the others must not wait for them."""


class ClaimRegistry:
    """Claims by plan."""

    def __init__(self) -> None:
        self._claims: dict[str, tuple[GangClaim, ...]] = {}
        self._chosen: dict[str, frozenset[str]] = {}
        self._plans_by_node: Counter[str] = Counter()
        self._unread: set[PlanKey] | None = None
        self._started = time.monotonic()
        self._has_released = False

    def expect(self, plans: Iterable[PlanKey]) -> None:
        """Note the plans that exist at the operator's start; later calls change nothing."""
        if self._unread is None:
            self._unread = set(plans)

    def record_pass(self, plan: PlanKey) -> None:
        """Note that the plan was read, or that this failed."""
        if self._unread:
            self._unread.discard(plan)

    @property
    def is_complete(self) -> bool:
        """Return whether all plans were read since the start."""
        return self._unread == set() or time.monotonic() - self._started > _FIRST_READING_SECONDS

    def with_claims(self, snapshot: Snapshot) -> Snapshot:
        """Store the claims of the snapshot's plan and return the snapshot with those of all others."""
        uid = snapshot.plan.uid
        self._replace(uid, respected_claims(snapshot))
        others = tuple(claim for other, claims in self._claims.items() if other != uid for claim in claims)
        return replace(snapshot, other_claims=others, claims_known=self.is_complete, plans_by_node=self._plans_by_node)

    def record_nodes(self, plan: PlanFacts, status: TrainingPlanStatus) -> None:
        """Note the nodes that a plan with `devices.max` chose, until it has its answer or is suspended."""
        spec = plan.spec
        is_limited = spec is not None and spec.devices.max is not None and not spec.suspend
        is_answered = any(one.type is ConditionType.SUCCEEDED and one.status != "Unknown" for one in status.conditions)
        nodes = status.cluster.nodes if status.cluster is not None and is_limited and not is_answered else ()
        self._choose(plan.uid, frozenset(node.name for node in nodes))

    def record_placement(self, snapshot: Snapshot) -> None:
        """Note that all pods of the plan's waiting gangs were placed; its next reconciliation corrects what failed."""
        self._claims[snapshot.plan.uid] = tuple(
            replace(claim, held={**claim.wanted, **claim.held}, wanted={}) for claim in gang_claims(snapshot)
        )

    def forget(self, uid: str) -> None:
        """Drop the claims of a plan."""
        self._replace(uid, ())
        self._choose(uid, frozenset())

    def plans_to_wake(self) -> set[str]:
        """Return the plans whose gangs are the next for all of their nodes, if a node was released since the last call."""
        if not self._has_released:
            return set()
        self._has_released = False
        return {claim.plan_uid for claim in next_in_line(one for claims in self._claims.values() for one in claims)}

    def _choose(self, uid: str, nodes: frozenset[str]) -> None:
        before = self._chosen.pop(uid, frozenset())
        self._plans_by_node.subtract(before - nodes)
        self._plans_by_node.update(nodes - before)
        if nodes:
            self._chosen[uid] = nodes

    def _replace(self, uid: str, claims: tuple[GangClaim, ...]) -> None:
        before = self._claims.pop(uid, ())
        self._has_released |= not _nodes(before) <= _nodes(claims)
        if claims:
            self._claims[uid] = claims


def _nodes(claims: Iterable[GangClaim]) -> set[tuple[str, str]]:
    """Return the nodes that each gang holds or waits for."""
    return {(claim.gang, node) for claim in claims for node in (*claim.held, *claim.wanted)}
