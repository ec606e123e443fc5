"""Names in the Python of a layer: of its tensors, and of the parts of the whole module that it takes."""

from __future__ import annotations

import keyword
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Final

import torch

from trainwright_worker.module_cut.forward_calls import Value

_RESERVED: Final = ("self", "rows", "torch", "nn", "functional", "build", "loss", *keyword.kwlist)


def last_name(path: str) -> str:
    """Return the last part of a path that is no number."""
    parts = [part for part in path.split(".") if not part.isdigit()]
    return parts[-1] if parts else "module"


def numbered_names(name: str, separator: str = "") -> Iterator[str]:
    """Yield the name, and then with the numbers from 2 on."""
    yield name
    yield from (f"{name}{separator}{number}" for number in count(2))


class LayerNames:
    """Names of one layer; a tensor that is needed no more leaves its name to another one.

    Attributes:
        of_value: expression of each tensor.
        holder: tensor that has a name now; None if the name has another meaning.
        uses: how often each tensor is still needed.
        parts: names of the attributes, with what they are and their paths in the whole module.
    """

    def __init__(self, uses: Iterable[Value], *, numbered: bool) -> None:
        self.of_value: dict[Value, str] = {}
        self.holder: dict[str, Value | None] = dict.fromkeys(_RESERVED)
        self.uses = Counter(uses)
        self.parts: dict[str, tuple[str, str]] = {}
        self._part_names: dict[str, str] = {}
        self._numbered = numbered

    def bind(self, value: Value) -> str:
        """Return a name for a tensor from here on."""
        name = self.of_value[value] = self.free(value.name)
        self.holder[name] = value
        return name

    def free(self, name: str) -> str:
        """Return a name that is new, or that of a tensor that is needed no more."""
        if self._numbered:
            name = f"value_{len(self.holder)}"
        name = re.sub(r"\W", "_", name) or "value"
        return next(free for free in numbered_names(name, "_") if self._is_free(free))

    def _is_free(self, name: str) -> bool:
        value = self.holder.get(name)
        return name not in self.holder or (value is not None and self.uses[value] == 0)

    def part(self, kind: str, path: str) -> str:
        """Return the attribute for a part of the whole module."""
        if path not in self._part_names:
            name = last_name(path)
            if self._numbered:
                name = f"part_{len(self.parts)}"
            elif path.rpartition(".")[2].isdigit() and name.endswith("s") and len(name) > 1:
                name = name.removesuffix("s")  # one of several
            taken = {*self.parts, *dir(torch.nn.Module)}
            self._part_names[path] = next(free for free in numbered_names(name, "_") if free not in taken)
            self.parts[self._part_names[path]] = kind, path
        return self._part_names[path]
