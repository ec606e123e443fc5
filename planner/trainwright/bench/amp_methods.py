"""AMP's tables 3–5: what each method finds, in the three experiments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, pstdev

from trainwright.bench.agreement import inversions, spearman
from trainwright.bench.amp_settings import EXPERIMENTS, amp_problem
from trainwright.bench.assignments import even_blocks, even_parameters
from trainwright.bench.comparison import Comparison, Grid, Record, Tell, number
from trainwright.bench.figures import AmpSetting, Tried, amp_figures
from trainwright.cost.estimate import estimate_in
from trainwright.model import Model
from trainwright.plan import Plan
from trainwright.search import Candidate, NoFeasiblePlan, Problem, run
from trainwright.search.random_search import DRAWS

TOP = 10
HEADINGS = ("method", "paper min", "mean ± σ", "ours min", "mean ± σ", "plans", "our best plan")

Method = Callable[[Problem], Sequence[Candidate]]
Split = Callable[[Model, int], tuple[int, ...] | None]


def _top_of(planner: str, top: int = TOP) -> Method:
    return lambda problem: run(planner, problem, top=top)


def _amp_with(split: Split) -> Method:
    """The best strategy of AMP, its layers assigned anew ("ours w/ uniform", "ours w/ parameter")."""

    def method(problem: Problem) -> Sequence[Candidate]:
        best = run("amp", problem, top=1)[0].plan
        ends = split(problem.model, len(best.pipelines[0].stages))
        if ends is None:
            raise NoFeasiblePlan("there are fewer blocks than stages")
        plan = reassigned(best, ends)
        return [Candidate(plan, estimate_in(plan, problem.setting))]

    return method


def reassigned(plan: Plan, ends: Sequence[int]) -> Plan:
    """A plan of one layer run a stage, with other ends of its stages."""
    pipeline = plan.pipelines[0]
    stages = tuple(
        replace(stage, layers=(replace(stage.layers[0], first=first, count=end - first),))
        for stage, first, end in zip(pipeline.stages, (0, *ends), ends, strict=False)
    )
    return replace(plan, pipelines=(replace(pipeline, stages=stages),))


METHODS: Mapping[str, Method] = {
    "Megatron": _top_of("megatron"),
    "RS": _top_of("random", DRAWS),
    "AMP": _top_of("amp"),
    "SA": _top_of("amp-annealing"),
    "ours w/ parameter": _amp_with(even_parameters),
    "ours w/ uniform": _amp_with(even_blocks),
}
"""By the names that the paper's tables give them."""

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
"""Why a pair of methods may stand the other way round."""


@dataclass(frozen=True)
class _Outcome:
    method: str
    published: Tried
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
            number(self.published.least),
            f"{self.published.mean:.2f} ± {self.published.spread:.2f}",
            number(min(self.seconds)),
            f"{fmean(self.seconds):.2f} ± {self.spread:.2f}",
            str(len(self.seconds)),
            self.best_plan.partition(" [")[0],
        )


def methods(setting: AmpSetting, table: str, tell: Tell) -> Comparison:
    """One of the tables 3–5, by its setting."""
    problem, title = amp_problem(setting), EXPERIMENTS[setting].title
    outcomes = []
    figures = amp_figures().methods[setting]
    for done, (method, published) in enumerate(figures.items()):
        tell(f"{title}: {method}", done / len(figures))
        outcomes.append(_outcome(method, published, problem))
    least = [outcome.published.least for outcome in outcomes], [min(outcome.seconds) for outcome in outcomes]
    mean = [outcome.published.mean for outcome in outcomes], [fmean(outcome.seconds) for outcome in outcomes]
    names = [outcome.method for outcome in outcomes]
    return Comparison(
        name=f"amp-{table}",
        title=f"AMP, table {table}: seconds of an iteration",
        records=tuple(outcome.record() for outcome in outcomes),
        grids=(Grid(title, HEADINGS, tuple(outcome.cells() for outcome in outcomes)),),
        agreement={"spearman_least": spearman(*least), "spearman_mean": spearman(*mean)},
        notes=(
            f"Spearman's ρ of the methods: {number(spearman(*least))} by their best plan, {number(spearman(*mean))} by the mean.",
            *(_differs(a, b) for a, b in inversions(names, *least)),
        ),
    )


def _outcome(method: str, published: Tried, problem: Problem) -> _Outcome:
    found = METHODS[method](problem)
    seconds = tuple(candidate.estimate.iteration_seconds for candidate in found)
    best = min(found, key=lambda candidate: candidate.estimate.iteration_seconds)
    return _Outcome(method, published, seconds, best.plan.summary())


def _differs(better: str, worse: str) -> str:
    reason = REASONS.get(frozenset({better, worse}), "the data sheets' times differ from the measured ones")
    return f"The paper's best of {better} is faster than that of {worse}; ours is not: {reason}."
