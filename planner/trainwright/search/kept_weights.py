"""Last step of every search: ZeRO-3 keeps gathered weights for later passes where memory allows and that is faster."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from trainwright.plan import LayerRun, Plan, Sharding, Stage
from trainwright.search.candidates import fastest_first, fitting_candidate
from trainwright.search.problem import Candidate, Problem, Search, SearchControl, SearchProgress

MAX_CANDIDATES, MAX_STAGES = 8, 32
"""Candidates that are changed, the best ones, and stages of each that are tried one by one."""

StageNumber = tuple[int, int]
"""(pipeline, stage)."""


@dataclass(frozen=True, slots=True)
class KeepingSearch:
    """Search whose plans keep gathered weights where the runtime can, memory allows, and the estimate is lower."""

    search: Search

    def __call__(self, problem: Problem, control: SearchControl, top: int | None) -> list[Candidate]:
        """Return the search's candidates, fastest first. Raises NoFeasiblePlan if it finds none."""
        last = SearchProgress(1, 1)

        def report(progress: SearchProgress) -> None:
            nonlocal last
            last = progress
            control.report_progress(progress.done, progress.total, progress.best_seconds)

        found = self.search(problem, replace(control, report=report), top)
        kept = [with_kept_weights(candidate, problem) for candidate in found[:MAX_CANDIDATES]]
        if all(new is old for new, old in zip(kept, found, strict=False)):
            return found
        found = fastest_first([*kept, *found[MAX_CANDIDATES:]])
        control.report_progress(last.done, last.total, found[0].estimate.iteration_seconds)
        return found


def with_kept_weights(candidate: Candidate, problem: Problem) -> Candidate:
    """Return the candidate with weights that stay gathered in all stages, or in those in which they fit, if that is faster."""
    stages = [
        (index, number)
        for index, pipeline in enumerate(candidate.plan.pipelines)
        for number, stage in enumerate(pipeline.stages)
        if any(map(_gathers, stage.layers))
    ]
    if not (problem.runtime.keeps_gathered_weights and stages):
        return candidate
    best = _faster(candidate, stages, problem)
    if best is candidate and len(stages) > 1:
        for stage in stages[:MAX_STAGES]:
            best = _faster(best, [stage], problem)
    return best


def keeping(plan: Plan, stages: Collection[StageNumber]) -> Plan:
    """Return the plan with weights that stay gathered in these stages."""
    pipelines = (
        replace(
            pipeline,
            stages=tuple(
                _keeping_stage(stage) if (index, number) in stages else stage
                for number, stage in enumerate(pipeline.stages)
            ),
        )
        for index, pipeline in enumerate(plan.pipelines)
    )
    return replace(plan, pipelines=tuple(pipelines))


def _keeping_stage(stage: Stage) -> Stage:
    runs = (replace(run, keep_gathered_weights=True) if _gathers(run) else run for run in stage.layers)
    return replace(stage, layers=tuple(runs))


def _gathers(run: LayerRun) -> bool:
    """Return whether a run's weights are gathered for every pass."""
    return run.sharding is Sharding.ZERO3 and run.data > 1 and not run.keep_gathered_weights


def _faster(candidate: Candidate, stages: Collection[StageNumber], problem: Problem) -> Candidate:
    """Return the candidate with weights kept in these stages if it fits and is faster, else as it is."""
    found = fitting_candidate(problem, keeping(candidate.plan, stages))
    if found is None or found.estimate.iteration_seconds >= candidate.estimate.iteration_seconds:
        return candidate
    return replace(candidate, plan=found.plan, estimate=found.estimate)
