"""Attributes, functions and hooks by which a user's layer computes besides its weights."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import partial
from types import FunctionType
from typing import Any, Final
from weakref import ref

from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

_PLAIN: Final = (bool, int, float, complex, str, tuple, list, type(None))
_HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_TORCH: Final = frozenset(vars(nn.Module())) - {*_HOOKS, "training"}


def plain_attributes(module: nn.Module) -> tuple[tuple[str, str, str], ...]:
    """Return the plain attributes of a module and of its parts."""
    return tuple(
        (path, name, repr(value))
        for path, part in module.named_modules()
        for name, value in sorted(vars(part).items())
        if isinstance(value, _PLAIN)
    )


def constants(module: nn.Module) -> Hashable:
    """Return the attributes of a module and of its parts, weights and buffers by size; equal ones compute and train alike."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return (
        tuple((name, tuple(value.shape), value.dtype, value.requires_grad) for name, value in tensors),
        tuple(
            (path, type_before_parametrizations(part), name, _hooks(value) if name in _HOOKS else _constant(value))
            for path, part in module.named_modules()
            for name, value in sorted(vars(part).items())
            if name not in _OF_TORCH
        ),
    )


def _hooks(hooks: Mapping[int, Any]) -> Hashable:
    """Return the hooks without their numbers, which are new for each; objects, such as WeightNorm's, by their attributes."""
    return tuple(
        (type(hook), _constant(vars(hook))) if type(hook).__module__.startswith("torch.") else _constant(hook)
        for hook in hooks.values()
    )


def _constant(value: Any) -> Hashable:
    """Return what equals another value's only if both do the same: the value itself where nothing else tells."""
    if isinstance(value, ref):  # those of recurrent modules to their weights end with them, and then have no hash
        value = value()
    if isinstance(value, list | tuple | Mapping):
        return (type(value), *map(_constant, value.items() if isinstance(value, Mapping) else value))
    if isinstance(value, partial):
        return (partial, _constant(value.func), _constant(value.args), _constant(value.keywords))
    if isinstance(value, FunctionType) and value.__closure__ is None:
        return (value.__code__, _constant(value.__defaults__), _constant(value.__kwdefaults__))
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.dtype)
    if type(value).__module__.startswith("torch._dynamo"):
        return type(value).__qualname__
    return value if type(value).__hash__ is not None else _Itself(value)


class _Itself:
    """Value that equals no other object's."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)
