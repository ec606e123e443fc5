"""Problem, limits, preference, candidate, progress and control that all searches share."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from threading import Event
from typing import Protocol

from trainwright.cluster import Cluster, Device, Node
from trainwright.cost.context import CostContext
from trainwright.cost.estimate import Estimate
from trainwright.exports import Capabilities, training_refusal
from trainwright.layer import Dtype
from trainwright.model import Model, least_rows, least_rows_words
from trainwright.operator_shardings import SpanSpecs
from trainwright.outside.notebook import ShownInNotebooks
from trainwright.plan import Plan
from trainwright.profiles import Profiles
from trainwright.runtime import Runtime
from trainwright.search.plan_defaults import with_runtime_choices
from trainwright.search.process_memory import unknown_memory_ratio
from trainwright.strategy import Strategy
from trainwright.training import Optimizer
from trainwright.training_run import SECONDS_PER_HOUR, TrainingRun, price_per_row


class NoFeasiblePlan(ValueError):  # noqa: N818 - an answer in words, not a defect
    """Error of a search that finds no feasible plan; the message says why."""


class NoPlanFits(NoFeasiblePlan):
    """Error of a search that finds no plan which fits into memory."""


class Objective(StrEnum):
    """Quantity to minimise: seconds of an iteration, price of a row (sample), or both (the Pareto front)."""

    TIME = "time"
    COST = "cost"
    PARETO = "pareto"


@dataclass(frozen=True)
class Limits:
    """Bounds of the plans; None means that model, profiles and devices alone bound them.

    Attributes:
        memory_headroom_ratio: share of every device's memory that plans leave free; None where it is not stated, which is
            none for a search, and `leaving_unknown_memory` for command line, operator and library.
        use_nodes: names of the only nodes that plans use; empty: all.
        spare: names of nodes or accelerators that plans do not use.
        expressible_by: capabilities of the trainer that has to run the plans; None: any plan.
        run: whole run that plans are for, which may have to end within a time; None where it is not stated.
    """

    max_tensor_degree: int | None = None
    max_data_degree: int | None = None
    max_pipeline_degree: int | None = None
    memory_headroom_ratio: float | None = None
    use_nodes: tuple[str, ...] = ()
    spare: tuple[str, ...] = ()
    objective: Objective = Objective.TIME
    expressible_by: Capabilities | None = None
    run: TrainingRun | None = None

    def __post_init__(self) -> None:
        for name in ("max_tensor_degree", "max_data_degree", "max_pipeline_degree"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not 0 <= self.headroom < 1:
            raise ValueError(f"memory_headroom_ratio must be 0 or more and below 1, got {self.memory_headroom_ratio}")

    def allows(self, strategy: Strategy) -> bool:
        """Return whether the degrees of a strategy are within the bounds."""
        return strategy.tensor <= (self.max_tensor_degree or strategy.tensor) and strategy.data <= (
            self.max_data_degree or strategy.data
        )

    def allows_plan(self, plan: Plan) -> bool:
        """Return whether the stages and the degrees of a plan are within the bounds.

        Shardings of operators are where all devices of their stage may be one tensor group, and one data group.
        """
        if any(len(pipeline.stages) > (self.max_pipeline_degree or math.inf) for pipeline in plan.pipelines):
            return False
        strategies = [run.strategy for stage in plan.stages for run in stage.layers]
        for stage in plan.stages:
            if stage.operators is not None:
                strategies += [Strategy(len(stage.devices), 1), Strategy(1, len(stage.devices))]
        return all(map(self.allows, strategies))

    def max_tensor(self, devices: int) -> int:
        """Return the largest tensor degree on a number of devices."""
        return min(self.max_tensor_degree or devices, devices)

    def max_stages(self, most: int) -> int:
        """Return the bound of a pipeline's stages, of which `most` are possible."""
        return min(self.max_pipeline_degree or most, most)

    @property
    def row_seconds(self) -> float:
        """Seconds that a row may take, so that the run ends within its time."""
        return math.inf if self.run is None else self.run.within_seconds / self.run.rows

    @property
    def headroom(self) -> float:
        """Share of every device's memory that plans leave free."""
        return self.memory_headroom_ratio or 0.0

    @property
    def headroom_words(self) -> str:
        """Return ` with 8% of it left free`, for a sentence on memory; empty without head-room."""
        return f" with {100 * self.headroom:.6g}% of it left free" if self.headroom else ""

    @property
    def dtypes(self) -> frozenset[Dtype]:
        """Number formats that plans may be in."""
        return frozenset(Dtype) if self.expressible_by is None else self.expressible_by.dtypes

    def leaving_unknown_memory(self, runtime: Runtime, cluster: Cluster) -> Limits:
        """Return the limits with the default head-room where none is stated, by what the runtime states of a process's memory.

        `runtime`: with what is assumed of processes (`assuming_process_memory`).
        """
        if self.memory_headroom_ratio is not None:
            return self
        return replace(self, memory_headroom_ratio=unknown_memory_ratio(runtime, cluster))

    def allowed(self, nodes: Iterable[Node]) -> tuple[Node, ...]:
        """Return the nodes that plans may use, in their order."""
        return tuple(
            node
            for node in nodes
            if (not self.use_nodes or node.name in self.use_nodes)
            and node.name not in self.spare
            and node.accelerator not in self.spare
        )


@dataclass(frozen=True)
class Preference:
    """Preference among candidates besides the objective; by default none.

    Attributes:
        tolerance: candidates worse than the best by at most this share count as equally good; the simplest of them wins.
        keep: plan that runs now.
        keep_is_shorthand: whether `keep` was given as shorthand, which leaves sequence parallelism to the runtime.
        keep_weight: weight of a second of moving state from `keep` against a second of every iteration; at 0.001, moving has
            to pay off within a thousand iterations.
    """

    tolerance: float = 0.0
    keep: Plan | None = None
    keep_weight: float = 0.001
    keep_is_shorthand: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < 1:
            raise ValueError(f"tolerance must be 0 or more and below 1, got {self.tolerance}")
        if not 0 <= self.keep_weight < math.inf:
            raise ValueError(f"keep_weight must be finite and at least 0, got {self.keep_weight}")

    @property
    def is_active(self) -> bool:
        """Return whether the preference can change the order that the objective gives."""
        return self.tolerance > 0 or self.keep is not None


@dataclass(frozen=True)
class Problem:
    """Complete input of a search.

    Attributes:
        global_batch_size: rows (samples) of one iteration (AMP's gbs).
        chooses_format: whether an answer may be in another number format, as `dtype: auto` asks; a search by itself plans in
            the model's.
    """

    cluster: Cluster
    model: Model
    profiles: Profiles
    global_batch_size: int
    limits: Limits = field(default_factory=Limits)
    optimizer: Optimizer = "adam"
    runtime: Runtime = field(default_factory=Runtime)
    preference: Preference = field(default_factory=Preference)
    chooses_format: bool = False

    def __post_init__(self) -> None:
        if self.global_batch_size < 1:
            raise ValueError(f"global_batch_size must be at least 1, got {self.global_batch_size}")
        accelerators = {node.accelerator for node in self.cluster.nodes}
        nodes = {node.name for node in self.cluster.nodes}
        for name in self.limits.use_nodes:
            if name not in nodes:
                raise ValueError(f"unknown node {name}; the cluster has {', '.join(sorted(nodes))}")
        for name in self.limits.spare:
            if name not in nodes | accelerators:
                raise ValueError(
                    f"unknown node or accelerator {name}; the cluster has the nodes {', '.join(sorted(nodes))} and the "
                    f"accelerators {', '.join(sorted(accelerators))}"
                )
        if self.least_rows > self.global_batch_size:
            raise NoFeasiblePlan(
                f"{self.least_rows_words}, but the global batch has {self.global_batch_size}; use a larger one"
            )
        trainer = self.limits.expressible_by
        if trainer is not None and (refusal := training_refusal(trainer, self.model, self.optimizer)):
            raise NoFeasiblePlan(refusal)
        keep, layers = self.preference.keep, len(self.model.layers)
        if keep is not None and keep.model_layers != layers:
            raise ValueError(
                f"the plan to keep is for a model of {keep.model_layers} layers, but this one has {layers}"
            )
        if not self.devices:
            raise ValueError("every device is excluded; exclude fewer nodes or accelerators")

    def __repr__(self) -> str:
        dtype = "an open number format" if self.chooses_format else self.model.dtype
        return f"<Problem {self.model.family.family} in {dtype}: {self.global_batch_size} rows on {self.cluster!r}>"

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes that plans may use, in the cluster's order."""
        return tuple(node.name for node in self.limits.allowed(self.cluster.nodes))

    @cached_property
    def node_numbers(self) -> tuple[int, ...]:
        """Indices of these nodes in the cluster."""
        used = set(self.nodes)
        return tuple(number for number, node in enumerate(self.cluster.nodes) if node.name in used)

    @property
    def accelerators(self) -> tuple[str, ...]:
        """Accelerators of these nodes."""
        return self.cluster.accelerators_of(self.nodes)

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """Devices that plans may use, node by node."""
        used = set(self.nodes)
        return tuple(device for device in self.cluster.devices if device.node in used)

    @property
    def capabilities(self) -> Capabilities | None:
        """Capabilities that the trainer of the limits has for this training; None without that limit."""
        trainer = self.limits.expressible_by
        return None if trainer is None else trainer.of(self.model, self.optimizer)

    @cached_property
    def running_plan(self) -> Plan | None:
        """Plan to keep; given as shorthand, it takes sequence parallelism from the runtime."""
        keep = self.preference.keep
        if keep is None or not self.preference.keep_is_shorthand:
            return keep
        return with_runtime_choices(keep, self.cost_context)

    def is_running(self, plan: Plan) -> bool:
        """Return whether this is the plan to keep, whatever either says of sequence parallelism and number format."""
        keep, context = self.preference.keep, self.cost_context
        if keep is None:
            return False
        plan, keep = plan.in_any_format, keep.in_any_format
        return with_runtime_choices(plan, context) == with_runtime_choices(keep, context)

    def with_nodes(self, nodes: Sequence[str]) -> Problem:
        """Return the problem restricted to these nodes; both share one cost context."""
        restricted = replace(self, limits=replace(self.limits, use_nodes=tuple(nodes)))
        vars(restricted)["cost_context"] = self.cost_context
        return restricted

    def on_accelerator(self, accelerator: str) -> Problem:
        """Return the problem on the nodes of one accelerator alone."""
        return self.with_nodes([name for name in self.nodes if self.cluster.node(name).accelerator == accelerator])

    @cached_property
    def cost_context(self) -> CostContext:
        """Cost context of the problem, in which devices lack the memory that plans must leave free."""
        return CostContext(
            self.model, self._cluster_with_headroom, self.profiles, self.optimizer, self.runtime, self.least_rows
        )

    @property
    def least_rows(self) -> int:
        """Rows that one replica computes at once at least."""
        return least_rows(self.model, self.global_batch_size)

    @property
    def least_rows_words(self) -> str:
        """Reason for `least_rows`, for a refusal."""
        return least_rows_words(self.model, self.global_batch_size)

    @property
    def _cluster_with_headroom(self) -> Cluster:
        free = self.limits.headroom
        if not free:
            return self.cluster
        accelerators = tuple(
            replace(accelerator, memory_bytes=max(math.floor(accelerator.memory_bytes * (1 - free)), 1))
            for accelerator in self.cluster.accelerators
        )
        return replace(self.cluster, accelerators=accelerators)


@dataclass(frozen=True, slots=True)
class Candidate(ShownInNotebooks):
    """Plan with its estimate.

    Attributes:
        price_per_hour: of the nodes that the plan uses, or of its devices, as the cluster is priced; None if an accelerator
            has no price.
        traded: sentence on what a preference gave up for this plan; None if nothing.
        operators: `[stage]` operator shardings that the worker does not run, if the search found more than degrees can express
            (None for a stage that degrees express); `plan` then has the nearest degrees, and `estimate` is that of `plan`.
            Empty if no stage has any; those that the worker runs are in the plan.
        dtype: number format that was chosen for the plan; None where the problem's model names it, or a given plan states it.
        unlimited_seconds: iteration of the best plan found without the limit to one trainer; None without such a limit.
    """

    plan: Plan
    estimate: Estimate
    price_per_hour: float | None = None
    traded: str | None = None
    operators: tuple[SpanSpecs | None, ...] = ()
    dtype: Dtype | None = None
    unlimited_seconds: float | None = None

    def __repr__(self) -> str:
        return f"<Candidate {self.plan.summary()}: {self.estimate.words}>"

    @property
    def price_per_row(self) -> float | None:
        """Price of training on one row (sample)."""
        if self.price_per_hour is None:
            return None
        return price_per_row(self.price_per_hour, self.estimate.iteration_seconds, self.plan.global_batch_size)

    def run_seconds(self, run: TrainingRun) -> float:
        """Return how long a whole run by this plan takes."""
        return run.seconds(self.estimate.iteration_seconds, self.plan.global_batch_size)

    def run_price(self, run: TrainingRun) -> float | None:
        """Return what a whole run by this plan costs; None if an accelerator has no price."""
        return None if self.price_per_hour is None else self.price_per_hour / SECONDS_PER_HOUR * self.run_seconds(run)


@dataclass(frozen=True, slots=True)
class SearchProgress:
    """Progress of a search.

    Attributes:
        best_seconds: minimum iteration seconds so far; None before the first feasible plan.
    """

    done: int
    total: int
    best_seconds: float | None = None


@dataclass(frozen=True)
class SearchControl:
    """Seed, budget and progress reports of a search.

    A search calls `report_progress` after every step. Once it has a feasible plan it also asks `expired`, and returns its
    best so far when that is true: a budget never leaves the result empty.

    Attributes:
        seed: of random searches, which are deterministic for a given seed.
        deadline_seconds: on `clock`; None: no limit.
        report: callback for progress.
        effort: multiple of the usual number of plans that `auto` evaluates.
        max_seconds: iteration seconds above which plans are of no use; a search may leave out those that its own
            cost model says are slower.
        clock: seconds on the clock of the deadline.
        interrupted: set from outside to end the search, as a spent budget does.
        budget_exhausted: set once `expired` was true, so that the search may have left plans out.
    """

    seed: int = 0
    deadline_seconds: float | None = None
    report: Callable[[SearchProgress], None] | None = None
    effort: float = 1.0
    max_seconds: float = math.inf
    clock: Callable[[], float] = field(default=time.monotonic, compare=False, repr=False)
    interrupted: Event = field(default_factory=Event, compare=False, repr=False)
    budget_exhausted: Event = field(default_factory=Event, compare=False, repr=False)

    @classmethod
    def with_budget(
        cls,
        budget_seconds: float | None,
        *,
        seed: int = 0,
        report: Callable[[SearchProgress], None] | None = None,
        effort: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> SearchControl:
        """Return a control whose budget starts now."""
        deadline = None if budget_seconds is None else clock() + budget_seconds
        return cls(seed, deadline, report, effort, clock=clock)

    def part(self, parts: float) -> SearchControl:
        """Return the control of the next of `parts` searches in sequence: one in `parts` of the time that is left.

        What it leaves unspent is the others'. It sets `budget_exhausted` of both.
        """
        deadline = self.deadline_seconds
        if deadline is not None:
            now = self.clock()
            deadline = now + max(deadline - now, 0.0) / parts
        return replace(self, deadline_seconds=deadline)

    def apart(self) -> SearchControl:
        """Return the control of a search whose end says nothing of this one's: same deadline and interruption, an event of its own."""
        return replace(self, budget_exhausted=Event())

    def expired(self) -> bool:
        """Return whether the budget is spent or the search interrupted; it then stops."""
        is_spent = self.deadline_seconds is not None and self.clock() >= self.deadline_seconds
        if not is_spent and not self.interrupted.is_set():
            return False
        self.budget_exhausted.set()
        return True

    def report_progress(self, done: int, total: int, best_seconds: float | None = None) -> None:
        """Call the progress callback, if there is one."""
        if self.report is not None:
            self.report(SearchProgress(done, total, best_seconds))


class Search(Protocol):
    """Search that returns distinct feasible candidates, best first. Raises NoFeasiblePlan if there is none.

    `top` is the number that the caller needs: a search may return more, and may skip plans that cannot be among them.
    """

    def __call__(self, problem: Problem, control: SearchControl, top: int | None) -> list[Candidate]: ...
