"""Library: the functions that `import trainwright` offers beside the nouns. They read and print nothing by themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

from trainwright import documents
from trainwright.accelerators import best_format, estimate_profiles, names_of_same_sheet, with_names
from trainwright.calibration import Fit, Trials, fit
from trainwright.cluster import Cluster
from trainwright.cost.estimate import Estimate
from trainwright.exports.plan_shorthand import plan_of_shorthand
from trainwright.plan import Plan
from trainwright.profiles import Profiles
from trainwright.runtime import Runtime
from trainwright.search import Candidate, Limits, Problem, SearchControl, run
from trainwright.search.candidates import candidate_of
from trainwright.search.plan_defaults import with_sequence_parallel
from trainwright.training import RequestedDtype, Training

T = TypeVar("T")
ROWS: Final = tuple(2**power for power in range(9))
"""Row counts of estimated profiles; beyond the last, every device is busy and time is proportional to the rows."""


def read(path: str | Path, noun: type[T]) -> T:
    """Read a document of that noun from a file of YAML or JSON. Raises ValueError with one sentence on what is wrong."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise documents.DocumentError(f"{path}: cannot be read: {error.strerror or error}") from None
    found: T = documents.loads_given(content, noun, source=str(path))
    return found


def problem(
    cluster: Cluster,
    training: Training,
    *,
    profiles: Profiles | None = None,
    runtime: Runtime | None = None,
    limits: Limits | None = None,
) -> Problem:
    """Return the input of searches and estimates; without profiles, layers are estimated from the data sheets.

    `training.dtype: auto` is the best format of all accelerators; measured profiles need it by name. They are
    found by an accelerator's name or data sheet. Without a runtime, it is Trainwright's own. Raises ValueError for an
    accelerator without a data sheet.
    """
    names = tuple(dict.fromkeys(node.accelerator for node in cluster.nodes))
    if training.dtype is RequestedDtype.AUTO:
        if profiles is not None:
            raise ValueError("training.dtype: must be that of the profiles, got auto; name it")
        training = training.in_format(best_format(names, (limits or Limits()).dtypes))
    runtime = runtime or Runtime()
    return Problem(
        cluster=cluster,
        model=training.model,
        profiles=with_names(profiles, names_of_same_sheet(profiles, names))
        if profiles is not None
        else estimate_from_data_sheets(
            training, names, devices=len(cluster.devices), runtime=runtime, power_watts=cluster.power_limits
        ),
        global_batch_size=training.global_batch_size,
        limits=limits or Limits(),
        optimizer=training.optimizer,
        runtime=runtime,
    )


def find_plans(
    problem: Problem, planner: str = "auto", *, top: int = 1, effort: float = 1.0, budget_seconds: float | None = None
) -> list[Candidate]:
    """Return the best plans of a search with their estimates, best first.

    `effort` counts for `auto` alone. Raises NoFeasiblePlan if none fits into memory, ValueError for an unknown planner and for
    a negative budget.
    """
    if budget_seconds is not None and not budget_seconds >= 0:  # also refuses NaN
        raise ValueError(f"budget_seconds must be at least 0, got {budget_seconds}")
    return run(planner, problem, top=top, control=SearchControl.with_budget(budget_seconds, effort=effort))


def plan_in_words(words: str, problem: Problem) -> Plan:
    """Return the plan of a shorthand, `pp2 dp2 tp2 mb1 zero1 recompute`, on the cluster's devices in their order."""
    layers = len(problem.model.layers)
    plan = plan_of_shorthand(
        words, problem.cluster.devices, layers, problem.global_batch_size, problem.model.max_tensor_degree
    )
    return with_sequence_parallel(plan, problem.cost_context)


def estimate(plan: Plan, problem: Problem) -> Estimate:
    """Predict the seconds and the memory of a plan. Raises ValueError for a plan of another model or cluster."""
    return candidate_of(problem, plan).estimate


def calibrate(trials: Trials, problem: Problem) -> Fit:
    """Fit the cost model to measured trials; `runtime` of the result is for further problems."""
    return fit(trials, problem.cost_context)


def estimate_from_data_sheets(
    training: Training,
    accelerators: Sequence[str],
    *,
    devices: int,
    runtime: Runtime | None = None,
    power_watts: Mapping[str, float] | None = None,
) -> Profiles:
    """Estimate profiles at every tensor degree that divides the model, up to `devices`, and at ROWS.

    Raises ValueError for an accelerator without a data sheet.
    """
    most = training.model.max_tensor_degree
    return estimate_profiles(
        training.model,
        accelerators,
        tensor_degrees=[degree for degree in range(1, min(most, devices) + 1) if most % degree == 0],
        rows=ROWS,
        optimizer=training.optimizer,
        runtime=runtime,
        power_watts=power_watts,
    )
