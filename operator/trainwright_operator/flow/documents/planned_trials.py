"""Document of the planned trials, in order."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Annotated, Any, Final

from trainwright.answer import NodeWorth
from trainwright.bounds import OMITTED_DEFAULT, Bytes, IterationSeconds, Position
from trainwright.cluster import Node
from trainwright.document_kind import document
from trainwright.layer import Dtype
from trainwright.operator_shardings import SpanSpecs
from trainwright.plan import LayerRun, Plan, Stage
from trainwright_operator.api.frameworks import FrameworkSpec

BASELINE_COUNT = 2
"""Number of baselines, of which the better measured one counts: the heuristic's best plan on all devices and the one on the
type of device that is best for it. Where all are of one type they are its best two, as in the AMP paper (section 5)."""


class Role(StrEnum):
    """Origin of a plan."""

    CANDIDATE = "Candidate"
    BASELINE = "Baseline"


GANG_PREFIXES: Final = tuple(role.lower() for role in Role)
"""Beginnings of the names of trials and of their gangs."""


def plan_digest(plan: Plan) -> str:
    """Return a digest that is equal for equal plans, even after later versions add fields to plans."""
    return _digest(plan, _run_fields)


def trial_digest(plan: Plan, dtype: Dtype | None, framework: FrameworkSpec | None) -> str:
    """Return a digest of the plan, of its number format if the search chose it, and of what runs it if not our executor."""
    return _of_trial(plan_digest(plan), dtype, framework)


def _digest(plan: Plan, run_fields: Callable[[LayerRun], list[Any]]) -> str:
    pipelines = [
        [
            pipeline.micro_batches,
            [_stage_fields(stage, run_fields) for stage in pipeline.stages],
        ]
        for pipeline in plan.pipelines
    ]
    return _hash(json.dumps([plan.schedule, pipelines, *([] if plan.dtype is None else [plan.dtype])]))


def _stage_fields(stage: Stage, run_fields: Callable[[LayerRun], list[Any]]) -> list[Any]:
    """Return the devices, the layer runs, and the operators' shardings where the stage has them."""
    fields_of_runs = [list(map(str, stage.devices)), [run_fields(run) for run in stage.layers]]
    return fields_of_runs if stage.operators is None else [*fields_of_runs, _operator_fields(stage.operators)]


def _operator_fields(specs: SpanSpecs) -> dict[str, Any]:
    """Return the shardings layer by layer, as digests have them."""
    operators = {each.layer: [asdict(operator) for operator in each.operators] for each in specs.layers}
    layers = [
        {"layer": layer, "kind": each.kind, "operators": operators[each.layer]} for layer, each in specs.each_layer()
    ]
    return {"mesh_shape": specs.mesh_shape, "layers": layers}


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _of_trial(digest: str, dtype: Dtype | None, framework: FrameworkSpec | None) -> str:
    """Return the digest of a trial from that of its plan."""
    if dtype is not None:
        digest = _hash(f"{digest} {dtype}")
    if framework is not None:
        digest = _hash(f"{digest} {framework.model_dump_json(by_alias=True, exclude_defaults=True)}")
    return digest


def only_accelerator(plan: Plan, nodes: Sequence[Node]) -> str | None:
    """Return the type of the plan's devices; None where they are of several, and where all nodes are of one."""
    type_of = {node.name: node.accelerator for node in nodes}
    used = {type_of[device.node] for device in plan.devices}
    return used.pop() if len(used) == 1 < len(set(type_of.values())) else None


def _former_run_fields(run: LayerRun) -> list[Any]:
    """Return the fields of a layer run that former digests named."""
    chosen = run.strategy
    return [run.first, run.count, *chosen.degrees, run.rows, chosen.order, chosen.sharding, chosen.recompute]


_FORMER_STRATEGY_FIELDS: Final = {"tensor", "data", "order", "sharding", "recompute"}


def _run_fields(run: LayerRun) -> list[Any]:
    """Return the former fields, and by name every later one of the strategy that is not at its default."""
    later = {
        field.name: value
        for field in fields(run.strategy)
        if field.name not in _FORMER_STRATEGY_FIELDS and (value := getattr(run.strategy, field.name)) != field.default
    }
    return [*_former_run_fields(run), *([later] if later else [])]


@dataclass(frozen=True, slots=True)
class PlannedTrial:
    """Plan with its prediction.

    Attributes:
        counts_as_baseline: whether it is also among the heuristic's best.
        rank: rank among the predictions of its role, from 1.
        overall_rank: rank among all predictions, from 1.
        dtype: number format that the search chose; None where the spec names it.
    """

    name: str
    role: Role
    counts_as_baseline: bool
    rank: Position
    overall_rank: Position
    predicted_seconds: IterationSeconds
    predicted_peak_memory_bytes: Bytes
    summary: str
    plan: Plan
    dtype: Dtype | None = None

    def is_run_by(self, plan: Plan, dtype: Dtype) -> bool:
        """Return whether a task with that plan and number format runs this trial."""
        return self.plan == plan and self.dtype in (None, dtype)


def counting_digests(trials: Sequence[PlannedTrial], framework: FrameworkSpec | None) -> dict[str, frozenset[str]]:
    """Return by the trial's name the digests with which a stored result is of its plan.

    Beside its own these are the former digests, which left out sequence parallelism, weights kept gathered, and the number
    format, unless a trial of another plan or format has them too.
    """
    own: dict[str, str] = {}
    former: dict[str, set[str]] = {}
    for trial in trials:
        present, earlier = plan_digest(trial.plan), _digest(trial.plan, _former_run_fields)
        own[trial.name] = _of_trial(present, trial.dtype, framework)
        former[trial.name] = {_of_trial(digest, None, framework) for digest in (present, earlier)}
    owners: dict[str, set[str]] = {}
    for name, digest in own.items():
        for counting in {digest, *former[name]}:
            owners.setdefault(counting, set()).add(digest)
    return {
        name: frozenset({digest, *(earlier for earlier in former[name] if owners[earlier] == {digest})})
        for name, digest in own.items()
    }


@dataclass(frozen=True, slots=True)
class Uncertainty:
    """Uncertainty of the predictions.

    Attributes:
        covariance: `[trial, trial]` of the logarithms of the predicted seconds.
        memory_shares: `[trial]` predicted memory share of the fullest device.
    """

    covariance: tuple[tuple[float, ...], ...]
    memory_shares: tuple[float, ...]


@document("PlannedTrials")
@dataclass(frozen=True, slots=True)
class PlannedTrials:
    """Plans to try.

    Attributes:
        uncertainty: None in documents of former versions: trials then keep their order.
        stopped_by_budget: whether the search ran out of time.
        slow_format: where the number format by name is emulated, and what it costs; empty if it is native.
        without_room: number of plans dropped because one ConfigMap cannot hold them.
        unlimited_seconds: predicted iteration of the best plan found without search.expressibleBy; None without that limit.
        node_worth: of each accelerator; empty where there is but one, and where the budget or the objective left no search for it.
        why: what the best plan takes less or more than the heuristic's, by part: `takes 2 s less than …`; empty without the latter.
    """

    planner: str
    search_seconds: float
    trials: tuple[PlannedTrial, ...]
    uncertainty: Uncertainty | None = None
    stopped_by_budget: bool = False
    without_room: int = 0
    slow_format: str = ""
    unlimited_seconds: Annotated[IterationSeconds | None, OMITTED_DEFAULT] = None
    node_worth: Annotated[tuple[NodeWorth, ...], OMITTED_DEFAULT] = ()
    why: Annotated[str, OMITTED_DEFAULT] = ""

    def __post_init__(self) -> None:
        count, uncertainty = len(self.trials), self.uncertainty
        if not count:
            raise ValueError("trials: there are none; delete the ConfigMap to search anew")
        rows = [*uncertainty.covariance, uncertainty.memory_shares] if uncertainty is not None else []
        if uncertainty is not None and (len(rows) != count + 1 or any(len(row) != count for row in rows)):
            raise ValueError(f"uncertainty: it is not of the {count} trials; delete the ConfigMap to search anew")

    @property
    def best(self) -> PlannedTrial:
        """Return the planner's first candidate."""
        return min(self.trials, key=lambda trial: (trial.role is not Role.CANDIDATE, trial.rank))

    @property
    def unlimited_gain(self) -> float:
        """Return the share of the best candidate's iteration that plans without search.expressibleBy would save."""
        free = self.unlimited_seconds
        return 0.0 if free is None else max(1.0 - free / self.best.predicted_seconds, 0.0)
