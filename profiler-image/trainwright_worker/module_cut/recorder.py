"""Recording of a module's forward: torch hands every function and method of tensors to it, and modules are called through it."""

from __future__ import annotations

import inspect
import linecache
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass
from functools import cache, partial
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from trainwright_worker.module_cut.forward_calls import (
    Call,
    CutError,
    Opaque,
    Recording,
    Value,
    has_opaque,
    map_nested,
    refuse,
)
from trainwright_worker.module_cut.layer_names import last_name

_READS: Final = {
    "item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__", "__contains__", "is_nonzero",
    "equal", "allclose",
}  # fmt: skip
"""Methods and functions that read values, after which the forward may do anything."""

_PLAIN = (
    int,
    float,
    bool,
    str,
    bytes,
    complex,
    torch.dtype,
    torch.device,
    torch.memory_format,
    torch.layout,
    type(None),
)
_OWN = (str(Path(torch.__file__).parent), str(Path(__file__).parent))

_ASSIGNMENT: Final = re.compile(r"\s*([A-Za-z]\w*)\s*(?:[-+*/@]?=)[^=]")

Forward = Callable[[Mapping[str, Tensor]], Any]


class Line(NamedTuple):
    """Line of the user's code, and the name to which it assigns."""

    place: str = ""
    assigned: str = ""

    @classmethod
    def of(cls, frame: FrameType | None) -> Line:
        """Return the line of the innermost frame that is neither torch's nor of this package."""
        while frame is not None and frame.f_code.co_filename.startswith(_OWN):
            frame = frame.f_back
        if frame is None:
            return cls()
        file, number = frame.f_code.co_filename, frame.f_lineno
        assignment = _ASSIGNMENT.match(linecache.getline(file, number))
        return cls(f"{Path(file).name}:{number}", assignment[1] if assignment else "")


def line_of_error(error: BaseException) -> str:
    """Return the line of the user's code in which an error was raised."""
    trace, line = error.__traceback__, "?"
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(_OWN):
            line = f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return line


@contextmanager
def module_calls(called: Callable[..., Any]) -> Iterator[None]:
    """Hand the body's calls of modules to `called(original, module, arguments, keywords)`, as torch.fx's tracer does."""
    original = nn.Module.__call__

    def call(module: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        return called(original, module, arguments, keywords)

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]


class Recorder(TorchFunctionMode):
    """Record of the calls of one forward.

    Attributes:
        opened: modules whose own code is recorded; others are called as they are.
        loss: the user's function of losses, which is called as it is, too.
    """

    def __init__(self, whole: nn.Module, opened: Collection[nn.Module], loss: Callable[..., Any] | None) -> None:
        super().__init__()
        self._names = {module: name for name, module in whole.named_modules()}
        self._opened, self._loss = set(opened), loss
        self._depth = 0
        self._kept: list[Any] = []
        """Tensors that live on, so that their ids stay theirs."""
        self._value_of: dict[int, Value] = {}
        self.calls: list[Call] = []
        for name, weight in whole.named_parameters(remove_duplicate=False):
            self._add_attribute(name, weight, is_weight=True)
        for name, value in (*whole.named_buffers(remove_duplicate=False), *_plain_tensors(whole)):
            self._add_attribute(name, value, is_weight=False)

    def record(self, forward: Forward, rows: Mapping[str, Tensor]) -> Recording:
        """Run the forward on these rows. Raises CutError that names the line of what cannot be recorded."""
        fields = {}
        for name, value in rows.items():
            fields[name] = Value(name, tuple(value.shape), value.dtype, source=name, is_field=True)
            self._add(value, fields[name])
        with self, module_calls(self._called):
            result = forward(rows)
        if not isinstance(result, Tensor):
            raise CutError(
                f"the model returns {type(result).__name__}, not each row's loss; write a function "
                "loss(output, targets) beside build() that returns it"
            )
        losses = self._value(result, "the model's last line")
        return Recording(len(next(iter(rows.values()))), fields, self.calls, losses)

    def call_loss(self, *arguments: Any) -> Any:
        """Call the user's loss, as one call if what it takes can be written."""
        assert self._loss is not None
        frozen = self._freeze(arguments, "loss()")
        if has_opaque(frozen):
            return self._loss(*arguments)
        return self._as_one_call(_call("loss", "loss", frozen, {}, Line()), partial(self._loss, *arguments))

    def _called(self, original: Any, module: nn.Module, arguments: Any, keywords: Any) -> Any:
        if self._depth or module in self._opened or module not in self._names:
            return original(module, *arguments, **keywords)
        line = Line.of(sys._getframe(2))  # noqa: SLF001 - the way to a caller's line
        frozen_arguments, frozen_keywords = self._freeze((arguments, dict(keywords)), line.place)
        call = _call("module", self._names[module], frozen_arguments, frozen_keywords, line, module)
        return self._as_one_call(call, partial(original, module, *arguments, **keywords))

    def _as_one_call(self, call: Call, run: Callable[[], Any]) -> Any:
        self._depth += 1
        try:
            result = run()
        finally:
            self._depth -= 1
        self.calls.append(call)
        self._add_results(call, result, last_name(call.target))
        return result

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        if self._depth or func is torch._C._set_grad_enabled:  # noqa: SLF001 - torch's own name
            return func(*args, **keywords)
        name = _name_of(func)
        line = Line.of(sys._getframe(1))  # noqa: SLF001 - the way to a caller's line
        if name in _READS and any(isinstance(value, Tensor) for value in args):
            refuse(
                line.place,
                f"{name} reads a tensor's values outside of a module that stays whole, so the forward cannot be cut there; "
                "put these lines into a module of their own",
            )
        self._depth += 1
        try:
            result = func(*args, **keywords)
        finally:
            self._depth -= 1
        if not any(True for _ in tensors_in(result)) and name != "__setitem__":
            return result
        kind, target = _kind_and_target(func, name, line.place)
        frozen_arguments, frozen_keywords = self._freeze((args, _without_defaults(func, keywords)), line.place)
        call = _call(kind, target, frozen_arguments, frozen_keywords, line)
        self.calls.append(call)
        if name == "__setitem__" or (args and result is args[0] and _is_in_place(name, keywords)):
            call.changes = frozen_arguments[0]
            self._add_results(call, args[0], call.changes.name)
        else:
            self._add_results(call, result, name.strip("_"))
        return result

    def _add_results(self, call: Call, result: Any, name: str) -> None:
        if isinstance(result, Tensor):
            name = call.assigned or name
        for access, value in tensors_in(result):
            made = Value(name, tuple(value.shape), value.dtype, call, access, has_gradient=value.requires_grad)
            call.results.append(made)
            self._add(value, made)

    def _add_attribute(self, path: str, tensor: Tensor, *, is_weight: bool) -> None:
        shape = tuple(tensor.shape)
        self._add(tensor, Value(last_name(path), shape, tensor.dtype, source=path, is_weight=is_weight))

    def _add(self, tensor: Tensor, value: Value) -> None:
        self._kept.append(tensor)
        self._value_of[id(tensor)] = value

    def _freeze(self, nested: Any, line: str) -> Any:
        def frozen(item: Any) -> Any:
            if isinstance(item, Tensor):
                return self._value(item, line)
            if isinstance(item, _PLAIN) or item is Ellipsis:
                return item
            return Opaque(type(item).__name__)

        return map_nested(nested, frozen)

    def _value(self, tensor: Tensor, line: str) -> Value:
        value = self._value_of.get(id(tensor))
        if value is None:
            refuse(
                line,
                f"a tensor of shape {tuple(tensor.shape)} is none of the model's weights and buffers and was made outside of its "
                "forward (a global, a cache, an autograd.Function); register it as a buffer, or make it in a module",
            )
        return value


def _call(  # noqa: PLR0913, PLR0917 (what a call is)
    kind: str, target: str, arguments: Any, keywords: Any, line: Line, module: nn.Module | None = None
) -> Call:
    return Call(
        kind, target, arguments, keywords, line.place, line.assigned, not torch.is_grad_enabled(), module=module
    )


def tensors_in(result: Any, access: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in a result, with the expressions that lead to them."""
    if isinstance(result, Tensor):
        yield access, result
    elif isinstance(result, tuple | list):
        for place, item in enumerate(result):
            yield from tensors_in(item, f"{access}[{place}]")
    elif isinstance(result, Mapping):
        for key, item in result.items():
            yield from tensors_in(item, f"{access}[{key!r}]")
    elif is_dataclass(result) and not isinstance(result, type):
        for item in dataclass_fields(result):
            yield from tensors_in(getattr(result, item.name), f"{access}.{item.name}")


def _plain_tensors(whole: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that are attributes of modules, but neither weights nor buffers."""
    for path, module in whole.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                yield f"{path}.{name}".lstrip("."), value


def _is_in_place(name: str, keywords: Mapping[str, Any]) -> bool:
    return name.startswith("__i") or (name.endswith("_") and not name.endswith("__")) or bool(keywords.get("inplace"))


def _without_defaults(func: Any, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that are not those that the function has anyway."""
    try:
        parameters = inspect.signature(func).parameters
    except (TypeError, ValueError):  # a function of C++
        return dict(keywords)
    return {
        name: value
        for name, value in keywords.items()
        if isinstance(value, Tensor)
        or name not in parameters
        or (parameters[name].default is not value and parameters[name].default != value)
    }


def _name_of(func: Any) -> str:
    name = str(getattr(func, "__name__", func))
    return str(func.__self__.__name__) if name == "__get__" else name


def _kind_and_target(func: Any, name: str, line: str) -> tuple[str, str]:
    if getattr(func, "__name__", "") == "__get__":
        return "property", name
    if getattr(torch.Tensor, name, None) is not None and _is_method(func):
        return "method", name
    target = _functions().get(id(func))
    if target is None:
        target = _by_module(func)
    if target is None:
        refuse(line, f"the function {name} has no public name in torch; call it in a module of its own")
    return "function", target


def _is_method(func: Any) -> bool:
    return str(getattr(func, "__qualname__", "")).startswith(("TensorBase.", "Tensor.", "_TensorBase."))


@cache
def _functions() -> dict[int, str]:
    """Return the public names of torch's functions by their ids."""
    places: list[tuple[str, ModuleType]] = [
        ("functional", functional), ("torch", torch), ("torch.fft", torch.fft), ("torch.linalg", torch.linalg),
        ("torch.special", torch.special),
    ]  # fmt: skip
    names: dict[int, str] = {}
    for prefix, module in places:
        for name in dir(module):
            if not name.startswith("_") and callable(function := getattr(module, name)):
                names.setdefault(id(function), f"{prefix}.{name}")
    return names


def _by_module(func: Any) -> str | None:
    """Return the name of a function that torch.nn.functional has under another object, such as max_pool2d."""
    name = str(getattr(func, "__name__", ""))
    for prefix, module in (("functional", functional), ("torch", torch)):
        for candidate in (name, name.lstrip("_")):
            if candidate and callable(getattr(module, candidate, None)):
                return f"{prefix}.{candidate}"
    return None
