"""Time of a plan by part, and where the difference to another plan comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from typing import Final

from rich.console import Group

from trainwright.cost.estimate import Estimate
from trainwright.plan import Plan
from trainwright.report import plan_summary
from trainwright.report.plan_figures import FIGURES, PlanFigures, figure_columns
from trainwright.report.remark import Remark
from trainwright.report.tables import add_row, new_table, origin_words, titled
from trainwright.report.units import SAME, seconds, share
from trainwright.search import Candidate, Problem

PART_WORDS: Final = {
    "compute_seconds": "computation",
    "tensor_sync_seconds": "tensor all-reduces",
    "sharding_seconds": "all-gathers of sharded weights",
    "redistribution_seconds": "redistribution between layers",
    "point_to_point_seconds": "messages between stages",
    "bubble_seconds": "bubbles",
    "gradient_sync_seconds": "gradient reductions",
    "shared_weight_sync_seconds": "reductions of tied weights",
    "update_seconds": "the optimizer's update",
    "constant_seconds": "the runtime's constant",
}
"""Words for the parts of a breakdown, in their order."""
COMMUNICATION: Final = (
    "tensor_sync_seconds",
    "sharding_seconds",
    "redistribution_seconds",
    "point_to_point_seconds",
    "gradient_sync_seconds",
    "shared_weight_sync_seconds",
)
"""Parts that are communication."""
_ROUNDING: Final = 1e-12
"""Share of an iteration below which a part of it is rounding."""
_MIN_SHARE: Final = 0.05
"""Share of the largest part of a difference below which a sentence leaves a part out."""


def breakdown_fields(estimate: Estimate) -> dict[str, float]:
    """Return the seconds of the critical device by part; 0 where only rounding is left of a difference of two ends."""
    least = _ROUNDING * estimate.iteration_seconds
    return {name: spent if abs(spent) > least else 0.0 for name, spent in asdict(estimate.breakdown).items()}


def breakdown_table(estimate: Estimate, plan: Plan, problem: Problem) -> Group:
    """Return the time of the critical device by part, and the figures of the plan."""
    table = new_table([("part", "left"), ("time", "right"), ("share", "right")])
    for name, spent in breakdown_fields(estimate).items():
        add_row(table, _heading(name), seconds(spent), share(spent, estimate.iteration_seconds))
    table.add_section()
    figures = PlanFigures.of(Candidate(plan, estimate), problem)
    for heading, cell in figure_columns(problem):
        add_row(table, heading, cell(figures), "", style="bold" if heading == "iteration" else "")
    title = plan_summary.name(plan) + origin_words(problem)
    caption = f"time: of {estimate.critical_device}, the device that takes longest; {FIGURES}"
    return titled(title, table, caption)


def _heading(part: str) -> str:
    return part.removesuffix("_seconds").replace("_", " ")


@dataclass(frozen=True)
class Difference:
    """Difference of two plans' iterations by part, each of the device that ends last in its plan.

    Attributes:
        own, other: the plans, of one batch; `other` is the one that is compared with.
        other_name: of the other plan, for a sentence: `the heuristic's plan`.
    """

    own: Candidate
    other: Candidate
    other_name: str

    @cached_property
    def own_seconds(self) -> dict[str, float]:
        """Seconds of `own` by field of the breakdown."""
        return breakdown_fields(self.own.estimate)

    @cached_property
    def other_seconds(self) -> dict[str, float]:
        """Seconds of `other` by field of the breakdown."""
        return breakdown_fields(self.other.estimate)

    @cached_property
    def saved_seconds(self) -> dict[str, float]:
        """Seconds that `own` takes less than `other`, by part: below 0 where it takes more, 0 where only rounding is left."""
        least = _ROUNDING * max(self.own.estimate.iteration_seconds, self.other.estimate.iteration_seconds)
        saved = {part: spent - self.own_seconds[part] for part, spent in self.other_seconds.items()}
        return {part: gap if abs(gap) > least else 0.0 for part, gap in saved.items()}

    @property
    def whole_seconds(self) -> float:
        """Seconds that `own` takes less than `other`, to which the parts add up."""
        return self.other.estimate.iteration_seconds - self.own.estimate.iteration_seconds

    @property
    def speedup(self) -> float | None:
        """Speed of `own` over that of `other`; None if it takes no time."""
        own_seconds = self.own.estimate.iteration_seconds
        return self.other.estimate.iteration_seconds / own_seconds if own_seconds > 0 else None

    @property
    def parts(self) -> list[str]:
        """Parts that take time in a plan, the greatest difference first."""
        taken = (part for part, spent in self.own_seconds.items() if spent or self.other_seconds[part])
        return sorted(taken, key=lambda part: -abs(self.saved_seconds[part]))


def ranked_candidates(
    candidates: Sequence[Candidate], difference: Difference | None, other_name: str
) -> list[tuple[str, Candidate]]:
    """Return candidates by rank, then the plan that they are compared with."""
    ranked = [(str(rank), candidate) for rank, candidate in enumerate(candidates, 1)]
    return ranked if difference is None else [*ranked, (other_name, difference.other)]


def why(difference: Difference | None, problem: Problem, *, what: str = "this plan") -> Remark:
    """Return where the difference comes from: the greatest parts, each with what the plans do differently there.

    `what` names the plan of which the sentence speaks. Nothing without a difference.
    """
    if difference is None:
        return Remark()
    whole, other, saved = difference.whole_seconds, difference.other_name, difference.saved_seconds
    fields = {"difference": {"against": other, "saved_seconds": whole, "saved_seconds_by_part": saved}}
    subject = what[0].upper() + what[1:]
    if abs(whole) < SAME * difference.other.estimate.iteration_seconds:
        return Remark((f"{subject} takes as long as {other}.",), fields)
    least = _MIN_SHARE * max(map(abs, saved.values()))
    reasons = _reasons(difference, problem)
    clauses: dict[str, list[str]] = {"less": [], "more": []}
    for part in difference.parts:
        if abs(saved[part]) > least:
            comparative = _comparative(saved[part])
            because = f" ({', '.join(reasons[part])})" if part in reasons else ""
            clauses[comparative].append(f"{seconds(abs(saved[part]))} {comparative} for {PART_WORDS[part]}{because}")
    same, opposite = (clauses["less"], clauses["more"]) if whole > 0 else (clauses["more"], clauses["less"])
    listed = ", ".join(same) + (f", but {', '.join(opposite)}" if opposite else "")
    return Remark((f"{subject} takes {seconds(abs(whole))} {_comparative(whole)} than {other}: {listed}.",), fields)


def _comparative(saved_seconds: float) -> str:
    return "less" if saved_seconds > 0 else "more"


def _reasons(difference: Difference, problem: Problem) -> dict[str, list[str]]:
    """Return, by part, properties in which the plans differ so that the part takes the time that it does."""
    own, other = (_Traits.of(candidate, problem) for candidate in (difference.own, difference.other))
    reasons: dict[str, list[str]] = {}
    for name, (part, words, seconds_grow) in _TRAITS.items():
        now, instead = getattr(own, name), getattr(other, name)
        grows = (now > instead) is seconds_grow
        if now != instead and grows is (difference.saved_seconds[part] < 0):
            reasons.setdefault(part, []).append(f"{words}: {now} in place of {instead}")
    if own.accelerator != other.accelerator:
        place = f"on {own.accelerator} in place of {other.accelerator}"
        reasons.setdefault("compute_seconds", []).append(place)
    return reasons


_TRAITS: Final = {
    "devices": ("compute_seconds", "devices", False),
    "tensor": ("tensor_sync_seconds", "tensor degree", True),
    "node_boundaries": ("point_to_point_seconds", "boundaries between nodes", True),
    "micro_batches": ("bubble_seconds", "micro-batches", False),
    "stages": ("bubble_seconds", "stages", True),
    "replicas": ("gradient_sync_seconds", "replicas", True),
    "tied_nodes": ("shared_weight_sync_seconds", "nodes that hold them", True),
}
"""Part that each property decides, its words, and whether the part takes longer with more of it."""


@dataclass(frozen=True, slots=True)
class _Traits:
    """Properties of a plan that decide the parts of its time.

    Attributes:
        accelerator: of the device that ends last.
        stages, micro_batches: of the deepest pipeline.
        tensor: maximum tensor degree.
        replicas: maximum data degree, over all pipelines.
        tied_nodes: number of nodes that hold tied weights.
        node_boundaries: number of boundaries between stages on different nodes.
    """

    accelerator: str
    devices: int
    stages: int
    micro_batches: int
    tensor: int
    replicas: int
    tied_nodes: int
    node_boundaries: int

    @classmethod
    def of(cls, candidate: Candidate, problem: Problem) -> _Traits:
        plan, model, cluster = candidate.plan, problem.model, problem.cluster
        deepest = max(plan.pipelines, key=lambda pipeline: len(pipeline.stages))
        tensor, data = zip(*(run.strategy.degrees for stage in plan.stages for run in stage.layers), strict=True)
        nodes_by_pipeline = [
            [{device.node for device in stage.devices} for stage in pipeline.stages] for pipeline in plan.pipelines
        ]
        owners = [stage for stage in plan.stages if not {*model.owners}.isdisjoint(range(stage.first, stage.end))]
        return cls(
            accelerator=plan_summary.short_names(cluster)[
                cluster.accelerator_of(candidate.estimate.critical_device).name
            ],
            devices=len(plan.devices),
            stages=len(deepest.stages),
            micro_batches=deepest.micro_batches,
            tensor=max(tensor),
            replicas=max(data) * len(plan.pipelines),
            tied_nodes=len({device.node for stage in owners for device in stage.devices}),
            node_boundaries=sum(first != second for stages in nodes_by_pipeline for first, second in pairwise(stages)),
        )


def difference_table(difference: Difference) -> Group:
    """Return both plans' time by part, and the difference, the greatest first."""
    table = new_table([("part", "left"), ("this plan", "right"), ("other", "right"), ("saved", "right")])
    for part in difference.parts:
        spent, instead = difference.own_seconds[part], difference.other_seconds[part]
        add_row(table, _heading(part), seconds(spent), seconds(instead), _signed(difference.saved_seconds[part]))
    table.add_section()
    whole = (difference.own.estimate.iteration_seconds, difference.other.estimate.iteration_seconds)
    add_row(table, "iteration", *map(seconds, whole), _signed(difference.whole_seconds), style="bold")
    caption = "time of the device that ends last in each plan; its parts add up to the iteration"
    return titled(f"Difference to {difference.other_name}", table, caption)


def _signed(value: float) -> str:
    """Format seconds with a minus sign below 0."""
    return f"−{seconds(-value)}" if value < 0 else seconds(value)
