"""AMP's tables 3–5: the plans that each method finds in the three experiments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, pstdev

from trainwright.cost.estimate import estimate_with_context
from trainwright.model import Model
from trainwright.plan import Plan
from trainwright.search import Candidate, NoFeasiblePlan, Problem, run
from trainwright.search.random_search import DRAWS
from trainwright_papers.amp_settings import EXPERIMENTS, amp_problem, split_blocks_evenly, split_parameters_evenly
from trainwright_papers.comparison import (
    Comparison,
    Grid,
    Record,
    ReportProgress,
    format_figure,
    inverted_pairs,
    spearman,
)
from trainwright_papers.published import AmpSetting, MethodSeconds, amp_figures

PLANS_PER_METHOD = 10
HEADINGS = ("method", "paper min", "mean ± σ", "ours min", "mean ± σ", "plans", "our best plan")

Method = Callable[[Problem], Sequence[Candidate]]
LayerSplit = Callable[[Model, int], tuple[int, ...] | None]


def _best_plans_of(planner: str, top: int = PLANS_PER_METHOD) -> Method:
    return lambda problem: run(planner, problem, top=top)


def _amp_with(split: LayerSplit) -> Method:
    """Return a method that reassigns the layers of AMP's best plan ("ours w/ uniform", "ours w/ parameter")."""

    def method(problem: Problem) -> Sequence[Candidate]:
        best = run("amp", problem, top=1)[0].plan
        stage_ends = split(problem.model, len(best.pipelines[0].stages))
        if stage_ends is None:
            raise NoFeasiblePlan("there are fewer blocks than stages")
        plan = with_stage_ends(best, stage_ends)
        return [Candidate(plan, estimate_with_context(plan, problem.cost_context))]

    return method


def with_stage_ends(plan: Plan, stage_ends: Sequence[int]) -> Plan:
    """Return the plan, which has one layer run per stage, with other stage ends."""
    pipeline = plan.pipelines[0]
    stages = tuple(
        replace(stage, layers=(replace(stage.layers[0], first=first, count=end - first),))
        for stage, first, end in zip(pipeline.stages, (0, *stage_ends), stage_ends, strict=False)
    )
    return replace(plan, pipelines=(replace(pipeline, stages=stages),))


METHODS: Mapping[str, Method] = {
    "Megatron": _best_plans_of("megatron"),
    "RS": _best_plans_of("random", DRAWS),
    "AMP": _best_plans_of("amp"),
    "SA": _best_plans_of("amp-annealing"),
    "ours w/ parameter": _amp_with(split_parameters_evenly),
    "ours w/ uniform": _amp_with(split_blocks_evenly),
}
"""Methods by their names in the paper's tables."""

REASONS: Mapping[frozenset[str], str] = {
    frozenset({"SA", "AMP"}): "our annealing corrects the printed algorithm (uniform draws, the neighbour's own "
    "assignment) and costs what it accepted exactly in the end, so that it comes about as far",
    frozenset({"AMP", "Megatron"}): "what the measured plans take longer than ours falls with the pipeline degree (see "
    "amp-trials), so that ours has the plan without a pipeline, which both methods find, before AMP's four stages",
    frozenset({"SA", "Megatron"}): "our annealing corrects the printed algorithm, and starts from Megatron's placement",
    frozenset({"RS", "Megatron"}): "our random draws are only of plans that fit, and the best of 50 is a good plan",
    frozenset({"SA", "RS"}): "both are random walks over few tries",
    frozenset({"Megatron", "ours w/ parameter"}): "the assignment by parameters puts nearly all narrow blocks, which "
    "hold few parameters and take most time, on few devices; how long these take depends on the data sheet alone",
    frozenset({"Megatron", "ours w/ uniform"}): "the best degrees differ from the paper's",
    frozenset({"ours w/ uniform", "ours w/ parameter"}): "the best degrees differ from the paper's",
    frozenset({"AMP", "ours w/ uniform"}): "AMP minimises its Eq. 5, which is not the exact replay: another assignment "
    "can be replayed faster",
}
"""Reasons why the predicted order of a pair of methods may differ from the published one."""


@dataclass(frozen=True)
class _MethodResult:
    method: str
    published: MethodSeconds
    seconds: tuple[float, ...]
    best_plan: str

    @property
    def spread(self) -> float:
        return pstdev(self.seconds)

    def record(self) -> Record:
        return {
            "method": self.method,
            "published_least_seconds": self.published.least,
            "published_mean_seconds": self.published.mean,
            "published_spread_seconds": self.published.spread,
            "predicted_least_seconds": min(self.seconds),
            "predicted_mean_seconds": fmean(self.seconds),
            "predicted_spread_seconds": self.spread,
            "plans": len(self.seconds),
            "best_plan": self.best_plan,
        }

    def cells(self) -> tuple[str, ...]:
        return (
            self.method,
            format_figure(self.published.least),
            f"{self.published.mean:.2f} ± {self.published.spread:.2f}",
            format_figure(min(self.seconds)),
            f"{fmean(self.seconds):.2f} ± {self.spread:.2f}",
            str(len(self.seconds)),
            self.best_plan.partition(" [")[0],
        )


def methods_table(setting: AmpSetting, table: str, report_progress: ReportProgress) -> Comparison:
    """Rebuild one of the tables 3–5."""
    problem, title = amp_problem(setting), EXPERIMENTS[setting].title
    results = []
    figures = amp_figures().methods[setting]
    for finished, (method, published) in enumerate(figures.items()):
        report_progress(f"{title}: {method}", finished / len(figures))
        results.append(_run_method(method, published, problem))
    least = [result.published.least for result in results], [min(result.seconds) for result in results]
    mean = [result.published.mean for result in results], [fmean(result.seconds) for result in results]
    names = [result.method for result in results]
    return Comparison(
        name=f"amp-{table}",
        title=f"AMP, table {table}: seconds of an iteration",
        records=tuple(result.record() for result in results),
        grids=(Grid(title, HEADINGS, tuple(result.cells() for result in results)),),
        agreement={"spearman_least": spearman(*least), "spearman_mean": spearman(*mean)},
        notes=(
            f"Spearman's ρ of the methods: {format_figure(spearman(*least))} by their best plan, {format_figure(spearman(*mean))} by the mean.",
            *(_describe_inversion(a, b) for a, b in inverted_pairs(names, *least)),
        ),
    )


def _run_method(method: str, published: MethodSeconds, problem: Problem) -> _MethodResult:
    found = METHODS[method](problem)
    seconds = tuple(candidate.estimate.iteration_seconds for candidate in found)
    best = min(found, key=lambda candidate: candidate.estimate.iteration_seconds)
    return _MethodResult(method, published, seconds, best.plan.summary())


def _describe_inversion(better: str, worse: str) -> str:
    reason = REASONS.get(frozenset({better, worse}), "the data sheets' times differ from the measured ones")
    return f"The paper's best of {better} is faster than that of {worse}; ours is not: {reason}."
