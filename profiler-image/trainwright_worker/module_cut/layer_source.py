"""Python of the layers that a module was cut into."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from trainwright_worker.layers.custom import TARGETS
from trainwright_worker.module_cut.forward_calls import Call, Opaque, Recording, Value, refuse
from trainwright_worker.module_cut.layer_cut import Cut, CutLayer
from trainwright_worker.module_cut.layer_names import LayerNames, numbered_names

_INFIX: Final = {
    "add": "{} + {}", "sub": "{} - {}", "mul": "{} * {}", "div": "{} / {}", "true_divide": "{} / {}", "matmul": "{} @ {}",
    "pow": "{} ** {}", "floor_divide": "{} // {}", "eq": "{} == {}", "ne": "{} != {}", "lt": "{} < {}", "le": "{} <= {}",
    "gt": "{} > {}", "ge": "{} >= {}", "bitwise_and": "{} & {}", "bitwise_or": "{} | {}", "__and__": "{} & {}",
    "__or__": "{} | {}", "__radd__": "{1} + {0}", "__rsub__": "{1} - {0}", "__rmul__": "{1} * {0}", "__rdiv__": "{1} / {0}",
    "__rtruediv__": "{1} / {0}", "__rpow__": "{1} ** {0}", "__rmatmul__": "{1} @ {0}", "neg": "-{}", "bitwise_not": "~{}",
    "__invert__": "~{}", "__eq__": "{} == {}", "__ne__": "{} != {}", "__lt__": "{} < {}", "__le__": "{} <= {}",
    "__gt__": "{} > {}", "__ge__": "{} >= {}",
}  # fmt: skip
"""Operators by the methods that torch calls for them."""


@dataclass(frozen=True, slots=True)
class Traces:
    """Recordings of one forward: two numbers of rows, and a half format if the model computes in it."""

    first: Recording
    other_rows: Recording
    half: Recording | None


@dataclass(eq=False, slots=True)
class _Statement:
    """Statement of a call; `value` is its only result."""

    name: str
    text: str
    call: Call | None
    value: Value | None = None

    def lines(self) -> Iterator[str]:
        """Yield it as Python."""
        indent = ""
        if self.call is not None and self.call.without_gradients:
            yield "with torch.no_grad():"
            indent = "    "
        comment = f"  # {self.call.line}" if self.call is not None and self.call.line else ""
        yield f"{indent}{self.name} = {self.text}{comment}" if self.name else f"{indent}{self.text}{comment}"


@dataclass(eq=False, slots=True)
class _Written:
    """Layer as Python.

    Attributes:
        parts: names of the attributes, with what they are and their paths in the whole module.
        key: equal for layers that one class can be.
    """

    layer: CutLayer
    parts: dict[str, tuple[str, str]]
    body: list[str]
    arguments: list[str]
    key: object = None
    class_name: str = ""


class _Constants:
    """Constants of calls that depend on the rows, the format or the device."""

    def __init__(self, traces: Traces) -> None:
        self._rows = traces.first.rows, traces.other_rows.rows
        others = traces.other_rows.calls
        halves = others if traces.half is None else traces.half.calls
        if [call.target for call in halves] != [call.target for call in traces.first.calls]:
            halves = others  # it computes otherwise in half formats, so what they change is not known
        self._formats = {
            value: (value.dtype, twin.dtype)
            for call, half in zip(traces.first.calls, halves, strict=True)
            for value, twin in zip(call.results, half.results, strict=True)
        }
        self._formats |= {
            value: (value.dtype, torch.bfloat16)
            for value in traces.first.fields.values()
            if value.dtype.is_floating_point
        }
        self._twins = {call: pair for call, *pair in zip(traces.first.calls, others, halves, strict=True)}

    def of(self, call: Call) -> tuple[Call, Call]:
        """Return the same call for other rows, and in a half format."""
        others, half = self._twins[call]
        return others, half

    def follows_format(self, value: Value) -> bool:
        """Return whether a tensor is in the model's format, whichever that is."""
        return self._formats.get(value) == (torch.float32, torch.bfloat16)

    def number(self, call: Call, value: float, other: float) -> str:
        """Return a number that is not the same for other rows."""
        rows, other_rows = self._rows
        if (
            isinstance(value, int)
            and isinstance(other, int)
            and value * other_rows == other * rows
            and value % rows == 0
        ):
            return "rows" if value == rows else f"{value // rows} * rows"
        if value * rows == other * other_rows:
            return f"{value * rows!r} / rows"
        return refuse(
            call.line,
            f"{call.target} takes a number that is {value} for {rows} rows and {other} for {other_rows}; compute it from "
            "the rows inside of a module of its own",
        )


class _Writer:
    """Python of one layer."""

    def __init__(  # noqa: PLR0913 (what a layer is)
        self, layer: CutLayer, cut: Cut, constants: _Constants, *, is_first: bool, is_last: bool, numbered: bool
    ) -> None:
        self._layer, self._sent, self._constants = layer, cut.sent, constants
        self._is_first, self._is_last = is_first, is_last
        uses = [*(value for call in layer.calls for value in call.values()), *layer.returns]
        self._names = LayerNames(uses, numbered=numbered)
        self._statements: list[_Statement] = []
        self._uses_rows = False
        self._line: Call | None = None
        self._inline: dict[Value, str] = {}

    def write(self) -> _Written:
        self._names.uses.update(self._layer.takes)  # no argument takes another's name
        arguments = [self._names.bind(value) for value in self._layer.takes]
        self._names.uses.subtract(self._layer.takes)
        received = [] if self._is_first else [line for value in self._layer.takes for line in self._received(value)]
        if self._is_last:
            arguments.append(TARGETS)
            self._names.holder[TARGETS] = None
        for call in self._layer.calls:
            self._add(call)
        returned = [self._use(value) if self._is_last else self._handed_on(value) for value in self._layer.returns]
        result = ", ".join(returned)
        last = self._statements[-1] if self._statements else None
        if last is not None and len(returned) == 1 and last.name == result:
            last.name, last.text = "", f"return {last.text}"
        else:
            self._statements.append(_Statement("", f"return {result}", None))
        rows = [f"rows = len({arguments[0]})"] if self._uses_rows else []
        body = [*rows, *received, *(line for statement in self._statements for line in statement.lines())]
        return _Written(self._layer, self._names.parts, body, arguments)

    def key(self) -> object:
        """Return what layers of one class have in common: their code with numbers as names, and the kinds of their parts."""
        written = self.write()
        classes = {call.target: type(call.module).__name__ for call in self._layer.calls if call.module is not None}
        code = tuple(line.partition("  # ")[0] for line in written.body)
        return (
            tuple(written.arguments),
            code,
            tuple((kind, classes.get(path)) for kind, path in written.parts.values()),
        )

    def _received(self, value: Value) -> Iterator[str]:
        name, sent = self._names.of_value[value], self._sent[value]
        if self._names.uses[value] == 0:
            return
        if sent.dimension is None:
            end = "[0]" if value.has_gradient else "[0].detach()"
            yield f"{name} = {name}{end}  # the same for all rows"
        elif sent.dimension:
            yield f"{name} = {name}.movedim(0, {sent.dimension})"
        elif sent.parts > 1:
            yield f"{name} = {name}.flatten(0, 1)"

    def _handed_on(self, value: Value) -> str:
        name, sent = self._use(value), self._sent[value]
        if sent.is_broadcast and value not in self._layer.takes:
            self._uses_rows = True
            return f"{name}.expand(rows, {', '.join(['-1'] * (len(value.shape) - 1))})"
        if sent.dimension is None:
            self._uses_rows = True
            return f"{name}.expand(rows, {', '.join(['-1'] * len(value.shape))})".replace(", )", ")")
        if sent.dimension:
            return f"{name}.movedim({sent.dimension}, 0)"
        return f"{name}.unflatten(0, (-1, {sent.parts}))" if sent.parts > 1 else name

    def _add(self, call: Call) -> None:
        """Add the statement of a call, with those inside of it that its line alone uses."""
        self._line = call
        self._inline = self._inlined(call)
        text = self._call(call)
        if call.target == "__setitem__":
            self._statements.append(_Statement("", text, call))
            self._names.of_value[call.results[0]] = self._names.of_value[call.arguments[0]]
        elif len(call.results) == 1 and not call.results[0].access:
            (value,) = call.results
            self._statements.append(_Statement(self._names.bind(value), text, call, value))
        else:
            root = self._names.free(call.results[0].name if call.results else "made")
            self._names.holder[root] = None
            self._statements.append(_Statement(root, text, call))
            for value in call.results:
                self._names.of_value[value] = f"{root}{value.access}"

    def _inlined(self, call: Call) -> dict[Value, str]:
        """Take back the last statements that make arguments of this call for it alone, in its line; the order stays."""
        inlined: dict[Value, str] = {}
        for value in reversed(list(call.values())):
            last = self._statements[-1] if self._statements else None
            if last is None or last.value is not value or self._names.uses[value] != 1 or last.call is None:
                continue
            if last.call.line == call.line and last.call.without_gradients == call.without_gradients:
                inlined[value] = last.text
                self._names.holder.pop(last.name)
                self._statements.pop()
        return inlined

    def _call(self, call: Call) -> str:
        arguments, keywords = self._texts(call)
        if call.kind == "property":
            return f"{_closed(arguments[0])}.{call.target}"
        if call.kind == "method" and not keywords:
            if call.target == "__getitem__":
                return f"{_closed(arguments[0])}[{self._index(call)}]"
            if call.target == "__setitem__":
                return f"{_closed(arguments[0])}[{self._index(call)}] = {arguments[2]}"
            pattern = _INFIX.get(call.target)
            if pattern is not None and pattern.count("{") == len(arguments):
                return pattern.format(*map(_closed, arguments))
        words = [*arguments, *(f"{name}={text}" for name, text in keywords.items())]
        if call.kind == "method":
            return f"{_closed(words[0])}.{call.target}({', '.join(words[1:])})"
        target = f"self.{self._names.part('module', call.target)}" if call.kind == "module" else call.target
        return f"{target}({', '.join(words)})"

    def _texts(self, call: Call) -> tuple[list[str], dict[str, str]]:
        other, half = self._constants.of(call)
        arguments = [
            self._text(*triple) for triple in zip(call.arguments, other.arguments, half.arguments, strict=True)
        ]
        keywords = {
            name: self._text(value, other.keywords[name], half.keywords[name]) for name, value in call.keywords.items()
        }
        return arguments, keywords

    def _index(self, call: Call) -> str:
        other, half = self._constants.of(call)
        index, others, halves = call.arguments[1], other.arguments[1], half.arguments[1]
        if isinstance(index, tuple) and index:
            return ", ".join(self._text(*triple) for triple in zip(index, others, halves, strict=True))
        return self._text(index, others, halves)

    def _text(self, value: Any, other: Any, half: Any) -> str:
        """Return an argument as Python, given what it is for other rows and in a half format."""
        call = self._line
        assert call is not None
        if isinstance(value, Value):
            return self._use(value)
        if isinstance(value, Opaque):
            refuse(
                call.line,
                f"{call.target} takes a {value.class_name}, but layers take tensors, numbers and collections of these; leave "
                "it out (such as a cache: use_cache=False), or make it inside of the module",
            )
        if isinstance(value, slice | tuple | list | dict):
            return self._collection(value, other, half)
        if isinstance(value, torch.dtype) and value != half:
            return f"{self._like(has_format=True)}.dtype"
        if isinstance(value, torch.device):
            return f"{self._like(has_format=False)}.device"
        if isinstance(value, int | float) and not isinstance(value, bool) and value != other:
            self._uses_rows = True
            return self._constants.number(call, value, other)
        return _literal(value)

    def _collection(self, value: Any, other: Any, half: Any) -> str:
        if isinstance(value, slice):
            ends = ((part.start, part.stop, part.step) for part in (value, other, half))
            parts = ["" if part[0] is None else self._text(*part) for part in zip(*ends, strict=True)]
            return ":".join(parts[:2] if value.step is None else parts)
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key!r}: {self._text(value[key], other[key], half[key])}" for key in value) + "}"
        items = [self._text(*item) for item in zip(value, other, half, strict=True)]
        if isinstance(value, list):
            return f"[{', '.join(items)}]"
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"

    def _like(self, *, has_format: bool) -> str:
        """Return a tensor on the layer's device, or one that has its format, too."""
        call = self._line
        assert call is not None
        bound = [value for value in self._names.holder.values() if value is not None]
        for value in (*call.values(), *reversed(bound)) if has_format else (*self._layer.takes, *call.values(), *bound):
            if value.call is not None and value.call.line == call.line:
                continue  # it may become part of this line's expression
            name = self._names.of_value.get(value, "")
            if self._names.holder.get(name) is value and (self._constants.follows_format(value) or not has_format):
                return name
        return "next(self.parameters())"

    def _use(self, value: Value) -> str:
        text = self._expression(value)
        self._names.uses[value] -= 1
        return text

    def _expression(self, value: Value) -> str:
        if value.source == TARGETS and value.is_field:
            return TARGETS
        if value in self._inline:
            return self._inline[value]
        if value.is_attribute:
            return f"self.{self._names.part('weight' if value.is_weight else 'buffer', value.source)}"
        return self._names.of_value[value]


def _closed(text: str) -> str:
    """Return an expression that binds as tightly as a name."""
    outside, former = text, ""
    while outside != former:
        outside, former = re.sub(r"\([^()\[\]]*\)|\[[^()\[\]]*\]", "", outside), outside
    binds = re.fullmatch(r"[\w.]*", outside) and not (outside[:1].isdigit() and "." in outside)
    return text if binds else f"({text})"


def _literal(value: Any) -> str:
    if isinstance(value, float) and value in {float("inf"), -float("inf")}:
        return f'float("{value}")'
    if value is Ellipsis:
        return "..."
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, str):
        return json.dumps(value)
    return str(value) if isinstance(value, torch.memory_format | torch.layout) else repr(value)


@dataclass(frozen=True, slots=True)
class LayerSource:
    """Python module of layers.

    Attributes:
        layers: class and paths of the parts of each layer.
    """

    text: str
    layers: list[tuple[str, list[str]]] = field(default_factory=list)


def layer_source(cut: Cut, traces: Traces, *, module: str, function: str, command: str) -> LayerSource:
    """Return the Python module of the layers of `module:function`, which `command` writes."""
    constants = _Constants(traces)
    written: list[_Written] = []
    classes: dict[object, _Written] = {}
    names: set[str] = {"CustomModel", "Tensor"}
    for place, layer in enumerate(cut.layers):
        writer, numbered = (
            _Writer(layer, cut, constants, is_first=place == 0, is_last=place == len(cut.layers) - 1, numbered=numbered)
            for numbered in (False, True)
        )
        layer_class = writer.write()
        layer_class.key = numbered.key()
        first = classes.setdefault(layer_class.key, layer_class)
        if first is layer_class:
            layer_class.class_name = _class_name(layer, place, len(cut.layers), names)
            names.add(layer_class.class_name)
        layer_class.class_name = first.class_name
        written.append(layer_class)
    layers = [(layer_class.class_name, [path for _, path in layer_class.parts.values()]) for layer_class in written]
    texts = [
        _class(layer_class, [paths for name, paths in layers if name == layer_class.class_name])
        for layer_class in classes.values()
    ]
    body = "\n\n\n".join(texts)
    calls_loss = re.search(r"(?<![\w.])loss\(", body) is not None
    imported = ", ".join(sorted([function, "rows", *(["loss"] if calls_loss else [])], key=str.lower))
    needs_functional, needs_torch = "functional." in body, re.search(r"\btorch\.", body)
    lines = [
        f'"""Layers of {module}:{function}, as `{command}` cut it; yours to change."""',
        "",
        "from __future__ import annotations",
        "",
        *(["import torch"] if needs_torch else []),
        "from torch import Tensor, nn",
        *(["from torch.nn import functional"] if needs_functional else []),
        "",
        "from trainwright_worker.layers.custom import CustomModel",
        "from trainwright_worker.layers.custom_makers import part",
        "",
        f"from {module} import {imported}",
    ]
    model = [
        "def layers() -> CustomModel:",
        "    return CustomModel(",
        "        layers=[",
        *(f"            {line}," for line in _layer_lines(layers)),
        "        ],",
        "        rows=rows,",
        f"        build={function},",
        "    )",
    ]
    return LayerSource("\n".join([*lines, "", "", body, "", "", *model]) + "\n", layers)


def _class_name(layer: CutLayer, place: int, count: int, taken: set[str]) -> str:
    if layer.block is not None and layer.block.module is not None:
        name = type(layer.block.module).__name__
    elif place == 0:
        name = "First"
    elif place == count - 1:
        name = "Last"
    else:
        name = "Between"
    return next(free for free in numbered_names(name) if free not in taken)


def _class(layer_class: _Written, paths: Sequence[Sequence[str]]) -> str:
    names = [", ".join(path) for path in paths]
    shown = (names[0] if len(set(names)) == 1 else f"{names[0]} … {names[-1]}") or "no modules"
    lines = [f"class {layer_class.class_name}(nn.Module):", f'    """{shown[:100]}"""', ""]
    if layer_class.parts:
        kinds = {"module": "nn.Module", "weight": "nn.Parameter", "buffer": "Tensor"}
        given = ", ".join(f"{name}: {kinds[kind]}" for name, (kind, _) in layer_class.parts.items())
        lines += [f"    def __init__(self, {given}) -> None:", "        super().__init__()"]
        for name, (kind, _) in layer_class.parts.items():
            kept = (
                f'self.register_buffer("{name}", {name}, persistent=False)'
                if kind == "buffer"
                else f"self.{name} = {name}"
            )
            lines.append(f"        {kept}")
        lines.append("")
    arguments = "".join(f", {name}: Tensor" for name in layer_class.arguments)
    count = len(layer_class.layer.returns)
    result = "Tensor" if count == 1 else f"tuple[{', '.join(['Tensor'] * count)}]"
    lines.append(f"    def forward(self{arguments}) -> {result}:")
    return "\n".join([*lines, *(f"        {line}" for line in layer_class.body)])


def _layer_lines(layers: Sequence[tuple[str, list[str]]]) -> Iterator[str]:
    """Yield the items of the list of layers, with those of one class whose paths count on as one item."""
    place = 0
    while place < len(layers):
        name, paths = layers[place]
        end = place + 1
        while end < len(layers) and layers[end][0] == name and _counted(paths, end - place) == layers[end][1]:
            end += 1
        quoted = "".join(f', "{path}"' for path in paths)
        if end - place < 2 or (start := _number(paths)) is None:
            yield f"part({name}{quoted})"
            place += 1
            continue
        pattern = "".join(
            f', f"{_with_number(path)}"' if _with_number(path) != path else f', "{path}"' for path in paths
        )
        count = f"{end - place}" if start == 0 else f"{start}, {start + end - place}"
        yield f"*[part({name}{pattern}) for number in range({count})]"
        place = end


def _number(paths: Sequence[str]) -> int | None:
    numbers = {int(match[0]) for path in paths if (match := re.search(r"(?<=\.)\d+(?=\.|$)|^\d+", path))}
    return numbers.pop() if len(numbers) == 1 else None


def _with_number(path: str, text: str = "{number}") -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+", lambda _: text, path, count=1)


def _counted(paths: Sequence[str], step: int) -> list[str] | None:
    start = _number(paths)
    return None if start is None else [_with_number(path, str(start + step)) for path in paths]
