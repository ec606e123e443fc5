"""Question to the planner as plain values, and how documents become its problem."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from trainwright.accelerators import best_format, estimate_profiles, extrapolated, names_of_same_sheet, with_names
from trainwright.answer.profiled_format import profiled_format
from trainwright.cluster import Cluster
from trainwright.families import Family
from trainwright.profiles import Profiles
from trainwright.runtime import Runtime
from trainwright.search import Limits, NoFeasiblePlan, Objective, Problem, assuming_process_memory
from trainwright.throughput import tokens_per_row
from trainwright.training import RequestedDtype, Training
from trainwright.training_run import SECONDS_PER_DAY, TrainingRun

ROWS: Final = tuple(2**power for power in range(9))
"""Row counts of estimated profiles; beyond the last, every device is busy and time is proportional to the rows."""
HEURISTIC: Final = "megatron"
"""Planner of the baselines."""
HALF: Final = 0.5


@dataclass(frozen=True, slots=True)
class Question:
    """Question to the planner: problems, planner, and what the answer holds besides candidates.

    Attributes:
        problems: one problem in each number format that is profiled, the best format first; a single one if the format is
            given, or if profiles are estimated in the others.
        top: number of candidates.
        searches_batch: whether the batch size with the best throughput is searched, whatever the problem's is.
        baselines: number of the heuristic's plans.
        worth_share: share of the budget that is kept for the worth of each type of node; at 0 it has what the search leaves,
            and None asks for none.
    """

    problems: tuple[Problem, ...]
    planner: str = "auto"
    top: int = 1
    searches_batch: bool = False
    baselines: int = 0
    worth_share: float | None = None

    def __post_init__(self) -> None:
        if self.worth_share is not None and (self.objective is not Objective.TIME or self.searches_batch):
            raise ValueError(
                "node worth compares iterations of one batch; leave out the objective and a search of the batch"
            )

    @classmethod
    def compared(
        cls, problem: Problem, planner: str, top: int, *, searches_batch: bool = False, node_worth: bool = False
    ) -> Question:
        """Return the question with the heuristic's best plan as baseline, where it is another planner's and of the same batch."""
        is_alike = problem.limits.objective is Objective.TIME and not searches_batch and planner != HEURISTIC
        return cls((problem,), planner, top, searches_batch, int(is_alike), HALF if node_worth else None)

    @property
    def chooses_format(self) -> bool:
        """Return whether the answer is in the best number format, else in the problem's, with its price if that is slow."""
        return self.problems[0].chooses_format

    @property
    def objective(self) -> Objective:
        return self.problems[0].limits.objective


def problem_of(
    training: Training,
    cluster: Cluster,
    *,
    profiles: Profiles | None = None,
    runtime: Runtime | None = None,
    limits: Limits | None = None,
) -> Problem:
    """Return the input of searches and estimates; without profiles, layers are estimated from the data sheets.

    Limits without a head-room leave free what the runtime does not state of a process's memory, of which GPUs without profiles
    get an assumption. Raises ValueError for an accelerator without a data sheet, and for a number format that the trainer of
    the limits lacks.
    """
    runtime, limits, is_open = runtime or Runtime(), limits or Limits(), training.dtype is RequestedDtype.AUTO
    given = None
    if limits.memory_headroom_ratio is None:
        runtime = assuming_process_memory(runtime, cluster, "estimated" if profiles is None else profiles.origin)
    limits = limits.leaving_unknown_memory(runtime, cluster)
    if profiles is not None:
        given = of_cluster(profiles, cluster)
        limits = sparing_small(limits, cluster, given)
    training = in_requested_format(training, cluster, limits, given)
    if training.model.dtype not in limits.dtypes:
        formats = " and ".join(sorted(limits.dtypes))
        raise ValueError(
            f"training.dtype: the trainer of the limits has {formats}, got {training.model.dtype}; give one of these"
        )
    layers = estimated_profiles(training, cluster, runtime) if given is None else over_rows(given, training, runtime)
    return Problem(
        cluster=cluster,
        model=training.model,
        profiles=layers,
        global_batch_size=training.global_batch_size,
        limits=limits,
        optimizer=training.optimizer,
        runtime=runtime,
        chooses_format=is_open and given is None,
    )


def run_of_tokens(family: Family, tokens: float, within_days: float | None = None) -> TrainingRun:
    """Return the run of a number of tokens. Raises ValueError for a model without tokens, and for numbers that are not above 0."""
    if not 0 < tokens < math.inf:  # also refuses NaN
        raise ValueError(f"tokens must be finite and above 0, got {tokens:g}")
    row = tokens_per_row(family)
    if row is None:
        raise ValueError("tokens must be of a model of sequences of tokens; rows of this one have none")
    if within_days is None:
        return TrainingRun(tokens / row)
    if not 0 < within_days < math.inf:
        raise ValueError(f"within must be finite and above 0 days, got {within_days:g}; leave it out for no limit")
    return TrainingRun(tokens / row, within_days * SECONDS_PER_DAY)


def in_requested_format(training: Training, cluster: Cluster, limits: Limits, profiles: Profiles | None) -> Training:
    """Return the training in a number format by name.

    `auto` is the best one of all accelerators that the limits allow, or that of the profiles, by the bytes of their weights.
    Raises NoFeasiblePlan for a model whose sizes exceed any memory and exact arithmetic.
    """
    if training.dtype is RequestedDtype.AUTO:
        nodes = limits.allowed(cluster.nodes) or cluster.nodes
        dtype = best_format([node.accelerator for node in nodes], limits.dtypes)
        training = training.in_format(dtype if profiles is None else profiled_format(profiles, training, dtype))
    check_model_size(training)
    return training


def check_model_size(training: Training) -> None:
    """Raise NoFeasiblePlan for a model whose sizes exceed any memory and exact arithmetic."""
    for kind in training.model.kinds:
        if max(kind.parameters, kind.output_elements_per_row, kind.forward_flops_per_row) >= 2**60:
            raise NoFeasiblePlan(
                f"no plan fits into memory: one layer of kind {kind.name} has {kind.parameters:.3g} parameters and a "
                f"boundary of {kind.output_elements_per_row:.3g} values a row"
            )


def of_cluster(profiles: Profiles, cluster: Cluster) -> Profiles:
    """Return the profiles of the cluster's accelerators, found by name or data sheet; all profiles, if none are of them."""
    names = {accelerator.name for accelerator in cluster.accelerators}
    named_profiles = with_names(
        profiles, names_of_same_sheet(profiles, [accelerator.name for accelerator in cluster.accelerators])
    )
    own = tuple(layer for layer in named_profiles.layers if layer.accelerator in names)
    return replace(named_profiles, layers=own) if own else named_profiles


def sparing_small(limits: Limits, cluster: Cluster, profiles: Profiles) -> Limits:
    """Return the limits without accelerators on which some layer did not fit into memory when it was profiled.

    Raises NoFeasiblePlan if that spares all of them.
    """
    small = profiles.accelerators_without_memory()
    spare = tuple(dict.fromkeys(node.accelerator for node in cluster.nodes if node.accelerator in small))
    limits = replace(limits, spare=(*limits.spare, *spare))
    if small and not limits.allowed(cluster.nodes):
        kinds_too_large = ", ".join(f"{kind} on {accelerator}" for accelerator, kind in small.items())
        raise NoFeasiblePlan(
            f"no accelerator has enough memory for every layer, even with one row; too large: {kinds_too_large}"
        )
    return limits


def over_rows(profiles: Profiles, training: Training, runtime: Runtime) -> Profiles:
    """Return the profiles with layers measured at a single row count extrapolated to ROWS, for the runtime's kernels."""
    return extrapolated(profiles, training.model, ROWS, runtime)


def estimated_profiles(training: Training, cluster: Cluster, runtime: Runtime) -> Profiles:
    """Estimate the profiles of a cluster. Raises ValueError for an accelerator without a data sheet."""
    names = tuple(dict.fromkeys(node.accelerator for node in cluster.nodes))
    return estimate_from_data_sheets(
        training, names, devices=len(cluster.devices), runtime=runtime, power_watts=cluster.power_limits
    )


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
