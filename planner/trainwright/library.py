"""Library: the functions that `import trainwright` offers beside the nouns. They read and print nothing by themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from trainwright import documents
from trainwright.accelerators.described_machines import network_port, nodes_in_words
from trainwright.accelerators.machines import cluster_of_nodes
from trainwright.answer import Answer, Question, answer_of_plan, compose, find_candidates
from trainwright.answer.formats import in_stated_format
from trainwright.answer.question import problem_of, run_of_tokens
from trainwright.answer.sizing import SIZING_SECONDS, Size, sizes_of
from trainwright.calibration import Fit, Trials, fit
from trainwright.cluster import Cluster
from trainwright.cost.estimate import Estimate
from trainwright.exports import TARGETS
from trainwright.exports.plan_shorthand import plan_of_shorthand
from trainwright.hugging_face import is_config
from trainwright.hugging_face import read_config as hugging_face_model
from trainwright.plan import Plan
from trainwright.profiles import Profiles
from trainwright.report.breakdown import Difference, why
from trainwright.report.error_range import expected_range
from trainwright.report.explanation import Explanation
from trainwright.report.format_sentences import number_format
from trainwright.report.plan_export import PlanExport
from trainwright.report.remark import sentences
from trainwright.runtime import Runtime
from trainwright.runtime_presets import runtime_preset, runtime_presets
from trainwright.search import Candidate, Limits, Problem, SearchControl
from trainwright.search.plan_defaults import with_runtime_choices
from trainwright.training import Training, training_of

T = TypeVar("T")

Data: TypeAlias = Mapping[str, Any]
"""Plain data of a document, as its JSON or YAML has it."""


def read(path: str | Path, noun: type[T]) -> T:
    """Read a document of that noun from a file of YAML or JSON. Raises ValueError with one sentence on what is wrong."""
    value: T = documents.loads_given(_content(path), noun, source=str(path))
    return value


def _content(path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise documents.DocumentError(f"{path}: cannot be read: {error.strerror or error}") from None


def _noun(given: T | Data | str | Path, noun: type[T], name: str) -> T:
    """Return a noun that is given itself, as plain data, or as the path of a document."""
    if isinstance(given, str | Path):
        return read(given, noun)
    if isinstance(given, Mapping):
        value: T = documents.parse(dict(given), noun, source=name)
        return value
    return given


def _runtime(given: Runtime | Data | str | Path | None) -> Runtime | None:
    """Return a runtime that is given by a preset's name, or as another noun."""
    if given is None:
        return None
    if isinstance(given, str) and not Path(given).is_file():
        if given not in runtime_presets():
            presets = ", ".join(runtime_presets())
            raise ValueError(f"runtime: no preset and no file {given!r}; give a file, or one of {presets}")
        return runtime_preset(given).runtime
    return _noun(given, Runtime, "runtime")


def cluster_of(*machines: str, network: str | None = None) -> Cluster:
    """Return the cluster of machines by name and number, or in words, as `trainwright cluster` takes them.

    For example `cluster_of("p4d.24xlarge=2")`, or `cluster_of("lab=2x4xT4/pcie", network="25Gbit")`. Raises ValueError for words that
    are no machine, and where the network between machines is not known.
    """
    port = None if network is None else network_port(network)
    return cluster_of_nodes(nodes_in_words(machines, port))


def read_config(
    path: str | Path, *, sequence_length: int | None, global_batch_size: int, decoder_sequence_length: int | None = None
) -> Training:
    """Read a `config.json` of Hugging Face, which says neither how long sequences are nor how many rows an iteration has.

    Images need no `sequence_length`. Raises ValueError with one sentence on what no family has.
    """
    data = documents.loads_plain_given(_content(path), source=str(path))
    if not is_config(data):
        raise documents.DocumentError(f"{path}: not a config.json of Hugging Face, which has a model_type")
    model = hugging_face_model(data, tokens=sequence_length, decoder_tokens=decoder_sequence_length, source=str(path))
    return training_of(model.family, {"global_batch_size": global_batch_size, "attention": model.attention})


def problem(
    cluster: Cluster | Data | str | Path,
    training: Training | Data | str | Path,
    *,
    profiles: Profiles | Data | str | Path | None = None,
    runtime: Runtime | Data | str | Path | None = None,
    limits: Limits | None = None,
) -> Problem:
    """Return the input of searches and estimates; without profiles, layers are estimated from the data sheets.

    Each noun may be plain data or the path of a document, a runtime also the name of a preset. That limits searches to plans
    that its trainer can run, unless the limits name another one.

    With `training.dtype: auto` searches choose the number format; profiles that are given have one, known by the bytes of
    their weights. Profiles are found by an accelerator's name or data sheet; accelerators on which a layer did not fit are
    spared. Without a runtime, it is Trainwright's own. Limits without a head-room leave free what the runtime does not state of
    a process's memory, and GPUs with estimated profiles get an assumption. Raises ValueError for an accelerator without a data
    sheet, and for a number format that the trainer of the limits lacks.
    """
    used = _runtime(runtime)
    if isinstance(runtime, str) and used is not None:
        limits = _limits_of_trainer(limits or Limits(), used)
    return problem_of(
        _noun(training, Training, "training"),
        _noun(cluster, Cluster, "cluster"),
        profiles=None if profiles is None else _noun(profiles, Profiles, "profiles"),
        runtime=used,
        limits=limits,
    )


def _limits_of_trainer(limits: Limits, runtime: Runtime) -> Limits:
    """Return the limits with the plans that the runtime's trainer can run, if it has one and they name none."""
    if limits.expressible_by is not None or runtime.trainer is None:
        return limits
    return replace(limits, expressible_by=TARGETS[runtime.trainer].capabilities)


def ask(  # noqa: PLR0913 - the question's parts and the search's
    problem: Problem,
    planner: str = "auto",
    *,
    top: int = 1,
    effort: float = 1.0,
    budget_seconds: float | None = None,
    searches_batch: bool = False,
    node_worth: bool = False,
) -> Answer:
    """Return the best plans with what `trainwright plan` says of them: number format, baselines, worth of each type of node.

    `searches_batch`: find the batch size with the best throughput in place of the problem's. `effort` counts for `auto` alone.
    Half of the budget is for `node_worth`. Raises NoFeasiblePlan if no plan fits into memory, ValueError for an unknown
    planner, for a negative budget, and for `node_worth` with another objective than time or with `searches_batch`.
    """
    return compose(
        Question.compared(problem, planner, top, searches_batch=searches_batch, node_worth=node_worth),
        _control(budget_seconds, effort),
    )


def size(  # noqa: PLR0913 - the question's parts and the search's
    training: Training | Data | str | Path,
    accelerators: Sequence[str],
    *,
    runtime: Runtime | Data | str | Path | None = None,
    limits: Limits | None = None,
    tokens: float | None = None,
    within_days: float | None = None,
    budget_seconds: float | None = SIZING_SECONDS,
) -> list[Size]:
    """Return the smallest number of each accelerator on which the training fits, as `trainwright size` does.

    `tokens`: of the whole run; with `within_days` it is the smallest number that ends the run by then. Raises ValueError for an
    accelerator without a data sheet, for a negative budget, and as `run_of_tokens` for the run.
    """
    training, used = _noun(training, Training, "training"), _runtime(runtime) or Runtime()
    limits = _limits_of_trainer(limits or Limits(), used)
    if tokens is None and within_days is not None:
        raise ValueError("within_days needs tokens, the length of the run")
    if tokens is not None:
        limits = replace(limits, run=run_of_tokens(training.family, tokens, within_days))
    return sizes_of(training, accelerators, used, limits, _control(budget_seconds, 1.0))


def find_plans(
    problem: Problem, planner: str = "auto", *, top: int = 1, effort: float = 1.0, budget_seconds: float | None = None
) -> list[Candidate]:
    """Return the best plans of a search with their estimates, best first; those of `ask`, without the rest of it.

    Raises NoFeasiblePlan if none fits into memory, ValueError for an unknown planner and for a negative budget.
    """
    return [*find_candidates(Question((problem,), planner, top), _control(budget_seconds, effort)).candidates]


def _control(budget_seconds: float | None, effort: float) -> SearchControl:
    if budget_seconds is not None and not budget_seconds >= 0:  # also refuses NaN
        raise ValueError(f"budget_seconds must be at least 0, got {budget_seconds}")
    return SearchControl.with_budget(budget_seconds, effort=effort)


def plan_in_words(words: str, problem: Problem) -> Plan:
    """Return the plan of a shorthand, `pp2 dp2 tp2 mb1 zero1 recompute`, on the cluster's devices in their order."""
    layers = len(problem.model.layers)
    plan = plan_of_shorthand(
        words, problem.cluster.devices, layers, problem.global_batch_size, problem.model.max_tensor_degree
    )
    return with_runtime_choices(plan, problem.cost_context)


def _plan(given: Plan | Data | str | Path, problem: Problem) -> Plan:
    """Return a plan that is given in words, or as another noun."""
    if isinstance(given, str) and not Path(given).is_file():
        return plan_in_words(given, problem)
    return _noun(given, Plan, "plan")


def estimate(plan: Plan | Data | str | Path, problem: Problem) -> Estimate:
    """Predict the seconds and the memory of a plan, with `dtype: auto` in the number format that a search would choose for it.

    The plan may be plain data, the path of a document, or words. Raises ValueError for a plan of another model or cluster.
    """
    return answer_of_plan(problem, _plan(plan, problem)).best.estimate


def explain(
    plan: Plan | Data | str | Path, problem: Problem, against: Plan | Data | str | Path | None = None
) -> tuple[str, ...]:
    """Return where the time of a plan goes, and why it takes less or more time than another one, as `trainwright explain` says it.

    Plans are given as for `estimate`. Raises ValueError as it does.
    """
    answer = answer_of_plan(problem, _plan(plan, problem))
    problem, best = answer.problem, answer.best
    difference = None
    if against is not None:
        other = answer_of_plan(problem, _plan(against, problem)).best
        difference = Difference(best, other, other.plan.summary())
    further = why(difference, problem), expected_range(best, problem), number_format(answer, given=True)
    return (*Explanation.of(problem, best.plan, best.estimate).sentences(), *sentences(*further))


def export(plan: Plan | Data | str | Path, to: str, problem: Problem) -> dict[str, str]:
    """Return the files of a plan for another trainer by name, of the nearest plan that this supports, as `trainwright export` does.

    Remarks at the head of the first file say what is lost and what that costs by the problem's runtime. Plans are given as for
    `estimate`. Raises ValueError for an unknown trainer, and for a model or an optimizer that it lacks.
    """
    if to not in TARGETS:
        raise ValueError(f"to must be one of {', '.join(TARGETS)}, got {to!r}")
    given = _plan(plan, problem)
    stated = problem if given.dtype is None else in_stated_format(problem, [given])
    written = PlanExport.priced(TARGETS[to], stated, given, is_open=problem.chooses_format)
    return {file.name: file.text for file in written.files("the library")}


def calibrate(trials: Trials, problem: Problem) -> Fit:
    """Fit the cost model to measured trials; `runtime` of the result is for further problems."""
    return fit(trials, replace(problem, limits=Limits(memory_headroom_ratio=0.0)).cost_context)
