"""What a search is asked and what it answers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from threading import Event
from typing import Protocol

from trainwright.cluster import Cluster, Device
from trainwright.cost.estimate import Estimate
from trainwright.cost.setting import Setting
from trainwright.model import Model
from trainwright.operator_specs import SpanSpecs
from trainwright.plan import Plan
from trainwright.profiles import Profiles
from trainwright.runtime import Runtime
from trainwright.training import Optimizer


class NoFeasiblePlan(ValueError):  # noqa: N818 - an answer in words, not a defect
    """No plan of the search can run; the message says why."""


class Objective(StrEnum):
    """What a better plan has less of: seconds of an iteration, money for a sample (row), or, none giving way, both."""

    TIME = "time"
    COST = "cost"
    PARETO = "pareto"


@dataclass(frozen=True)
class Limits:
    """What plans may use; None leaves it to the model, the profiles and the devices.

    Attributes:
        memory_headroom_ratio: share of every device's memory that plans leave free.
        use_nodes: the only nodes that plans use, by name; empty: all.
        spare: what plans leave alone: nodes or accelerators, by name.
        objective: what is least in the best plan.
    """

    max_tensor_degree: int | None = None
    max_data_degree: int | None = None
    max_pipeline_degree: int | None = None
    memory_headroom_ratio: float = 0.0
    use_nodes: tuple[str, ...] = ()
    spare: tuple[str, ...] = ()
    objective: Objective = Objective.TIME

    def __post_init__(self) -> None:
        for name in ("max_tensor_degree", "max_data_degree", "max_pipeline_degree"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not 0 <= self.memory_headroom_ratio < 1:
            raise ValueError(f"memory_headroom_ratio must be 0 or more and below 1, got {self.memory_headroom_ratio}")


@dataclass(frozen=True)
class Preference:
    """What decides among candidates beside the objective; by default nothing does.

    Attributes:
        tolerance: candidates that are worse than the best by at most this share are taken for equally good, and the
            simplest of them for the best.
        keep: the plan that runs now.
        keep_weight: what a second of moving state away from it weighs against a second of every iteration; 0.001 says
            that moving has to pay off within a thousand iterations.
    """

    tolerance: float = 0.0
    keep: Plan | None = None
    keep_weight: float = 0.001

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < 1:
            raise ValueError(f"tolerance must be 0 or more and below 1, got {self.tolerance}")
        if not 0 <= self.keep_weight < math.inf:
            raise ValueError(f"keep_weight must be finite and at least 0, got {self.keep_weight}")

    @property
    def decides(self) -> bool:
        """Whether it can change what the objective alone says."""
        return self.tolerance > 0 or self.keep is not None


@dataclass(frozen=True)
class Problem:
    """Everything that a search may look at.

    Attributes:
        global_batch_size: rows of one iteration (AMP's gbs).
    """

    cluster: Cluster
    model: Model
    profiles: Profiles
    global_batch_size: int
    limits: Limits = field(default_factory=Limits)
    optimizer: Optimizer = "adam"
    runtime: Runtime = field(default_factory=Runtime)
    preference: Preference = field(default_factory=Preference)

    def __post_init__(self) -> None:
        if self.global_batch_size < 1:
            raise ValueError(f"global_batch_size must be at least 1, got {self.global_batch_size}")
        accelerators = {node.accelerator for node in self.cluster.nodes}
        nodes = {node.name for node in self.cluster.nodes}
        for name in (*self.limits.use_nodes, *self.limits.spare):
            if name not in nodes and (name not in accelerators or name in self.limits.use_nodes):
                raise ValueError(f"the cluster has no {name} to use or to spare; it has {', '.join(sorted(nodes))}")
        keep, layers = self.preference.keep, len(self.model.layers)
        if keep is not None and keep.model_layers != layers:
            raise ValueError(
                f"the plan to keep is for a model of {keep.model_layers} layers, but this one has {layers}"
            )
        if not self.devices:
            raise ValueError("all devices are spared; leave at least one to the plans")

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes that plans may use, in the cluster's order."""
        limits = self.limits
        return tuple(
            node.name
            for node in self.cluster.nodes
            if (not limits.use_nodes or node.name in limits.use_nodes)
            and node.name not in limits.spare
            and node.accelerator not in limits.spare
        )

    @cached_property
    def node_numbers(self) -> tuple[int, ...]:
        """Their places among the nodes of the cluster."""
        used = set(self.nodes)
        return tuple(number for number, node in enumerate(self.cluster.nodes) if node.name in used)

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """The devices that plans may use, node by node."""
        used = set(self.nodes)
        return tuple(device for device in self.cluster.devices if device.node in used)

    def on(self, nodes: Sequence[str]) -> Problem:
        """The same where plans may use these nodes alone; what the cost model needs is shared."""
        found = replace(self, limits=replace(self.limits, use_nodes=tuple(nodes)))
        vars(found)["setting"] = self.setting
        return found

    @cached_property
    def setting(self) -> Setting:
        """What the cost model needs of it; its cluster has only the memory that plans may fill."""
        return Setting(self.model, self._cluster_less_headroom, self.profiles, self.optimizer, self.runtime)

    @property
    def _cluster_less_headroom(self) -> Cluster:
        free = self.limits.memory_headroom_ratio
        if not free:
            return self.cluster
        accelerators = tuple(
            replace(accelerator, memory_bytes=max(math.floor(accelerator.memory_bytes * (1 - free)), 1))
            for accelerator in self.cluster.accelerators
        )
        return replace(self.cluster, accelerators=accelerators)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan with its estimate.

    Attributes:
        price_per_hour: of all devices that the plan uses; None where an accelerator has no price.
        traded: in words, what a preference gave up for it; None where it gave up nothing.
        operators: by stage of its pipeline, how every operator runs, where the search found more than the plan's
            degrees can say (None where they say it all); the plan then has the nearest degrees, and the estimate is the
            plan's. Empty where no stage has any.
    """

    plan: Plan
    estimate: Estimate
    price_per_hour: float | None = None
    traded: str | None = None
    operators: tuple[SpanSpecs | None, ...] = ()

    @property
    def price_per_row(self) -> float | None:
        """What training on one row (sample) costs."""
        if self.price_per_hour is None:
            return None
        return self.price_per_hour / 3600 * self.estimate.iteration_seconds / self.plan.global_batch_size


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a search is: steps done of all, and the least iteration seconds so far (None before the first)."""

    done: int
    total: int
    best_seconds: float | None = None


@dataclass(frozen=True)
class Control:
    """How a search is run, beside what it is asked.

    A search calls `report` after every step and returns its best so far once `expired` says so, which is asked for
    the first time after a first feasible plan is there: a budget shortens the answer, it never empties it.

    Attributes:
        seed: of searches that draw; the same seed gives the same answer.
        deadline_seconds: on the clock `time.monotonic`; None: as long as it takes.
        effort: how many times as many plans as usual `auto` looks at.
        stopped: set once a search was told that its budget is spent, and so may have left something out.
    """

    seed: int = 0
    deadline_seconds: float | None = None
    report: Callable[[Progress], None] | None = None
    effort: float = 1.0
    stopped: Event = field(default_factory=Event, compare=False, repr=False)

    @classmethod
    def within(
        cls,
        budget_seconds: float | None,
        *,
        seed: int = 0,
        report: Callable[[Progress], None] | None = None,
        effort: float = 1.0,
    ) -> Control:
        """A control whose budget begins now."""
        deadline = None if budget_seconds is None else time.monotonic() + budget_seconds
        return cls(seed, deadline, report, effort)

    def expired(self) -> bool:
        """Whether the budget is spent; a search that is told so stops."""
        if self.deadline_seconds is None or time.monotonic() < self.deadline_seconds:
            return False
        self.stopped.set()
        return True

    def step(self, done: int, total: int, best_seconds: float | None = None) -> None:
        """Tell whoever watches."""
        if self.report is not None:
            self.report(Progress(done, total, best_seconds))


class Search(Protocol):
    """Finds feasible candidates, best first, no plan twice. Raises NoFeasiblePlan where there is none.

    `top` is how many the caller wants: a search may return more, and may skip what cannot be among them.
    """

    def __call__(self, problem: Problem, control: Control, top: int | None) -> list[Candidate]: ...
