"""One decorator for every command: groups of options, refusals in one sentence, exit codes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, NoReturn, get_type_hints

import typer

from trainwright.search import NoFeasiblePlan

NOT_WRITTEN, BAD_INPUT, NOTHING_FEASIBLE, INTERRUPTED = 1, 2, 3, 130


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Make a function a command: a parameter that is a dataclass stands for one option a field.

    What the function refuses ends in one sentence on standard error and an exit code.
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
        with one_sentence(options):
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
    """The function's arguments: options of a group become one object."""
    left = dict(options)
    gathered = {name: group(**{f.name: left.pop(f.name) for f in fields(group)}) for name, group in groups.items()}
    return {**left, **gathered}


@contextmanager
def one_sentence(options: Collection[str] = ()) -> Iterator[None]:
    """Refusals become one sentence on standard error and an exit code; a reader that went away is no refusal.

    Where the sentence begins with the name of one of the options, that is told as it is typed.
    """
    try:
        yield
    except NoFeasiblePlan as refusal:
        _fail(refusal, NOTHING_FEASIBLE)
    except ValueError as error:
        _fail(_as_typed(str(error), options), BAD_INPUT)
    except (ArithmeticError, MemoryError, RecursionError) as error:
        _fail(
            f"the numbers in the documents are beyond what can be calculated ({error or type(error).__name__})",
            BAD_INPUT,
        )
    except KeyboardInterrupt:
        _fail(
            "interrupted; where --budget-seconds is given, a search ends by itself, with its best so far", INTERRUPTED
        )
    except BrokenPipeError:
        raise
    except OSError as error:
        where = f" into {error.filename}" if error.filename else ""
        _fail(f"the answer cannot be written{where}: {error.strerror or error}", NOT_WRITTEN)


def _as_typed(refusal: str, options: Collection[str]) -> str:
    """`--memory-headroom must be …` for `memory_headroom_ratio must be …`: the field is the planner's word."""
    field, _, rest = refusal.partition(" ")
    option = field.removesuffix("_ratio")
    return f"--{option.replace('_', '-')} {rest}" if option in options and rest.startswith("must ") else refusal


def _fail(error: object, code: int) -> NoReturn:
    typer.echo(f"trainwright: {' '.join(str(error).split())}", err=True)
    raise typer.Exit(code) from None
