"""Comparison of `auto` with thousands of random plans improved by local moves.

`python benchmarks/auto_random_restarts.py 48 76` runs the cases with these numbers. Random plans ignore a case's
structure: a faster one shows a plan that the search misses.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from rich.console import Console
from rich.table import Table

from auto_cases import cases
from trainwright.cluster import Device
from trainwright.layer import WHOLE_LAYER
from trainwright.plan import LayerRun, Pipeline, Plan, Schedule, Stage, divisors
from trainwright.search import SEARCHES, Candidate, Problem, SearchControl
from trainwright.search.auto.layer_rebalancing import scale_rows
from trainwright.search.auto.local_search import CandidateEvaluator, local_search
from trainwright.strategy import Sharding, Strategy

QUICK = (4, 30, 48, 58, 72, 76, 86, 88)
"""Cases of few devices, on which random plans do well."""
PLANS = 4000
"""Evaluations per case, all starts together."""
TRIES = 300
"""Maximum evaluations per start."""
STAGES = (1, 1, 2, 2, 3, 4, 5, 6)
TENSOR_DEGREES = (1, 2, 4, 8)


def main(numbers: Sequence[int] = QUICK) -> None:
    """Print the table."""
    console = Console(width=150)
    table = Table("case", "auto s", "by chance s", "chance over auto", "its plan", title=f"{PLANS:,} plans by chance")
    for number in numbers:
        case = cases()[number]
        ours = SEARCHES["auto"](case.problem(), SearchControl(), 1)[0].estimate.iteration_seconds
        found = by_chance(case.problem(), seed=1)
        if found is not None:
            seconds = found.estimate.iteration_seconds
            table.add_row(
                f"{number}: {case}", f"{ours:.6f}", f"{seconds:.6f}", f"{seconds / ours:.4f}", found.plan.summary()
            )
    console.print(table)


def by_chance(problem: Problem, *, seed: int) -> Candidate | None:
    """Return the best plan of all starts, or None where none was feasible."""
    pick = random.Random(seed)  # noqa: S311 - not for secrets
    judge, draw, best = CandidateEvaluator(problem, SearchControl(), PLANS), _Draw(problem, pick), None
    for _ in range(PLANS):
        if judge.is_exhausted:
            break
        plan = draw.plan()
        start = None if plan is None else judge.evaluate_repaired(plan)
        if start is not None:
            found = local_search(start, judge, TRIES)
            if best is None or found.estimate.iteration_seconds < best.estimate.iteration_seconds:
                best = found
    return best


@dataclass(frozen=True)
class _Draw:
    """Generator of random pipelines of any devices in any order; layers and rows follow the devices' speeds."""

    problem: Problem
    pick: random.Random

    def plan(self) -> Plan | None:
        """Draw a plan, or None if the drawn parts do not fit together."""
        problem, pick = self.problem, self.pick
        devices, layers = self._devices(), len(problem.model.layers)
        count = min(pick.choice(STAGES), len(devices), layers)
        rows = pick.choice(divisors(problem.global_batch_size))
        cuts = (0, *sorted(pick.sample(range(1, len(devices)), count - 1)), len(devices))
        groups = [devices[a:z] for a, z in pairwise(cuts)]
        ends = scale_rows([round(1000 * sum(map(self._speed, group))) or 1 for group in groups], layers)
        stages, first = [], 0
        for group, size in zip(groups, ends, strict=True):
            tensor = pick.choice([degree for degree in TENSOR_DEGREES if len(group) % degree == 0])
            shares = [round(100 * self._speed(group[at])) or 1 for at in range(0, len(group), tensor)]
            if len(shares) > rows:
                return None
            sharding = pick.choice(list(Sharding)) if len(shares) > 1 else Sharding.NONE
            stages.append(
                Stage(
                    tuple(group),
                    (
                        LayerRun(
                            first, size, Strategy(tensor, len(shares), sharding=sharding), scale_rows(shares, rows)
                        ),
                    ),
                )
            )
            first += size
        pipeline = Pipeline(problem.global_batch_size // rows, rows, tuple(stages))
        return Plan(layers, problem.global_batch_size, (pipeline,), pick.choice(list(Schedule)))

    def _devices(self) -> list[Device]:
        devices = list(self.problem.devices)
        self.pick.choice(
            (
                lambda: self.pick.shuffle(devices),
                lambda: devices.sort(key=lambda one: (one.slot, one.node)),
                lambda: devices.sort(key=self._speed),
                lambda: devices.sort(key=self._speed, reverse=True),
                lambda: None,
            )
        )()
        return devices[: self.pick.choice((len(devices), self.pick.randint(1, len(devices))))]

    def _speed(self, device: Device) -> float:
        """Return the speed relative to the fastest device."""
        return self._speeds[self.problem.cluster.node(device.node).accelerator]

    @cached_property
    def _speeds(self) -> dict[str, float]:
        """Return each accelerator's relative speed, 1 for the fastest."""
        setting, names = self.problem.cost_context, {node.accelerator for node in self.problem.cluster.nodes}
        seconds = {}
        for name in names:
            costs = [setting.layer_cost(name, kind, WHOLE_LAYER, 1) for kind in self.problem.model.kinds]
            seconds[name] = sum(one.forward_seconds + one.backward_seconds for one in costs)
        return {name: min(seconds.values()) / one for name, one in seconds.items()}


if __name__ == "__main__":
    main([int(number) for number in sys.argv[1:]] or QUICK)
