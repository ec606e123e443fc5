"""Options shared by the planning commands, and the problem that they describe."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from trainwright import documents
from trainwright.answer.formats import in_stated_format
from trainwright.answer.question import estimated_profiles, in_requested_format, of_cluster, over_rows, sparing_small
from trainwright.cli.inputs.document_files import STANDARD_INPUT, read
from trainwright.cli.inputs.model_file import DecoderSequenceLengthOption, SequenceLengthOption, read_training
from trainwright.cli.inputs.plausibility import check_figures, check_rates, share_of
from trainwright.cli.inputs.profile_match import check_layer_kinds, mismatch_warning, note_same_sheets
from trainwright.cli.limit_options import ANY_TRAINER, LimitOptions
from trainwright.cli.output import note
from trainwright.cluster import Cluster
from trainwright.exports.plan_shorthand import WORDS, is_shorthand, plan_of_shorthand
from trainwright.layer import Dtype, LayerList
from trainwright.plan import Plan, check_plan_of_model
from trainwright.profiles import Profiles
from trainwright.runtime import Runtime
from trainwright.runtime_presets import runtime_preset, runtime_presets
from trainwright.search import SEARCHES, Limits, Preference, Problem, assuming_process_memory
from trainwright.training import RequestedDtype, Training

SEARCHED = "search"
"""Value in place of a batch size that searches for the one with the best throughput."""
MIN_EFFORT, MAX_EFFORT = 0.1, 1000.0
DEFAULT_PLANNER = "auto"
"""Default planner, and the only one that `--effort` affects."""
ANY_BATCH: Mapping[str, Any] = {"global_batch_size": 1}
"""Placeholder for the batch that a model file lacks, where none is needed or an option replaces it."""


def planner_names(incomplete: str) -> list[str]:
    """Complete a planner's name in the shell."""
    return [name for name in SEARCHES if name.startswith(incomplete)]


PlannerOption = Annotated[
    str, typer.Option("--planner", autocompletion=planner_names, help=f"The search: one of {', '.join(SEARCHES)}.")
]


@dataclass(frozen=True)
class Inputs:
    """Input documents, and the batch size if it overrides the model file's."""

    cluster: Annotated[Path, typer.Option(help="Accelerators, nodes and links; `trainwright cluster` writes one.")]
    model: Annotated[
        Path, typer.Option(help="Model family, batch size, number format, optimizer; or a config.json of Hugging Face.")
    ]
    profiles: Annotated[
        Path | None,
        typer.Option(help="Measured layer profiles. Without it they are estimated from accelerators' data sheets."),
    ] = None
    runtime: Annotated[
        Path | None,
        typer.Option(
            metavar="NAME|FILE",
            help="Training runtime: a preset (`trainwright runtimes` lists them), or a file that `trainwright calibrate` writes.",
        ),
    ] = None
    global_batch_size: Annotated[
        str | None,
        typer.Option(
            metavar="ROWS|search",
            help="Rows of one iteration, in place of the model file's; `search` finds the batch size with the best throughput.",
        ),
    ] = None
    sequence_length: SequenceLengthOption = None
    decoder_sequence_length: DecoderSequenceLengthOption = None

    @property
    def searches_batch(self) -> bool:
        """True if the search chooses the batch size."""
        return self.global_batch_size == SEARCHED

    def problem(
        self, limits: LimitOptions | None = None, preference: Preference | None = None, *, is_given: bool = False
    ) -> Problem:
        """Read the problem; without profiles they are estimated, with a note on standard error.

        `is_given`: for a given plan, of whatever trainer. Where the model file leaves the number format open, it is the best
        one for all accelerators or that of the profiles.
        """
        cluster, runtime = self._cluster, runtime_of(self.runtime)
        if limits is None or limits.memory_headroom is None:
            origin = "estimated" if self._given_profiles is None else self._given_profiles.origin
            runtime = assuming_process_memory(runtime, cluster, origin)
        within = Limits() if limits is None else limits.limits(runtime, cluster, is_given=is_given)
        if self._given_profiles is not None and not is_given:
            within = _without_small(within, cluster, self._given_profiles)
        training = self._training(cluster, within)
        is_open = self._requested.dtype is RequestedDtype.AUTO
        if training.model.dtype not in within.dtypes and limits is not None:
            trainer = limits.trainer(runtime) or ""
            if not is_given:
                self._refuse_format(training.model.dtype, within.dtypes, trainer)
            remedy = "measure profiles in a format that it has" if is_open else "`dtype: auto` prices what it can run"
            note(f"{trainer} has no {training.model.dtype}; {remedy}")
        profiles = self._profiles(cluster, training, runtime)
        return Problem(
            cluster=cluster,
            model=training.model,
            profiles=profiles,
            global_batch_size=training.global_batch_size,
            limits=within,
            optimizer=training.optimizer,
            runtime=runtime,
            preference=preference or Preference(),
            chooses_format=is_open and self.profiles is None,
        )

    def plan(self, given: Path) -> Plan:
        """Read a plan from a file, or from its shorthand, which takes the cluster's devices in their order."""
        if not str(given).strip(" ."):  # an empty path is the folder `.`
            raise ValueError(f"the plan is empty; give a file, or {WORDS}")
        if not self.is_shorthand_of_plan(given):
            plan: Plan = read(given, Plan)
            return plan
        return self.shorthand_plan(str(given))

    def shorthand_plan(self, words: str) -> Plan:
        """Return the plan of a shorthand. Raises ValueError with one sentence."""
        stack, devices = self._stack, self._cluster.devices
        batch = self._requested.global_batch_size
        return plan_of_shorthand(words, devices, len(stack.layers), batch, stack.max_tensor_degree)

    def in_format_of(self, plans: Sequence[Plan], problem: Problem, file: Path) -> Problem:
        """Return the problem in the number format that plans of a file state, or in its own where they state none.

        Raises DocumentError where they state several, or another one than the model file or the profiles.
        """
        own, stated = problem.model.dtype, {plan.dtype for plan in plans if plan.dtype is not None}
        is_open = self._requested.dtype is RequestedDtype.AUTO
        if is_open and self.profiles is not None and {dtype.num_bytes for dtype in stated} == {own.num_bytes}:
            # Weights do not tell half formats apart.
            problem = replace(problem, model=replace(problem.model, dtype=min(stated)))
        try:
            problem = in_stated_format(problem, plans)
        except ValueError as error:
            remedy = f": {self.profiles} is in {own}" if is_open else f", or leave dtype out of {self.model}"
            raise documents.DocumentError(f"{file}: {error}{'' if len(stated) > 1 else remedy}") from None
        if problem.model.dtype not in problem.limits.dtypes:
            note(f"{problem.runtime.trainer or 'the trainer'} has no {problem.model.dtype}")
        return problem

    def check_model(self, plan: Plan, file: Path) -> None:
        """Raise DocumentError if a plan of a file is for another model: of other layers, or of other tensor degrees."""
        try:
            check_plan_of_model(plan, self._stack, str(self.model))
        except ValueError as error:
            raise documents.DocumentError(f"{file}: {error}") from None

    @staticmethod
    def is_shorthand_of_plan(given: Path) -> bool:
        return not given.exists() and is_shorthand(str(given))

    @cached_property
    def _cluster(self) -> Cluster:
        cluster: Cluster = read(self.cluster, Cluster)
        check_figures(cluster, self.cluster)
        return cluster

    @cached_property
    def _requested(self) -> Training:
        given = self.global_batch_size
        absent = None if given is None else ANY_BATCH
        training = read_training(self.model, self.sequence_length, self.decoder_sequence_length, absent=absent)
        if given is not None and not self.searches_batch:
            # Replaced after reading, so that a wrong option is not reported as the file's error.
            training = replace(training, global_batch_size=_rows(given))
        return training

    @cached_property
    def _stack(self) -> LayerList:
        return self._requested.family.stack(self._requested.attention)

    @cached_property
    def _given_profiles(self) -> Profiles | None:
        if self.profiles is None:
            return None
        profiles: Profiles = read(self.profiles, Profiles)
        note_same_sheets(profiles, self._cluster)
        return of_cluster(profiles, self._cluster)

    def _training(self, cluster: Cluster, limits: Limits) -> Training:
        """Return the training in a number format by name."""
        requested, profiles = self._requested, self._given_profiles
        training = in_requested_format(requested, cluster, limits, profiles)
        if profiles is not None and requested.dtype is RequestedDtype.AUTO:
            self._check_layer_kinds(training)
            if training.dtype is not RequestedDtype.FLOAT32:
                note(f"dtype auto: taken as {training.dtype}, by the bytes of the profiles' weights")
        return training

    def _refuse_format(self, dtype: Dtype, dtypes: Collection[Dtype], trainer: str) -> NoReturn:
        own = " and ".join(sorted(dtypes))
        if self._requested.dtype is RequestedDtype.AUTO:
            raise ValueError(f"{self.profiles}: profiles in {dtype}; {trainer} has {own}; measure them in one of these")
        raise ValueError(
            f"{self.model}: dtype: {trainer} has {own}, got {dtype}; give one of these or auto, or plan for any trainer "
            f"(--expressible-by {ANY_TRAINER})"
        )

    def _check_layer_kinds(self, training: Training) -> None:
        if self.profiles is not None and self._given_profiles is not None:
            check_layer_kinds(self._given_profiles, training, file=self.profiles, model_file=self.model)

    def _profiles(self, cluster: Cluster, training: Training, runtime: Runtime) -> Profiles:
        given = self._given_profiles
        if given is not None and self.profiles is not None:
            self._check_layer_kinds(training)
            check_rates(given, training.model, self.profiles)
            if doubted := mismatch_warning(given, training):
                note(doubted)
            profiles = over_rows(given, training, runtime)
            if profiles is not given:
                note("profiles measured at a single row count are extrapolated by curves of data sheets and runtime")
            return profiles
        try:
            profiles = estimated_profiles(training, cluster, runtime)
        except ValueError as error:
            raise ValueError(
                f"{self.cluster}: {error}; `trainwright accelerators` lists the names of all data sheets; without one, "
                "--profiles is needed"
            ) from None
        note("layer profiles are estimated from data sheets, not measured; give measured ones with --profiles")
        return profiles


def _without_small(limits: Limits, cluster: Cluster, profiles: Profiles) -> Limits:
    """Return the limits without accelerators that are too small for a layer, with a note on each."""
    spared = sparing_small(limits, cluster, profiles)
    for name in spared.spare[len(limits.spare) :]:
        kind = profiles.accelerators_without_memory()[name]
        note(f"{name} is left out: no layer of kind {kind} fitted into its memory when it was profiled")
    return spared


def runtime_of(given: Path | None) -> Runtime:
    """Return the runtime of a preset's name or of a file, which goes before a preset; without either Trainwright's own."""
    if given is None:
        return Runtime()
    if str(given) in runtime_presets() and not given.is_file():
        return runtime_preset(str(given)).runtime
    if given != STANDARD_INPUT and not given.exists():
        raise ValueError(
            f"--runtime: there is no file and no preset {str(given)!r}; give a file, or one of {', '.join(runtime_presets())}"
        )
    runtime: Runtime = read(given, Runtime)
    return runtime


def _rows(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"--global-batch-size must be a number of rows or `{SEARCHED}`, got {text!r}") from None


DEFAULT_KEEP_WEIGHT = 0.001


@dataclass(frozen=True)
class PreferenceOptions:
    """Options that choose among plans of about equal speed."""

    tolerance: Annotated[
        float,
        typer.Option(
            parser=share_of,
            metavar="SHARE",
            help="Prefer the simplest plan that is worse than the best by at most this share, e.g. 0.03.",
        ),
    ] = 0.0
    keep: Annotated[
        Path | None,
        typer.Option(
            metavar="PLAN",
            help="The plan that runs now, as a file or as shorthand (pp2 dp2 tp2 mb1): prefer plans that move little of it.",
        ),
    ] = None
    keep_weight: Annotated[
        float,
        typer.Option(
            help="Weight of a second of moving state against a second of each iteration; "
            "0.001: moving pays off within 1,000 iterations."
        ),
    ] = DEFAULT_KEEP_WEIGHT

    def preference(self, inputs: Inputs) -> Preference:
        """Return the preference. Raises ValueError if the plan to keep cannot be read."""
        if self.keep is None and self.keep_weight != DEFAULT_KEEP_WEIGHT:
            raise ValueError("--keep-weight needs --keep, the plan that runs now; add it, or leave --keep-weight out")
        if self.keep is None:
            return Preference(self.tolerance)
        keep_is_shorthand = inputs.is_shorthand_of_plan(self.keep)
        try:
            kept = inputs.plan(self.keep)
            inputs.check_model(kept, self.keep)
        except ValueError as error:
            raise ValueError(f"--keep: {error}") from None
        return Preference(self.tolerance, kept, self.keep_weight, keep_is_shorthand)


@dataclass(frozen=True)
class SearchOptions:
    """Options of the search."""

    seed: Annotated[int, typer.Option(help="Seed of random searches; the same seed gives the same plans.")] = 0
    budget_seconds: Annotated[
        float | None,
        typer.Option(help="Stop the search after this many seconds and show the best plans so far."),
    ] = None
    effort: Annotated[
        float,
        typer.Option(help="Only auto: multiply the number of plans it costs; for runs that take days."),
    ] = 1.0

    def check(self, planners: Collection[str]) -> None:
        """Raise ValueError for an effort that is out of range or affects none of the planners."""
        if not MIN_EFFORT <= self.effort <= MAX_EFFORT:  # also refuses NaN
            raise ValueError(f"--effort must be {MIN_EFFORT:g} to {MAX_EFFORT:,g}, got {self.effort:g}")
        if self.effort != 1 and DEFAULT_PLANNER not in planners:
            raise ValueError(
                f"--effort needs the planner {DEFAULT_PLANNER}, got {', '.join(planners)}; choose {DEFAULT_PLANNER}, or leave "
                "--effort out"
            )
