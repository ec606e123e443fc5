"""Framework of all commands: option groups, one-sentence errors, exit codes, progress bar, optional packages."""

from __future__ import annotations

import functools
import gc
import inspect
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from functools import cache
from importlib import import_module
from typing import Any, NoReturn, get_type_hints

import typer

from trainwright.cli.inputs.overwriting import refuse_overwriting
from trainwright.cli.options import SearchOptions
from trainwright.cost.estimate import Estimate
from trainwright.report.progress import progress_bar
from trainwright.search import NoFeasiblePlan, SearchControl, SearchProgress

NOT_WRITTEN, BAD_INPUT, NOTHING_FEASIBLE, INTERRUPTED = 1, 2, 3, 130


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Turn a function into a command: a dataclass parameter becomes one option per field.

    Errors of the function end in one sentence on standard error and an exit code.
    """
    hints = get_type_hints(function, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)}
    parameters: dict[str, inspect.Parameter] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if name in groups:
            parameters |= _options(groups[name])
        else:
            parameters[name] = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])

    @functools.wraps(function)
    def run(**options: Any) -> None:
        with report_errors(options):
            refuse_overwriting(parameters, options)
            function(**_gathered(options, groups))

    run.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    run.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
    return run


def _options(group: type) -> dict[str, inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return {
        field.name: inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, annotation=hints[field.name], default=_default(field)
        )
        for field in fields(group)
    }


def _default(field: Field[Any]) -> Any:
    return inspect.Parameter.empty if field.default is MISSING else field.default


def _gathered(options: Mapping[str, Any], groups: Mapping[str, type]) -> dict[str, Any]:
    """Return the function's arguments, with the options of each group as one object."""
    left = dict(options)
    gathered = {name: group(**{f.name: left.pop(f.name) for f in fields(group)}) for name, group in groups.items()}
    return {**left, **gathered}


@contextmanager
def report_errors(options: Collection[str] = ()) -> Iterator[None]:
    """Report errors as one sentence on standard error and an exit code; a broken pipe is passed on.

    Where the sentence begins with an option's name, it shows the option as it is typed.
    """
    try:
        yield
    except NoFeasiblePlan as refusal:
        _fail(refusal, NOTHING_FEASIBLE)
    except ValueError as error:
        _fail(_as_typed(str(error), options), BAD_INPUT)
    except (ArithmeticError, MemoryError, RecursionError) as error:
        _fail(
            f"numbers in the documents are too large to compute with ({error or type(error).__name__}); check their units",
            BAD_INPUT,
        )
    except KeyboardInterrupt:
        _fail("interrupted before there was a plan to show", INTERRUPTED)
    except BrokenPipeError:
        raise
    except OSError as error:
        where = f" into {error.filename}" if error.filename else ""
        _fail(f"the answer cannot be written{where}: {error.strerror or error}", NOT_WRITTEN)


def _as_typed(refusal: str, options: Collection[str]) -> str:
    """Replace `memory_headroom_ratio must be …`, the planner's field, by `--memory-headroom must be …`."""
    field, _, rest = refusal.partition(" ")
    option = field.removesuffix("_ratio")
    return f"--{option.replace('_', '-')} {rest}" if option in options and rest.startswith("must ") else refusal


def _fail(error: object, code: int) -> NoReturn:
    typer.echo(f"trainwright: {' '.join(str(error).split())}", err=True)
    raise typer.Exit(code) from None


@contextmanager
def show_progress(what: str, search: SearchOptions) -> Iterator[SearchControl]:
    """Yield the control of a search; a terminal shows its progress until it ends.

    Ctrl-C ends the search with its best plans so far, a second one the command.
    """
    if search.budget_seconds is not None and not search.budget_seconds >= 0:  # also refuses NaN
        raise ValueError(f"--budget-seconds must be at least 0, got {search.budget_seconds}")
    if search.seed < 0:
        raise ValueError(f"--seed must be at least 0, got {search.seed}")
    _keep_imports()
    control = SearchControl.with_budget(search.budget_seconds, seed=search.seed, effort=search.effort)
    with _interrupting(control), progress_bar(what, sys.stderr) as show:
        yield replace(control, report=lambda step: show(step.done, step.total, _best(step)))


def _best(step: SearchProgress) -> str:
    return "" if step.best_seconds is None else f"best {step.best_seconds:.4g} s"


def end_if_interrupted(control: SearchControl) -> None:
    """End the command with the status of an interruption if its search was interrupted: its answer is not complete."""
    if control.interrupted.is_set():
        raise typer.Exit(INTERRUPTED)


def end_if_infeasible(estimate: Estimate) -> None:
    """End the command with the status of nothing feasible if the plan, which was shown, does not fit."""
    if not estimate.feasible:
        raise typer.Exit(NOTHING_FEASIBLE)


@contextmanager
def _interrupting(control: SearchControl) -> Iterator[None]:
    """Interrupt the search at the first Ctrl-C; the second one has its usual effect.

    Nothing changes where Ctrl-C has another effect than Python's, or in a thread, which cannot set it.
    """
    usual = signal.default_int_handler
    is_usual = signal.getsignal(signal.SIGINT) is usual and threading.current_thread() is threading.main_thread()

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGINT, usual)
        control.interrupted.set()

    if is_usual:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if is_usual:
            signal.signal(signal.SIGINT, usual)


@cache
def _keep_imports() -> None:
    """Exclude imported objects from garbage collection, whose full passes take a tenth of a quick search."""
    gc.freeze()


def load_module(module: str, packages: Collection[str], remedy: str) -> Any:
    """Import a module of a package that the library does not depend on. Raises ValueError with a remedy if one of these packages is not installed."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing not in packages:
            raise
        raise ValueError(f"the package {missing} is not installed here; {remedy}") from error
