"""Plans that users create, edit, suspend and delete at random while the operator is killed every minute."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from real_api_server import ApiServer
from simulated_nodes import PLANS, Requests, SimulatedNodes

MERGE: Final = "application/merge-patch+json"
_ACTION_SECONDS: Final = 0.8
_SETTLE_SECONDS: Final = 900.0


@dataclass
class Users:
    """Random users of a namespace; at most `most` plans exist at a time.

    Attributes:
        done: number of actions of each kind.
    """

    api: ApiServer
    namespace: str
    plan: Callable[[str, dict[str, Any]], dict[str, Any]]
    most: int
    chance: random.Random
    done: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._requests = Requests(self.api)
        self._path = PLANS.format(self.namespace)
        self._numbers = iter(range(1_000_000))
        self._names: list[str] = []

    def act(self) -> None:
        """Take one random action."""
        actions = [self._create] * 3 if len(self._names) < self.most else []
        actions += [self._edit, self._suspend, self._resume, self._delete] if self._names else []
        action = self.chance.choice(actions)
        action()
        self.done[action.__name__.strip("_")] += 1

    def resume_all(self) -> None:
        """Resume every plan."""
        for name in self._names:
            self._patch(name, {"suspend": False})

    def delete_all(self) -> None:
        """Delete every plan."""
        while self._names:
            self._delete()

    def answers(self) -> Counter[str]:
        """Count the plans by the status of their present generation's answer."""
        found: Counter[str] = Counter()
        for one in self._requests.items(self._path):
            conditions = {c["type"]: c for c in one.get("status", {}).get("conditions", [])}
            answer = conditions.get("Succeeded", {})
            is_current = answer.get("observedGeneration") == one["metadata"]["generation"]
            found[answer["status"] if is_current else "Unknown"] += 1
        return found

    def _create(self) -> None:
        name = f"plan-{next(self._numbers)}"
        spec = {
            "devices": {"max": 4},
            "trials": {"topK": 2},
            "search": {"planner": "Amp", "limits": {"maxTensorDegree": 2}},
            "training": {"globalBatchSize": 8, "dtype": "float32"},
            # Every plan measures for itself, and nothing outlives it.
            "links": {"maxAgeSeconds": 0},
            "profiling": {"maxAgeSeconds": 0},
        }
        self._requests.send("POST", self._path, self.plan(name, spec))
        self._names.append(name)

    def _edit(self) -> None:
        edits = [{"trials": {"topK": self.chance.randint(0, 3)}}, {"priority": self.chance.randint(-5, 5)}]
        self._patch(self.chance.choice(self._names), self.chance.choice(edits))

    def _suspend(self) -> None:
        self._patch(self.chance.choice(self._names), {"suspend": True})

    def _resume(self) -> None:
        self._patch(self.chance.choice(self._names), {"suspend": False})

    def _delete(self) -> None:
        name = self._names.pop(self.chance.randrange(len(self._names)))
        self._requests.send("DELETE", f"{self._path}/{name}", {})

    def _patch(self, name: str, spec: dict[str, Any]) -> None:
        self._requests.send("PATCH", f"{self._path}/{name}", {"spec": spec}, MERGE)


def churn(users: Users, seconds: float, kill: Callable[[], None], kill_every_seconds: float = 60.0) -> None:
    """Act at random, with a kill of the operator every minute."""
    ends = time.monotonic() + seconds
    next_kill = time.monotonic() + kill_every_seconds
    while time.monotonic() < ends:
        users.act()
        time.sleep(users.chance.uniform(0.5, 1.5) * _ACTION_SECONDS)
        if time.monotonic() >= next_kill:
            kill()
            users.done["kill"] += 1
            next_kill += kill_every_seconds
    users.resume_all()


def wait_for_answers(users: Users, nodes: SimulatedNodes) -> Counter[str]:
    """Wait until every plan has its answer, or for long. Return the plans by it."""
    ends = time.monotonic() + _SETTLE_SECONDS
    while (found := users.answers())["Unknown"] and time.monotonic() < ends and nodes.failure is None:
        time.sleep(2.0)
    return found
