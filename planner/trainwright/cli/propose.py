"""`trainwright propose`: which trial to make next, and when to stop."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from trainwright import documents
from trainwright.answer import Question
from trainwright.answer.formats import slow_format_of
from trainwright.calibration import Trials
from trainwright.cli.estimate import check_devices
from trainwright.cli.framework import command, end_if_interrupted
from trainwright.cli.inputs.document_files import read
from trainwright.cli.inputs.overwriting import WRITTEN
from trainwright.cli.limit_options import LimitOptions
from trainwright.cli.options import DEFAULT_PLANNER, Inputs, PlannerOption, SearchOptions
from trainwright.cli.output import Output, OutputOption, check_writable, note, show, show_json, write_document
from trainwright.cli.plan import answered
from trainwright.cli.trials import check_measurements, read_trials
from trainwright.document_kind import document
from trainwright.layer import Dtype
from trainwright.plan import Plan
from trainwright.report.format_sentences import slow_format
from trainwright.report.trial_proposal import proposal_fields, proposal_report
from trainwright.search import Candidate, Problem, SearchControl, preload_search
from trainwright.search.candidates import DeviceSymmetry
from trainwright.trial_selection import REGRET_BELOW, Proposal, Rule, TrialHistory, propose

MAX_CANDIDATES: Final = 500
"""Maximum number of candidates: each is estimated a dozen times, and every pair may be correlated."""

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class ListedCandidate:
    """Candidate as `trainwright plan --output json` lists it; only its plan and its number format are used."""

    plan: Plan
    rank: int | None = None
    predicted_seconds: float | None = None
    peak_memory_bytes: int | None = None
    memory_limit_bytes: int | None = None
    tokens_per_second_per_device: float | None = None
    rows_per_second_per_device: float | None = None
    model_flop_utilisation: float | None = None
    price_per_row: float | None = None
    run_seconds: float | None = None
    run_price: float | None = None
    fits: float | None = None
    traded: str | None = None
    moved_bytes: float | None = None
    move_seconds: float | None = None
    pays_off_after_iterations: int | None = None
    operators: tuple[Any, ...] = ()
    dtype: Dtype | None = None


@document("Candidates")
@dataclass(frozen=True)
class Candidates:
    """Output of `trainwright plan --output json`.

    Attributes:
        lower_bound_seconds, gap: written by earlier releases; not used.
    """

    candidates: tuple[ListedCandidate, ...]
    planner: str | None = None
    search_seconds: float | None = None
    stopped_by_budget: bool = False
    interrupted: bool = False
    work_bound_seconds: float | None = None
    estimated_range: dict[str, Any] | None = None
    mean_error: float | None = None
    profiles: str | None = None
    priced_by: str | None = None
    lower_bound_seconds: float | None = None
    gap: float | None = None
    dtype: Dtype | None = None
    slow_format: dict[str, Any] | None = None
    assumed_network_share: float | None = None
    assumed_process_bytes: int | None = None
    runtime: str | None = None
    heuristic: dict[str, Any] | None = None
    difference: dict[str, Any] | None = None
    running_plan: dict[str, Any] | None = None
    unlimited_seconds: float | None = None
    node_worth: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Choosing:
    """Options for the candidates and the stopping rule."""

    candidates: Annotated[
        Path | None,
        typer.Option(help="Candidates that `trainwright plan --output json` wrote; default: those of a search."),
    ] = None
    top: Annotated[int, typer.Option(help="How many candidates of the planner to choose from.")] = 20
    trials: Annotated[
        Path | None, typer.Option(help="Trials so far, failed ones included; `trainwright schema trials`.")
    ] = None
    stop_below: Annotated[float, typer.Option(help="Stop once the expected regret is below this share.")] = REGRET_BELOW
    per_device_second: Annotated[
        bool,
        typer.Option("--per-device-second", help="Choose by gain per device-second of the trial."),
    ] = False
    write_plan: Annotated[Path | None, typer.Option(help="Write the plan to try into this file, too."), WRITTEN] = None
    output: OutputOption = Output.TABLE


@app.command(name="propose")
@command
def propose_trial(
    *,
    inputs: Inputs,
    limits: LimitOptions,
    search: SearchOptions,
    choosing: Choosing,
    planner: PlannerOption = DEFAULT_PLANNER,
) -> None:
    """Propose the trial that lowers the expected regret most, or say that none is worth it."""
    if inputs.searches_batch:
        raise ValueError(
            "--global-batch-size cannot be `search`: trials compare plans of one batch size; give a number of rows"
        )
    if not 0 <= choosing.stop_below < 1:  # also refuses NaN
        raise ValueError(f"--stop-below must be at least 0 and below 1, got {choosing.stop_below:g}")
    preload_search(planner)
    search.check([planner])
    check_writable(choosing.write_plan)
    problem, rule = inputs.problem(limits), Rule(regret_below=choosing.stop_below)
    trials = None if choosing.trials is None else _trials(choosing.trials, inputs, problem)
    candidates: Sequence[Candidate | ListedCandidate]
    control = SearchControl()
    if choosing.candidates is None:
        searched, control = answered(Question((problem,), planner, min(choosing.top, MAX_CANDIDATES)), search)
        problem, candidates = searched.problem, searched.candidates
    else:
        _refuse_limits(limits)
        candidates = _listed(choosing.candidates)
        problem = inputs.in_format_of([candidates[0].plan], problem, choosing.candidates)
        check_devices((candidate.plan for candidate in candidates), problem, inputs, choosing.candidates)
    if trials is not None and choosing.trials is not None:
        trials = _stating_format(trials, problem, choosing.trials)
    plans = _distinct(_in_format_of(problem, candidates), trials, problem)
    _check_batches(plans, trials, problem)
    study = TrialHistory.of(plans, problem.cost_context, trials)
    answer = propose(study.posterior, rule, study.device_seconds if choosing.per_device_second else None)
    if choosing.write_plan is not None:
        _write(answer, study, choosing.write_plan)
    chosen = _chosen(answer)
    slow = slow_format(None if chosen is None else slow_format_of(problem, study.plans[chosen]), problem.cluster)
    if choosing.output is Output.JSON:
        show_json({**proposal_fields(answer, study, problem), **slow.fields})
    else:
        show(proposal_report(answer, study, problem, rule), *slow.sentences)
    end_if_interrupted(control)


def _trials(path: Path, inputs: Inputs, problem: Problem) -> Trials:
    trials = read_trials(path, inputs, problem.cost_context)
    check_devices(trials.plans, problem, inputs, path)
    check_measurements(trials, path, problem.cost_context)
    return trials


def _chosen(answer: Proposal) -> int | None:
    return answer.best if answer.trial is None else answer.trial


def _refuse_limits(limits: LimitOptions) -> None:
    given = [
        name
        for name in (
            "use_nodes",
            "spare",
            "max_tensor_degree",
            "max_data_degree",
            "max_pipeline_degree",
            "expressible_by",
        )
        if getattr(limits, name) is not None
    ]
    if given:
        named = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ValueError(f"{named} does not apply to --candidates, which are listed already; leave one of them out")


def _in_format_of(problem: Problem, candidates: Sequence[Candidate | ListedCandidate]) -> list[Plan]:
    """Return the plans in the problem's number format or one of as many bytes, with a note on the others."""
    own = problem.model.dtype
    stating = [replace(candidate.plan, dtype=candidate.plan.dtype or own) for candidate in candidates]
    kept = [plan for plan in stating if plan.dtype and plan.dtype.num_bytes == own.num_bytes]
    if left := len(candidates) - len(kept):
        note(f"{left} of {len(candidates)} candidates are in another number format than the best one, and are left out")
    return kept


def _stating_format(trials: Trials, problem: Problem, file: Path) -> Trials:
    """Return trials whose plans state their number format. Raises DocumentError for one of other bytes than the problem's."""
    own = problem.model.dtype
    for plan in trials.plans:
        if plan.dtype is not None and plan.dtype.num_bytes != own.num_bytes:
            raise documents.DocumentError(
                f"{file}: holds a trial in {plan.dtype} ({plan.summary()}), but the candidates are in {own}; leave it out"
            )

    def stating(plan: Plan) -> Plan:
        return replace(plan, dtype=plan.dtype or own)

    return Trials(
        tuple(replace(trial, plan=stating(trial.plan)) for trial in trials.trials),
        tuple(replace(failed, plan=stating(failed.plan)) for failed in trials.failed),
    )


def _distinct(plans: Sequence[Plan], trials: Trials | None, problem: Problem) -> list[Plan]:
    """Return one plan of those that are the same on other devices of the same kind: the one that was tried, if any."""
    symmetry = DeviceSymmetry(problem.cluster)
    tried = {symmetry.canonical_key(plan): plan for plan in (() if trials is None else trials.plans)}
    distinct: dict[Hashable, Plan] = {}
    for plan in plans:
        key = symmetry.canonical_key(plan)
        distinct.setdefault(key, tried.get(key, plan))
    return list(distinct.values())


def _listed(file: Path) -> tuple[ListedCandidate, ...]:
    listed: Candidates = read(file, Candidates)
    if not listed.candidates:
        raise documents.DocumentError(f"{file}: lists no candidate; give at least one")
    if len(listed.candidates) > MAX_CANDIDATES:
        raise documents.DocumentError(f"{file}: more than {MAX_CANDIDATES} candidates; leave the slowest out")
    return tuple(
        replace(candidate, plan=replace(candidate.plan, dtype=candidate.dtype or candidate.plan.dtype))
        for candidate in listed.candidates
    )


def _check_batches(plans: list[Plan], trials: Trials | None, problem: Problem) -> None:
    sizes = {plan.global_batch_size for plan in (*plans, *(trials.plans if trials else ()))}
    if sizes != {problem.global_batch_size}:
        other = next(iter(sizes - {problem.global_batch_size}))
        raise ValueError(
            f"candidates and trials must have the global batch of {problem.global_batch_size} rows, got one of {other}; "
            "leave that one out"
        )


def _write(answer: Proposal, study: TrialHistory, file: Path) -> None:
    chosen = _chosen(answer)
    if chosen is None:
        raise ValueError("no plan to write: every plan failed")
    write_document(study.plans[chosen], file)
