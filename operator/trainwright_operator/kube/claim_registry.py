"""Claims of all plans and their gangs on nodes, as of each plan's last reconciliation; rebuilt after a restart."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

from trainwright_operator.api.status import TrainingPlanStatus
from trainwright_operator.flow.gangs.placement_queue import gang_claims, last_turn, next_in_line, respected_claims
from trainwright_operator.flow.phases.plan_places import age_order, kept_place, place_of
from trainwright_operator.flow.snapshot import GangClaim, PlanFacts, PlanPlace, Snapshot

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
        self._places: defaultdict[str, dict[str, PlanPlace]] = defaultdict(dict)
        self._freed: set[str] = set()
        self._turns: dict[str, datetime] = {}

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
        self._record_turn(snapshot.plan.namespace, last_turn(snapshot))
        claimed = replace(
            snapshot,
            other_claims=others,
            last_turns=self._turns,
            claims_known=self.is_complete,
            plans_by_node=self._plans_by_node,
        )
        return self._with_places(claimed) if claimed.rules.limits.plans_per_namespace is not None else claimed

    def _record_turn(self, namespace: str, time: datetime | None) -> None:
        if time is not None:
            self._turns[namespace] = max(time, self._turns.get(namespace, time))

    def _with_places(self, snapshot: Snapshot) -> Snapshot:
        plan, places = snapshot.plan, self._places[snapshot.plan.namespace]
        own = kept_place(places.get(plan.uid), place_of(plan, plan.status))
        self._set_place(plan, own)
        others = tuple(place for uid, place in places.items() if uid != plan.uid)
        return replace(snapshot, has_place=own is not None and own.is_under_way, other_places=others)

    def _set_place(self, plan: PlanFacts, place: PlanPlace | None) -> None:
        places = self._places[plan.namespace]
        before = places.pop(plan.uid, None)
        if before is not None and (place is None or before.is_under_way > place.is_under_way):
            self._freed.add(plan.namespace)
        if place is not None:
            places[plan.uid] = place

    def record_decision(self, snapshot: Snapshot, status: TrainingPlanStatus) -> None:
        """Note what was decided: the plan's place, and with `devices.max` its nodes until it has ended or is suspended."""
        plan = snapshot.plan
        if snapshot.rules.limits.plans_per_namespace is not None:
            self._set_place(plan, place_of(plan, status))
        spec = plan.spec
        is_limited = spec is not None and spec.devices.max is not None and not spec.suspend
        nodes = status.cluster.nodes if status.cluster is not None and is_limited and not status.is_answered else ()
        self._choose(plan.uid, frozenset(node.name for node in nodes))

    def record_placement(self, snapshot: Snapshot) -> None:
        """Note that all pods of the plan's waiting gangs were placed; its next reconciliation corrects what failed."""
        self._record_turn(snapshot.plan.namespace, datetime.now(UTC))
        self._claims[snapshot.plan.uid] = tuple(
            replace(claim, held={**claim.wanted, **claim.held}, wanted={}) for claim in gang_claims(snapshot)
        )

    def forget(self, uid: str) -> None:
        """Drop the claims of a plan."""
        self._replace(uid, ())
        self._choose(uid, frozenset())
        for namespace, places in self._places.items():
            if places.pop(uid, None) is not None:
                self._freed.add(namespace)

    def plans_to_wake(self) -> set[str]:
        """Return the plans whose turn may be now, since a node or a place was released since the last call.

        Those are the plans whose gangs are the next for all of their nodes, and the first that waits for a place.
        """
        waiting = [(place for place in self._places[name].values() if not place.is_under_way) for name in self._freed]
        uids = {min(places, key=age_order).uid for plan_places in waiting if (places := list(plan_places))}
        self._freed.clear()
        if self._has_released:
            self._has_released = False
            all_claims = (claim for claims in self._claims.values() for claim in claims)
            uids.update(claim.plan_uid for claim in next_in_line(all_claims, self._turns))
        return uids

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
