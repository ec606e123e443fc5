"""Calls of a module's forward, as values that can be written as Python again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor


class CutError(ValueError):
    """Sentence that says which line cannot be in a layer of its own, and what to do."""


@dataclass(eq=False, slots=True)
class Value:
    """Tensor of a forward.

    Attributes:
        name: what it is called in written code.
        call: call that returned it; None for fields of the rows, weights and buffers.
        access: expression after the call's result, such as `[0]`.
        source: name of a field, or path of a weight or buffer in the whole module.
        is_field: whether it is a field of the rows.
        is_weight: whether it is a weight.
        has_gradient: whether the losses' gradients reach it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    call: Call | None = None
    access: str = ""
    source: str = ""
    is_field: bool = False
    is_weight: bool = False
    has_gradient: bool = True

    @property
    def is_attribute(self) -> bool:
        """Return whether it is a weight or buffer of the whole module."""
        return self.call is None and not self.is_field


@dataclass(eq=False, slots=True)
class Call:
    """One call, of a module, a function of torch, a method or property of a tensor, or the user's loss.

    Attributes:
        target: path of the module, name of the function (`torch.cat`), of the method or of the property.
        arguments, keywords: nested tuples, lists, dicts and slices of values and constants.
        line: of the user's code.
        results: tensors of its result.
        assigned: name that the line gives its result; empty if it has none or several.
        changes: argument that it changes in place, as it was before.
    """

    kind: str
    target: str
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    line: str
    assigned: str = ""
    without_gradients: bool = False
    results: list[Value] = field(default_factory=list)
    changes: Value | None = None
    module: torch.nn.Module | None = None

    def values(self) -> Iterator[Value]:
        """Yield the tensors that it takes, in order."""
        yield from values_in((self.arguments, self.keywords))

    def parameters(self) -> list[Tensor]:
        """Return the weights of its module."""
        return [] if self.module is None else list(self.module.parameters())


@dataclass(frozen=True, slots=True)
class Opaque:
    """Argument that is no tensor, number or text, nor a collection of these."""

    class_name: str


@dataclass(frozen=True, slots=True)
class Recording:
    """Calls of a forward with `rows` rows, and the losses that it ends with."""

    rows: int
    fields: dict[str, Value]
    calls: list[Call]
    result: Value


def values_in(nested: Any) -> Iterator[Value]:
    """Yield the values in nested collections, in order."""
    if isinstance(nested, Value):
        yield nested
    elif isinstance(nested, slice):
        yield from values_in((nested.start, nested.stop, nested.step))
    elif isinstance(nested, tuple | list):
        for item in nested:
            yield from values_in(item)
    elif isinstance(nested, dict):
        yield from values_in(tuple(nested.values()))


def map_nested(nested: Any, function: Callable[[Any], Any]) -> Any:
    """Return nested collections with each item that is none replaced."""
    if isinstance(nested, slice):
        return slice(*(map_nested(item, function) for item in (nested.start, nested.stop, nested.step)))
    if type(nested) in {tuple, list, torch.Size}:
        items = [map_nested(item, function) for item in nested]
        return items if isinstance(nested, list) else tuple(items)
    if type(nested) is dict:
        return {key: map_nested(item, function) for key, item in nested.items()}
    return function(nested)


def has_opaque(nested: Any) -> bool:
    """Return whether nested collections hold what cannot be written."""
    seen: list[bool] = []
    map_nested(nested, lambda item: seen.append(isinstance(item, Opaque)))
    return any(seen)


def refuse(line: str, what: str) -> NoReturn:
    """Raise CutError of a line of the user's code."""
    raise CutError(f"{line}: {what}")
