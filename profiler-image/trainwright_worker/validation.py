"""Validation of tasks before a worker starts: contradictions, and what the executor does not support.

Nothing here imports torch, so a refusal costs no start-up.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trainwright import documents
from trainwright.cluster import EMULATED_PREFIX
from trainwright.families import Custom
from trainwright.model import Model, least_rows, least_rows_words
from trainwright.plan import Plan
from trainwright.strategy import Strategy
from trainwright.worker_api import FailureReason, Gang, LinkTask, ProfilingTask, TrialSeriesTask, TrialTask, WorkerTask
from trainwright.worker_api.operator_support import operators_refusal
from trainwright_worker.gang.errors import WorkerError
from trainwright_worker.gang.rank_assignment import gang_devices
from trainwright_worker.layers.registry import supported_families


def read_task(path: Path) -> WorkerTask:
    """Return the validated task. Raises WorkerError if it is unreadable or invalid."""
    try:
        task: WorkerTask = documents.loads(path.read_text(encoding="utf-8"), WorkerTask, source=str(path))
    except (OSError, ValueError) as error:
        raise WorkerError(FailureReason.ORDER_INVALID, str(error)) from error
    check_task(task)
    return task


def check_task(task: WorkerTask) -> None:
    """Raise WorkerError with the first problem, in one sentence."""
    for problem in _task_problems(task):
        raise WorkerError(FailureReason.ORDER_INVALID, problem)


def _task_problems(task: WorkerTask) -> Iterator[str]:
    yield from _gang_problems(task.gang)
    if isinstance(task, LinkTask):
        yield from _links_problems(task)
        return
    yield from _model_problems(task.model)
    if task.iterations < 1 or task.warmup_iterations < 0:
        yield (
            f"iterations must be at least 1 and warmup_iterations at least 0, got {task.iterations} and "
            f"{task.warmup_iterations}"
        )
    match task:
        case ProfilingTask():
            yield from _profile_problems(task)
        case TrialTask():
            yield from _trial_problems(task)
        case TrialSeriesTask():
            yield from _series_problems(task)


def _gang_problems(gang: Gang) -> Iterator[str]:
    names = [node.name for node in gang.nodes]
    if not names or len(set(names)) < len(names):
        yield f"gang.nodes must name at least one node, and each once, got {', '.join(names) or 'none'}"
    if gang.collective_timeout_seconds <= 0 or gang.deadline_seconds <= 0:
        yield "gang.collective_timeout_seconds and gang.deadline_seconds must be above 0"
    for node in gang.nodes:
        emulated = node.accelerator.startswith(EMULATED_PREFIX)
        if emulated and gang.backend == "nccl":
            yield f"node {node.name}: {node.accelerator} is emulated, but backend nccl means a real GPU; use gloo"
        if emulated != (gang.emulation_of(node.accelerator) is not None):
            problem = "needs a device table" if emulated else "is real and must have no device table"
            yield f"node {node.name}: accelerator {node.accelerator} {problem} in gang.emulations"


def _links_problems(task: LinkTask) -> Iterator[str]:
    sizes = task.message_bytes
    if len(sizes) < 3 or min(sizes) < 1 or list(sizes) != sorted(set(sizes)):
        yield f"message_bytes must be three ascending sizes or more, got {list(sizes)}"
    collective_sizes = task.collective_bytes
    if collective_sizes and (
        min(collective_sizes) < 1
        or list(collective_sizes) != sorted(set(collective_sizes))
        or task.collective_seconds <= 0
    ):
        yield (
            f"collective_bytes must be ascending sizes and collective_seconds above 0, got {list(collective_sizes)} and "
            f"{task.collective_seconds}"
        )
    if task.repeats < 1:
        yield f"repeats must be at least 1, got {task.repeats}"
    yield from _pairs_problems(task)


def _pairs_problems(task: LinkTask) -> Iterator[str]:
    names = {node.name for node in task.gang.nodes}
    seen: set[frozenset[str]] = set()
    for pair in task.pairs or ():
        if frozenset(pair) in seen or len(set(pair)) < 2 or not names.issuperset(pair):
            yield f"pairs must each name two nodes of the gang, and each two once, got {pair[0]} and {pair[1]}"
        seen.add(frozenset(pair))
    if all(len(node.slots) < 2 for node in task.gang.nodes) and (len(names) < 2 or task.pairs == ()):
        yield "there is no link to measure: no pair of nodes, and no node with two slots"


def _model_problems(model: Model) -> Iterator[str]:
    family = model.family.family
    if family not in supported_families():
        yield f"model.family {family} cannot be run: this worker has layers of {', '.join(supported_families())}; take one of them"
    if getattr(model.family, "dropout", False):
        yield f"{family}.dropout cannot be run: this worker's layers drop nothing; leave it out"
    if not getattr(model.family, "fused_gelu", True):
        yield f"{family}.fused_gelu cannot be false: this worker's GELU is one kernel; leave it out"
    if Model.of(model.family, model.dtype) != model:
        yield f"the model's layers are not those that family {family} builds; build it from its family"


def _profile_problems(task: ProfilingTask) -> Iterator[str]:
    if len(gang_devices(task.gang)) > 1 and not task.gang.is_on_cpu:
        yield f"layers are measured on one device, but the gang has {len(gang_devices(task.gang))}; ask for one slot"
    if not task.rows or min(task.rows) < 1:
        yield f"rows must name one row count or more, each at least 1, got {list(task.rows)}"
    elif problem := _rows_problem(task.model, min(task.rows)):
        yield problem
    if task.target_uncertainty < 0 or task.seconds_per_layer < 0:
        yield "target_uncertainty and seconds_per_layer must be at least 0"
    if unknown := set(task.kinds) - {kind.name for kind in task.model.kinds}:
        yield f"kinds must name layer kinds of the model, got {min(unknown)}"
    if task.tensor_degree < 1:
        yield f"tensor_degree must be at least 1, got {task.tensor_degree}"
    elif problem := _degree_problem(task.model, Strategy(task.tensor_degree, 1)):
        yield problem


def _check_problems(task: TrialTask | TrialSeriesTask) -> Iterator[str]:
    kinds = {kind.name for kind in task.model.kinds}
    for check in task.checks:
        if check.kind not in kinds or check.rows < 1:
            yield f"checks must name layer kinds of the model and at least one row, got {check.kind} and {check.rows}"
        elif problem := _rows_problem(task.model, check.rows):
            yield problem


def _trial_problems(task: TrialTask) -> Iterator[str]:
    planned, available = set(task.plan.devices), set(gang_devices(task.gang))
    if planned != available:
        mismatched = min(planned ^ available)
        where = "in the plan, but not in the gang" if mismatched in planned else "in the gang, but not in the plan"
        yield f"device {mismatched} is {where}; a trial's gang holds exactly the plan's devices"
    yield from plan_problems(task.plan, task.model)
    yield from _check_problems(task)


def _series_problems(task: TrialSeriesTask) -> Iterator[str]:
    if not task.plans:
        yield "plans must hold at least one plan"
    yield from _check_problems(task)
    available = set(gang_devices(task.gang))
    for number, plan in enumerate(task.plans):
        if missing := set(plan.devices) - available:
            yield f"plan {number}: device {min(missing)} is in the plan, but not in the gang"
        yield from (f"plan {number}: {problem}" for problem in plan_problems(plan, task.model))


def _rows_problem(model: Model, rows: int) -> str | None:
    """Return why a layer cannot be measured with so few rows, or None if it can."""
    least = model.family.min_rows if isinstance(model.family, Custom) else 1
    if rows >= least:
        return None
    return f"custom.min_rows asks for {least} rows or more at once, but layers are to be measured with {rows}; measure them with more"


def plan_problems(plan: Plan, model: Model) -> Iterator[str]:
    """Yield why the executor cannot train the model by the plan."""
    yield from _model_problems(model)
    if plan.model_layers != len(model.layers):
        yield f"the plan is for {plan.model_layers} layers, but the model has {len(model.layers)}"
    if plan.dtype not in (None, model.dtype):
        yield f"the plan is in {plan.dtype}, but the model is in {model.dtype}"
    if (refusal := operators_refusal(plan, model)) is not None:
        yield refusal
    for index, pipeline in enumerate(plan.pipelines):
        for number, stage in enumerate(pipeline.stages):
            for run in stage.layers:
                where = f"pipeline {index}, stage {number}, layers {run.first}…{run.end - 1}"
                if stage.operators is None and (problem := _degree_problem(model, run.strategy)):
                    yield f"{where}: {problem}"
                if min(run.rows) < least_rows(model, plan.global_batch_size):
                    why = least_rows_words(model, plan.global_batch_size)
                    yield f"{where}: a replica computes {min(run.rows)} at once, but {why}"


def _degree_problem(model: Model, strategy: Strategy) -> str | None:
    """Return why the layers cannot be split as the strategy does, or None if they can."""
    if degree := strategy.indivisible_degree(model.max_tensor_degree):
        return f"{degree} does not divide {model.max_tensor_degree}, the highest that this model allows"
    return None
