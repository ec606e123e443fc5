"""What a worker refuses before it starts: orders that contradict themselves or ask for what the executor cannot do.

Nothing here needs torch, so a refusal costs no start-up.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trainwright import documents
from trainwright.cluster import EMULATED_PREFIX
from trainwright.model import Model
from trainwright.orders import FailureReason, Gang, LinksOrder, ProfileOrder, SeriesOrder, TrialOrder, WorkerOrder
from trainwright.plan import Plan
from trainwright_worker.failures import WorkerError
from trainwright_worker.layers.of_model import families
from trainwright_worker.seat import gang_devices


def read_order(path: Path) -> WorkerOrder:
    """The checked order. Raises WorkerError where it cannot be read or cannot be done."""
    try:
        order: WorkerOrder = documents.loads(path.read_text(encoding="utf-8"), WorkerOrder, source=str(path))
    except (OSError, ValueError) as error:
        raise WorkerError(FailureReason.ORDER_INVALID, str(error)) from error
    check(order)
    return order


def check(order: WorkerOrder) -> None:
    """Raise WorkerError with the first thing that cannot be done, in one sentence."""
    for problem in _problems(order):
        raise WorkerError(FailureReason.ORDER_INVALID, problem)


def _problems(order: WorkerOrder) -> Iterator[str]:
    yield from _gang_problems(order.gang)
    if isinstance(order, LinksOrder):
        yield from _links_problems(order)
        return
    yield from _model_problems(order.model)
    if order.iterations < 1 or order.warmup_iterations < 0:
        yield (
            f"iterations must be at least 1 and warmup_iterations at least 0, got {order.iterations} and "
            f"{order.warmup_iterations}"
        )
    match order:
        case ProfileOrder():
            yield from _profile_problems(order)
        case TrialOrder():
            yield from _trial_problems(order)
        case SeriesOrder():
            yield from _series_problems(order)


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
            lacking = "needs a device table" if emulated else "is real and must have no device table"
            yield f"node {node.name}: accelerator {node.accelerator} {lacking} in gang.emulations"


def _links_problems(order: LinksOrder) -> Iterator[str]:
    sizes = order.message_bytes
    if len(sizes) < 3 or min(sizes) < 1 or list(sizes) != sorted(set(sizes)):
        yield f"message_bytes must be three ascending sizes or more, got {list(sizes)}"
    reduced = order.collective_bytes
    if reduced and (min(reduced) < 1 or list(reduced) != sorted(set(reduced)) or order.collective_seconds <= 0):
        yield (
            f"collective_bytes must be ascending sizes and collective_seconds above 0, got {list(reduced)} and "
            f"{order.collective_seconds}"
        )
    if order.repeats < 1:
        yield f"repeats must be at least 1, got {order.repeats}"
    yield from _pairs_problems(order)


def _pairs_problems(order: LinksOrder) -> Iterator[str]:
    names = {node.name for node in order.gang.nodes}
    met: set[frozenset[str]] = set()
    for pair in order.pairs or ():
        if frozenset(pair) in met or len(set(pair)) < 2 or not names.issuperset(pair):
            yield f"pairs must each name two nodes of the gang, and each two once, got {pair[0]} and {pair[1]}"
        met.add(frozenset(pair))
    if all(len(node.slots) < 2 for node in order.gang.nodes) and (len(names) < 2 or order.pairs == ()):
        yield "there is no link to measure: no pair of nodes, and no node with two slots"


def _model_problems(model: Model) -> Iterator[str]:
    family = model.family.family
    if family not in families():
        yield f"model.family {family} cannot be run: this worker has layers of {', '.join(families())}; order one of them"
    if getattr(model.family, "dropout", False):
        yield f"{family}.dropout cannot be run: this worker's layers drop nothing; leave it out"
    if Model.of(model.family, model.dtype) != model:
        yield f"the model's layers are not those that family {family} builds; build it from its family"


def _profile_problems(order: ProfileOrder) -> Iterator[str]:
    if len(gang_devices(order.gang)) > 1:
        yield f"layers are measured on one device, but the gang has {len(gang_devices(order.gang))}; order one slot"
    if not order.rows or min(order.rows) < 1:
        yield f"rows must name one row count or more, each at least 1, got {list(order.rows)}"
    if order.target_uncertainty < 0 or order.seconds_per_layer < 0:
        yield "target_uncertainty and seconds_per_layer must be at least 0"
    if order.tensor_degree < 1:
        yield f"tensor_degree must be at least 1, got {order.tensor_degree}"
    elif problem := _degree_problem(order.model, order.tensor_degree):
        yield problem


def _trial_problems(order: TrialOrder) -> Iterator[str]:
    planned, present = set(order.plan.devices), set(gang_devices(order.gang))
    if planned != present:
        odd = min(planned ^ present)
        where = "in the plan, but not in the gang" if odd in planned else "in the gang, but not in the plan"
        yield f"device {odd} is {where}; a trial's gang holds exactly the plan's devices"
    yield from _plan_problems(order.plan, order.model)


def _series_problems(order: SeriesOrder) -> Iterator[str]:
    if not order.plans:
        yield "plans must hold at least one plan"
    present = set(gang_devices(order.gang))
    for number, plan in enumerate(order.plans):
        if absent := set(plan.devices) - present:
            yield f"plan {number}: device {min(absent)} is in the plan, but not in the gang"
        yield from (f"plan {number}: {problem}" for problem in _plan_problems(plan, order.model))


def _plan_problems(plan: Plan, model: Model) -> Iterator[str]:
    if plan.model_layers != len(model.layers):
        yield f"the plan is for {plan.model_layers} layers, but the model has {len(model.layers)}"
    for index, pipeline in enumerate(plan.pipelines):
        for number, stage in enumerate(pipeline.stages):
            for run in stage.layers:
                if problem := _degree_problem(model, run.tensor):
                    yield (f"pipeline {index}, stage {number}, layers {run.first}…{run.end - 1}: {problem}")


def _degree_problem(model: Model, tensor: int) -> str | None:
    """Why the layers cannot be split into that many equal parts, or None where they can."""
    if model.max_tensor_degree % tensor:
        return f"tensor degree {tensor} does not divide {model.max_tensor_degree}, the highest that this model allows"
    return None
