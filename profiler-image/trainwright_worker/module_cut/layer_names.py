"""Names in the Python of a layer: of its tensors, and of the parts of the whole module that it takes."""

from __future__ import annotations

import keyword
import re
from collections import Counter
from collections.abc import Iterable
from typing import Final

import torch

from trainwright_worker.module_cut.forward_calls import Value

_RESERVED: Final = ("self", "rows", "torch", "nn", "functional", "build", "loss", *keyword.kwlist)


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
        candidates = (name, *(f"{name}_{number}" for number in range(2, 10_000)))
        return next(name for name in candidates if name not in self.holder or self._is_over(self.holder[name]))

    def _is_over(self, value: Value | None) -> bool:
        return value is not None and self.uses[value] == 0

    def part(self, kind: str, path: str) -> str:
        """Return the attribute for a part of the whole module."""
        if path not in self._part_names:
            words = [part for part in path.split(".") if not part.isdigit()]
            name = words[-1] if words else "module"
            if self._numbered:
                name = f"part_{len(self.parts)}"
            elif path.rpartition(".")[2].isdigit() and name.endswith("s") and len(name) > 1:
                name = name.removesuffix("s")  # one of several
            taken = {*self.parts, *dir(torch.nn.Module)}
            candidates = (name, *(f"{name}_{number}" for number in range(2, 10_000)))
            self._part_names[path] = next(name for name in candidates if name not in taken)
            self.parts[self._part_names[path]] = kind, path
        return self._part_names[path]
