"""Options that limit what plans may use, the names of trainers that can run them, and the run that plans are for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Final

import typer

from trainwright.answer.question import run_of_tokens
from trainwright.cli.inputs.plausibility import share_of
from trainwright.cli.output import note
from trainwright.cluster import Cluster
from trainwright.exports import TARGETS, Capabilities, Target
from trainwright.families import Family
from trainwright.report.plan_summary import short_names
from trainwright.runtime import Runtime
from trainwright.search import ASSUMED_FRAGMENTS_RATIO, UNKNOWN_MEMORY_RATIO, Limits, Objective, Problem
from trainwright.training_run import TrainingRun

ANY_TRAINER: Final = "any"
"""Value of --expressible-by that lifts the limit which a runtime of the same name implies."""


def target_names(incomplete: str) -> list[str]:
    """Complete the name of a target of exports in the shell."""
    return [name for name in TARGETS if name.startswith(incomplete)]


def target_of(option: str, name: str) -> Target:
    """Return the target of exports that an option names. Raises ValueError for an unknown name."""
    if name not in TARGETS:
        raise ValueError(f"{option} must be one of {', '.join(TARGETS)}, got {name!r}")
    return TARGETS[name]


HeadroomOption = Annotated[
    float | None,
    typer.Option(
        parser=share_of,
        metavar="SHARE",
        help="Share of every device's memory to leave free; default: "
        f"{UNKNOWN_MEMORY_RATIO}, {ASSUMED_FRAGMENTS_RATIO} where the memory of a process is assumed, and what fragments where the runtime states it.",
    ),
]


@dataclass(frozen=True)
class LimitOptions:
    """Options that limit what plans may use."""

    max_tensor_degree: Annotated[int | None, typer.Option(help="The largest tensor degree to use.")] = None
    max_data_degree: Annotated[int | None, typer.Option(help="The largest data degree to use.")] = None
    max_pipeline_degree: Annotated[int | None, typer.Option(help="The most stages of a pipeline.")] = None
    memory_headroom: HeadroomOption = None
    use_nodes: Annotated[str | None, typer.Option(metavar="NODE,…", help="Plan on these nodes only, by name.")] = None
    spare: Annotated[
        str | None, typer.Option(metavar="NAME,…", help="Exclude these nodes or accelerators, by name.")
    ] = None
    expressible_by: Annotated[
        str | None,
        typer.Option(
            autocompletion=target_names,
            metavar="TARGET",
            help=f"Only plans that this trainer can run: one of {', '.join(TARGETS)}; default: the trainer of --runtime. "
            f"`{ANY_TRAINER}`: every plan.",
        ),
    ] = None
    objective: Annotated[
        Objective,
        typer.Option(help="Quantity to minimise: time of an iteration, cost of a sample, or both."),
    ] = Objective.TIME

    def limits(self, runtime: Runtime, cluster: Cluster, *, is_given: bool = False) -> Limits:
        """Return the limits; the trainer of the runtime implies the plans that it supports.

        `is_given`: the plan is given, so that it implies the trainer's number formats alone. Raises ValueError for an unknown
        trainer and for empty names.
        """
        return Limits(
            max_tensor_degree=self.max_tensor_degree,
            max_data_degree=self.max_data_degree,
            max_pipeline_degree=self.max_pipeline_degree,
            memory_headroom_ratio=self.memory_headroom,
            use_nodes=_names("--use-nodes", self.use_nodes),
            spare=_spared(_names("--spare", self.spare), cluster),
            objective=self.objective,
            expressible_by=self._formats(runtime) if is_given else self._capabilities(runtime),
        ).leaving_unknown_memory(runtime, cluster)

    def trainer(self, runtime: Runtime) -> str | None:
        """Return the name of the trainer that has to run the plans; None for any."""
        if self.expressible_by is not None:
            return None if self.expressible_by == ANY_TRAINER else self.expressible_by
        return runtime.trainer

    def _target(self, trainer: str) -> Target:
        return target_of("trainer of --runtime" if self.expressible_by is None else "--expressible-by", trainer)

    def _formats(self, runtime: Runtime) -> Capabilities | None:
        """Return capabilities for every plan in the number formats of the trainer, if there is one."""
        trainer = self.trainer(runtime)
        if trainer is None:
            return None
        return Capabilities(every_plan=True, dtypes=self._target(trainer).capabilities.dtypes)

    def _capabilities(self, runtime: Runtime) -> Capabilities | None:
        """Return the capabilities of the trainer that has to run the plans, with a note where --runtime implies it."""
        trainer = self.trainer(runtime)
        if trainer is None:
            return None
        target = self._target(trainer)
        if self.expressible_by is None:
            note(
                f"only plans that {trainer} can run, the trainer of --runtime; `--expressible-by {ANY_TRAINER}` lifts that"
            )
        elif runtime.trainer is not None and target.preset not in (
            None,
            target_of("trainer of --runtime", runtime.trainer).preset,
        ):
            note(
                f"only plans that {trainer} can run, but priced as {runtime.trainer} runs them, the trainer of --runtime; "
                f"`--runtime {target.preset}` prices {trainer}"
            )
        return target.capabilities


def _spared(names: tuple[str, ...], cluster: Cluster) -> tuple[str, ...]:
    """Return the names of nodes and accelerators, which may be given by the short names that tables show."""
    nodes = {node.name for node in cluster.nodes}
    names_by_short = {short: name for name, short in short_names(cluster).items() if short not in nodes}
    return tuple(names_by_short.get(name, name) for name in names)


def _names(option: str, text: str | None) -> tuple[str, ...]:
    names = tuple(name.strip() for name in (text or "").split(",") if name.strip())
    if text is not None and not names:
        raise ValueError(f"{option} needs at least one name, got {text!r}; leave the option out for no limit")
    return names


@dataclass(frozen=True)
class RunOptions:
    """Options of the whole run that a plan is for."""

    tokens: Annotated[
        float | None,
        typer.Option(help="Tokens of the whole run, e.g. 300e9: how many days does it take, at what price?"),
    ] = None
    within: Annotated[
        float | None,
        typer.Option(
            metavar="DAYS", help="Days that the run of --tokens may take: the cheapest plan that ends within them."
        ),
    ] = None

    def run_of(self, family: Family) -> TrainingRun | None:
        """Return the run, if one is asked for. Raises ValueError for a model without tokens, and for a time without tokens."""
        if self.tokens is None:
            if self.within is not None:
                raise ValueError("--within needs --tokens, the length of the run; add it, or leave --within out")
            return None
        return run_of_tokens(family, self.tokens, self.within)

    def of(self, problem: Problem) -> Problem:
        """Return the problem of the run. Raises ValueError as `run_of`."""
        run = self.run_of(problem.model.family)
        if run is None:
            return problem
        objective = problem.limits.objective
        if self.within is not None and objective is Objective.TIME:
            objective = Objective.COST
        return replace(problem, limits=replace(problem.limits, objective=objective, run=run))
