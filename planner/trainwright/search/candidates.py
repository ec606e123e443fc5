"""Candidates from lazily evaluated plans in the order of their bounds; what makes plans equal, and what gives them one shape."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Final

from trainwright.cluster import Cluster, price_per_hour
from trainwright.cost.estimate import Estimate, estimate_if_feasible, estimate_with_context
from trainwright.cost.network import node_classes
from trainwright.error_bands import MEAN_MEASURED_ERROR, ErrorBand, error_band, generation_of, plan_kind
from trainwright.families import Custom
from trainwright.plan import Pipeline, Plan, Stage
from trainwright.runtime import OwnTrials
from trainwright.search.plan_defaults import with_runtime_choices
from trainwright.search.problem import Candidate, Problem, SearchControl
from trainwright.strategy import Sharding

_NODE = attrgetter("node")


class DeviceSymmetry:
    """Symmetry of a cluster's devices: interchangeable nodes, and the slots of each node."""

    def __init__(self, cluster: Cluster) -> None:
        self._class_of = dict(zip((node.name for node in cluster.nodes), node_classes(cluster), strict=True))

    def canonical_key(self, plan: Plan) -> Hashable:
        """Return a key that two plans share exactly if permuting interchangeable nodes and slots makes them equal.

        Nodes of one class (`node_classes`) are numbered by their first rank in the plan, and so are a node's slots.
        """
        nodes_met_of_class: dict[int, int] = {}
        nodes: dict[str, tuple[int, int]] = {}
        roles = []
        for name, devices in groupby(map(_NODE, plan.devices)):
            if name not in nodes:
                number = self._class_of[name]
                nodes[name] = number, nodes_met_of_class.get(number, 0)
                nodes_met_of_class[number] = nodes_met_of_class.get(number, 0) + 1
            # Slots are numbered in this order, so the number of consecutive devices determines them.
            roles.append((nodes[name], len(list(devices))))
        shapes = tuple(
            (
                pipeline.micro_batches,
                pipeline.micro_batch_size,
                tuple((len(stage.devices), stage.layers, stage.operators) for stage in pipeline.stages),
            )
            for pipeline in plan.pipelines
        )
        return plan.schedule, shapes, tuple(roles)


_ROUNDING = 2e-9
"""Relative tolerance of bounds for rounding."""


@dataclass(frozen=True)
class LazyCandidate:
    """Plan that is not built yet, with a lower bound on its iteration.

    Attributes:
        build_plan: called only if the plan is evaluated, since plans of thousands of devices are slow to build.
        choice: key of alternatives, of which only the best becomes a candidate; None: no alternatives.
    """

    bound_seconds: float
    build_plan: Callable[[], Plan]
    choice: Hashable = None


def candidate_of(problem: Problem, plan: Plan) -> Candidate:
    """Return the plan with its estimate and its price."""
    return _with_price(problem, plan, estimate_with_context(plan, problem.cost_context))


def fitting_candidate(problem: Problem, plan: Plan) -> Candidate | None:
    """Return the candidate of a plan that a search made; return None, without a replay, if it does not fit into memory.

    Its layer runs are sequence parallel as the runtime has it.
    """
    return candidate_if_feasible(problem, with_runtime_choices(plan, problem.cost_context))


def candidate_if_feasible(problem: Problem, plan: Plan) -> Candidate | None:
    """Return the candidate of a plan as it is; return None, without a replay, if it does not fit into memory."""
    estimate = estimate_if_feasible(plan, problem.cost_context)
    return None if estimate is None else _with_price(problem, plan, estimate)


def _with_price(problem: Problem, plan: Plan, estimate: Estimate) -> Candidate:
    return Candidate(plan, estimate, price_per_hour(problem.cluster, plan.devices))


def fastest_first(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Sort candidates by iteration seconds, then by peak memory."""
    return sorted(candidates, key=lambda c: (c.estimate.iteration_seconds, c.estimate.peak_memory_bytes))


def best_of(  # noqa: PLR0913 - a search's arguments and how far it is
    problem: Problem,
    lazy_candidates: Sequence[LazyCandidate],
    control: SearchControl,
    top: int | None,
    *,
    steps_before: int = 0,
    steps_after: int = 0,
) -> list[Candidate]:
    """Return the `top` best distinct feasible candidates (all if `top` is None), best first.

    Plans are evaluated in the order of their bounds until no other can be among the best, so the result is the same as if all
    had been evaluated. Once the budget is spent the others are left out, but not before a feasible one is found.
    `steps_before` and `steps_after` are the search's other steps, for its progress.
    """
    return _BoundOrderedEvaluation(problem, control, top).run(
        lazy_candidates, steps_before, steps_before + len(lazy_candidates) + steps_after
    )


class _BoundOrderedEvaluation:
    def __init__(self, problem: Problem, control: SearchControl, top: int | None) -> None:
        self.problem, self.control, self.top = problem, control, top
        self.fastest: dict[Hashable, Candidate] = {}
        self.symmetry = DeviceSymmetry(problem.cluster)
        self.seen: set[Hashable] = set()

    def run(self, lazy_candidates: Sequence[LazyCandidate], done: int, total: int) -> list[Candidate]:
        end, cutoff, best = done + len(lazy_candidates), math.inf, None
        for number in sorted(
            range(len(lazy_candidates)), key=lambda number: (lazy_candidates[number].bound_seconds, number)
        ):
            lazy_candidate = lazy_candidates[number]
            if self.fastest and (lazy_candidate.bound_seconds > cutoff or self.control.expired()):
                break
            done += 1
            choice = number if lazy_candidate.choice is None else (lazy_candidate.choice,)
            if not self._may_be_better(lazy_candidate, choice):
                continue
            self._evaluate(lazy_candidate.build_plan(), choice)
            seconds = sorted(candidate.estimate.iteration_seconds for candidate in self.fastest.values())
            cutoff = seconds[self.top - 1] if self.top is not None and len(seconds) >= self.top else math.inf
            best = seconds[0] if seconds else None
            self.control.report_progress(done, total, best)
        if total:
            self.control.report_progress(end, total, best)
        return fastest_first(self.fastest.values())

    def _may_be_better(self, lazy_candidate: LazyCandidate, choice: Hashable) -> bool:
        """Return whether the candidate may beat the incumbent of its choice by more than rounding."""
        incumbent = self.fastest.get(choice)
        return incumbent is None or lazy_candidate.bound_seconds < incumbent.estimate.iteration_seconds * (
            1 - _ROUNDING
        )

    def _evaluate(self, plan: Plan, choice: Hashable) -> None:
        plan = with_runtime_choices(plan, self.problem.cost_context)
        key = self.symmetry.canonical_key(plan)
        if key in self.seen:
            return
        self.seen.add(key)
        candidate = fitting_candidate(self.problem, plan)
        if candidate is not None:
            incumbent = self.fastest.get(choice)
            self.fastest[choice] = candidate if incumbent is None else fastest_first([incumbent, candidate])[0]


_STRENGTH = tuple(Sharding)
"""Shardings, the one that shards most last."""


def plan_shape(plan: Plan) -> Hashable:
    """Return a key that is equal for plans whose iteration times are practically equal.

    It holds the schedule, the micro-batches, how many stages have which degrees and algorithms of operators, the strongest
    sharding, and whether anything is recomputed. Left out are the order of the stages and of the degrees in a stage, their layers
    and devices, the rows by replica, and how many layers are sharded or recomputed.
    """
    return _shape_without_savings(plan), tuple(map(_savings, plan.pipelines))


def _shape_without_savings(plan: Plan) -> Hashable:
    return plan.schedule, tuple(
        (pipeline.micro_batches, pipeline.micro_batch_size, tuple(sorted(map(_degrees, pipeline.stages))))
        for pipeline in plan.pipelines
    )


def _savings(pipeline: Pipeline) -> tuple[Sharding, bool]:
    runs = [run for stage in pipeline.stages for run in stage.layers]
    return max((run.strategy.sharding for run in runs), key=_STRENGTH.index), any(
        run.strategy.recompute for run in runs
    )


def _degrees(stage: Stage) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[str, ...], ...]]:
    """Return a stage's degrees, and by layer the algorithms of its operators where it has their shardings."""
    specs = stage.operators
    algorithms = () if specs is None else {tuple(each.algorithm for each in layer.operators) for layer in specs.layers}
    return tuple(sorted({run.strategy.degrees for run in stage.layers})), tuple(sorted(algorithms))


def drop_equivalent(candidates: Iterable[Candidate], tolerance: float) -> list[Candidate]:
    """Return the candidates in their order, without those of which an equivalent one stays.

    Equivalent are two candidates of one number format

    - of one shape (`plan_shape`), whose iterations differ by at most `tolerance`, a share: the first one stays, the best by
      objective and preference;
    - of one shape but for sharding and recompute, where one takes at least the time and the memory of the other, and at
      most `tolerance` more time: the other one stays, also where it comes later and the times are equal.

    A trial of a second one teaches little, and the trial of another shape may teach much. The first candidate always stays,
    and no plan is dropped that is faster than all that stay by more than `tolerance`.
    """
    kept: list[Candidate] = []
    seconds_of_shape: dict[Hashable, list[float]] = defaultdict(list)
    of_other_savings: dict[Hashable, list[Candidate]] = defaultdict(list)
    for candidate in candidates:
        seconds = candidate.estimate.iteration_seconds
        of_shape = seconds_of_shape[candidate.dtype, plan_shape(candidate.plan)]
        others = of_other_savings[candidate.dtype, _shape_without_savings(candidate.plan)]
        if any(abs(seconds - other) <= tolerance * min(seconds, other) for other in of_shape) or any(
            _saves_nothing(candidate, other, tolerance) for other in others
        ):
            continue
        beaten = {id(other) for other in others if _saves_nothing(other, candidate, 0.0)}
        kept = [member for member in kept if member is kept[0] or id(member) not in beaten]
        of_shape.append(seconds)
        others.append(candidate)
        kept.append(candidate)
    return kept


def _saves_nothing(candidate: Candidate, other: Candidate, tolerance: float) -> bool:
    """Return whether a candidate takes no less time and memory than another, and at most `tolerance` more time."""
    own_estimate, other_estimate = candidate.estimate, other.estimate
    more = own_estimate.iteration_seconds / other_estimate.iteration_seconds - 1
    return own_estimate.peak_memory_bytes >= other_estimate.peak_memory_bytes and -_ROUNDING <= more <= max(
        tolerance, _ROUNDING
    )


def with_both_shardings(candidates: Sequence[Candidate], count: int) -> list[Candidate]:
    """Return the first `count` candidates in their order; the last of several gives place to a plan of another sort than all.

    The two sorts are plans of degrees alone and plans with shardings of operators. Trials of one do not tell what the other takes.
    """
    first, rest = list(candidates[:count]), candidates[count:]
    sorts = {candidate.plan.has_operators for candidate in first}
    if count > 1 and len(sorts) == 1:
        first[-1] = next((other for other in rest if other.plan.has_operators not in sorts), first[-1])
    return first


_MEASURED_BAND: Final = 4 * MEAN_MEASURED_ERROR
"""Share by which a plan may be slower and still be the faster one, with measured profiles."""


def with_other_kinds(candidates: Sequence[Candidate], count: int, problem: Problem) -> list[Candidate]:
    """Return the first `count` candidates in their order, where plans of other kinds (`plan_kind`) may take half of the places.

    Estimates of one kind err together, so trials of the first kind alone do not tell whether another one is faster. The best
    plans of other kinds come in, as far as they are within the band of the estimates' error of the first.
    """
    first = candidates[0]
    band = band_of_estimates(first, problem)
    if band is None and is_without_published_runs(problem):
        band = error_band(None, [None])
    share = _MEASURED_BAND if band is None else band.greatest_ratio - 1
    most = first.estimate.iteration_seconds * (1 + share)
    leaders: dict[str, Candidate] = {}
    for candidate in candidates:
        if candidate.estimate.iteration_seconds <= most:
            leaders.setdefault(plan_kind(candidate.plan), candidate)
    others = [leader for leader in leaders.values() if leader is not leaders[plan_kind(first.plan)]][: count // 2]
    rest = [each for each in candidates if not any(each is other for other in others)][: count - len(others)]
    chosen = {id(member) for member in (*others, *rest)}
    return [each for each in candidates if id(each) in chosen]


def band_of_estimates(candidate: Candidate, problem: Problem) -> ErrorBand | None:
    """Return the error band of a candidate whose profiles come from data sheets, narrower where trials calibrated the runtime.

    None for measured and emulated ones, and for a user's own model, which no published run trained.
    """
    band = published_band(candidate, problem)
    own = own_trials(problem)
    return band if band is None or own is None else band.narrowed(own)


def published_band(candidate: Candidate, problem: Problem) -> ErrorBand | None:
    """Return the error band of published runs like a candidate, whether or not trials calibrated the runtime."""
    if not _is_from_data_sheets(problem) or is_without_published_runs(problem):
        return None
    accelerators = problem.cluster.accelerators_of(candidate.plan.nodes)
    return error_band(problem.runtime.trainer, {generation_of(name) for name in accelerators})


def own_trials(problem: Problem) -> OwnTrials | None:
    """Return the trials that calibrated the runtime; None without any.

    A calibrated runtime has compute ratios. One that does not state its trials was fitted to at least one.
    """
    runtime = problem.runtime
    return runtime.own_trials or (OwnTrials(1) if runtime.compute_ratios else None)


def is_without_published_runs(problem: Problem) -> bool:
    """Return whether profiles come from data sheets, and no published run tells their error: of a user's own model."""
    return _is_from_data_sheets(problem) and isinstance(problem.model.family, Custom)


def _is_from_data_sheets(problem: Problem) -> bool:
    return problem.profiles.origin == "estimated" and not problem.cluster.is_emulated
