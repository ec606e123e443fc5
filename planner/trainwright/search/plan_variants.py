"""Last step of every search: variants of its plans that it does not try, where they fit into memory and are faster."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from trainwright.plan import LayerRun, Plan, Stage
from trainwright.search.candidates import DeviceSymmetry, candidate_if_feasible, fastest_first
from trainwright.search.problem import Candidate, Problem, Search, SearchControl, SearchProgress
from trainwright.strategy import Sharding

MAX_CANDIDATES, MAX_STAGES = 4, 32
"""Candidates that are changed, the best ones, and stages of each that are tried one by one."""

StageNumber = tuple[int, int]
"""(pipeline, stage)."""
RunChange = Callable[[LayerRun], LayerRun]
"""Change of a layer run; returns the run itself where there is nothing to change."""


@dataclass(frozen=True, slots=True)
class VariantSearch:
    """Search whose best candidates are replaced by variants, until the time is over."""

    search: Search
    fastest: Callable[[Candidate, Problem], Candidate]

    def __call__(self, problem: Problem, control: SearchControl, top: int | None) -> list[Candidate]:
        """Return the search's candidates, fastest first. Raises NoFeasiblePlan if it finds none."""
        last = SearchProgress(1, 1)

        def report(progress: SearchProgress) -> None:
            nonlocal last
            last = progress
            control.report_progress(progress.done, progress.total, progress.best_seconds)

        # As many as are changed, so that the first ones do not depend on `top`.
        count = None if top is None else max(top, MAX_CANDIDATES)
        candidates = self.search(problem, replace(control, report=report), count)
        fastest = [
            candidate if control.expired() else self.fastest(candidate, problem)
            for candidate in candidates[:MAX_CANDIDATES]
        ]
        if all(new is old for new, old in zip(fastest, candidates, strict=False)):
            return candidates[:top]
        # Plans that differ in their shardings alone may have become one.
        symmetry = DeviceSymmetry(problem.cluster)
        distinct = {symmetry.canonical_key(candidate.plan): candidate for candidate in fastest}
        candidates = fastest_first([*distinct.values(), *candidates[MAX_CANDIDATES:]])[:top]
        control.report_progress(last.done, last.total, candidates[0].estimate.iteration_seconds)
        return candidates


def fastest_variant(candidate: Candidate, problem: Problem) -> Candidate:
    """Return the candidate without sequence parallelism and with weights that stay gathered, each where it is faster.

    Stages under ZeRO-1 and ZeRO-2 become ZeRO-3 for that, unless the candidate has shardings of operators.
    """
    fastest = with_kept_weights(without_runtime_choices(candidate, problem), problem)
    if candidate.operators or not problem.runtime.keeps_gathered_weights:
        return fastest
    return _changed_where_faster(fastest, _sharded_and_kept, problem)


def with_kept_weights(candidate: Candidate, problem: Problem) -> Candidate:
    """Return the candidate with ZeRO-3 weights that stay gathered in all stages, or in those in which they fit, if faster."""
    return _changed_where_faster(candidate, _kept, problem) if problem.runtime.keeps_gathered_weights else candidate


def without_runtime_choices(candidate: Candidate, problem: Problem) -> Candidate:
    """Return the candidate without sequence parallelism if that is faster: short layer runs gather at their ends."""
    stages = _changed_stages(candidate.plan, _not_sequence_parallel)
    return _faster(candidate, _not_sequence_parallel, stages, problem) if stages else candidate


def gathering_in_every_pass(plan: Plan) -> Plan:
    """Return the plan without weights that stay gathered; it needs the least memory of those variants."""
    return plan.map_stages(lambda stage: _changed_stage(stage, _gathered_in_every_pass))


def _not_sequence_parallel(run: LayerRun) -> LayerRun:
    return run.with_strategy(sequence_parallel=False) if run.strategy.effective.sequence_parallel else run


def _gathered_in_every_pass(run: LayerRun) -> LayerRun:
    return run.with_strategy(keep_gathered_weights=False) if run.strategy.keep_gathered_weights else run


def _kept(run: LayerRun) -> LayerRun:
    gathers = (
        run.strategy.sharding is Sharding.ZERO3 and run.strategy.data > 1 and not run.strategy.keep_gathered_weights
    )
    return run.with_strategy(keep_gathered_weights=True) if gathers else run


def _sharded_and_kept(run: LayerRun) -> LayerRun:
    """Gather weights during the next iteration's first forward, which hides that, not after the update."""
    gathers = run.strategy.sharding in {Sharding.ZERO1, Sharding.ZERO2} and run.strategy.data > 1
    return run.with_strategy(sharding=Sharding.ZERO3, keep_gathered_weights=True) if gathers else run


def _changed_stage(stage: Stage, change: RunChange) -> Stage:
    """Return the stage with its runs changed; those that become alike are one run. Shardings of operators are of their degrees."""
    if stage.operators is not None:
        return stage
    layers: list[LayerRun] = []
    for run in map(change, stage.layers):
        if layers and replace(run, first=layers[-1].first, count=layers[-1].count) == layers[-1]:
            layers[-1] = replace(layers[-1], count=layers[-1].count + run.count)
        else:
            layers.append(run)
    return replace(stage, layers=tuple(layers))


def _changed_stages(plan: Plan, change: RunChange) -> list[StageNumber]:
    """Return the stages that a change changes."""
    return [
        (index, number)
        for index, pipeline in enumerate(plan.pipelines)
        for number, stage in enumerate(pipeline.stages)
        if stage.operators is None and any(change(run) is not run for run in stage.layers)
    ]


def _changed_plan(plan: Plan, change: RunChange, stages: Collection[StageNumber]) -> Plan:
    pipelines = (
        replace(
            pipeline,
            stages=tuple(
                _changed_stage(stage, change) if (index, number) in stages else stage
                for number, stage in enumerate(pipeline.stages)
            ),
        )
        for index, pipeline in enumerate(plan.pipelines)
    )
    return replace(plan, pipelines=tuple(pipelines))


def _changed_where_faster(candidate: Candidate, change: RunChange, problem: Problem) -> Candidate:
    """Return the candidate with all stages changed if that is faster, else with those whose change alone is."""
    stages = _changed_stages(candidate.plan, change)
    best = _faster(candidate, change, stages, problem) if stages else candidate
    if best is candidate and len(stages) > 1:
        for stage in stages[:MAX_STAGES]:
            best = _faster(best, change, [stage], problem)
    return best


def _faster(candidate: Candidate, change: RunChange, stages: Collection[StageNumber], problem: Problem) -> Candidate:
    """Return the candidate with these stages changed if it fits and is faster, else as it is."""
    changed = candidate_if_feasible(problem, _changed_plan(candidate.plan, change, stages))
    if changed is None or changed.estimate.iteration_seconds >= candidate.estimate.iteration_seconds:
        return candidate
    return replace(candidate, plan=changed.plan, estimate=changed.estimate)
