"""Choice of the modules whose code is cut: those that hold repeated blocks, of which each takes what the one before it made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trainwright_worker.module_cut.recorder import Forward, module_calls, tensors_in

_MANY_BLOCKS = 8
"""Blocks in a row that are enough to plan with; fewer ones of different sizes are stages, which are cut into their own."""


class _Ancestors(TorchFunctionMode):
    """Record of the modules that a forward's tensors come from, as bits of an integer."""

    def __init__(self) -> None:
        super().__init__()
        self._bits: dict[int, int] = {}
        self._kept: list[Tensor] = []
        self.inputs: dict[nn.Module, int] = {}
        self.own_bit: dict[nn.Module, int] = {}

    def called(self, original: Any, module: nn.Module, arguments: Any, keywords: Any) -> Any:
        bit = 1 << len(self.own_bit)
        before = self._of((arguments, keywords))
        if module not in self.own_bit:
            self.own_bit[module], self.inputs[module] = bit, before
        result = original(module, *arguments, **keywords)
        self._add(result, before | self.own_bit[module])
        return result

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._add(result, self._of((args, kwargs)))
        return result

    def _of(self, nested: Any) -> int:
        bits = 0
        for _, tensor in tensors_in(nested):
            bits |= self._bits.get(id(tensor), 0)
        return bits

    def _add(self, result: Any, bits: int) -> None:
        for _, tensor in tensors_in(result):
            self._kept.append(tensor)
            self._bits[id(tensor)] = self._bits.get(id(tensor), 0) | bits


def opened_modules(whole: nn.Module, forward: Forward, rows: Mapping[str, Tensor]) -> set[nn.Module]:
    """Return the modules whose own code is cut, the whole one among them, by running the forward once."""
    ancestors = _Ancestors()
    with ancestors, module_calls(ancestors.called):
        forward(rows)
    opened = _opened(whole, ancestors, frozenset())
    blocks = {type(block) for module in opened for block in _kept(module, ancestors, opened)}
    opened = _opened(whole, ancestors, blocks)
    classes = Counter(type(child) for child in whole.children() if is_composite(child))
    classes.pop(nn.Sequential, None)
    if opened == {whole} and max(classes.values(), default=0) < 2:
        opened.update(_rows_of_modules(whole))
    return opened


def _rows_of_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the plain sequences in a module and in each other."""
    for child in module.children():
        if type(child) is nn.Sequential:
            yield child
            yield from _rows_of_modules(child)


def _opened(whole: nn.Module, ancestors: _Ancestors, blocks: Collection[type]) -> set[nn.Module]:
    """Return the modules to cut, where none of these classes of blocks is."""
    opened = {whole}
    _open(whole, ancestors, opened, blocks)
    return opened


def _kept(container: nn.Module, ancestors: _Ancestors, opened: set[nn.Module]) -> list[nn.Module]:
    """Return the blocks of a list that stay whole."""
    if not _is_chain(container, ancestors):
        return []
    return [child for child in container.children() if child not in opened and type(child) is not nn.Sequential]


def is_composite(module: nn.Module) -> bool:
    """Return whether a module is more than one of torch's own, such as Linear."""
    return bool(list(module.children())) or not type(module).__module__.startswith("torch.nn.")


def _open(module: nn.Module, ancestors: _Ancestors, opened: set[nn.Module], blocks: Collection[type]) -> bool:
    """Open the module and what leads from it to repeated blocks; return whether there are any in it."""
    items = [child for child in module.children() if is_composite(child)]
    chained = _is_chain(module, ancestors)
    are_stages = len(items) < _MANY_BLOCKS and len({_size(item) for item in items}) == len(items)
    holds_blocks = chained
    for child in module.children():
        if chained and is_composite(child) and not (are_stages or type(child) is nn.Sequential):
            continue
        if type(child) not in blocks:
            holds_blocks = _open(child, ancestors, opened, blocks) or holds_blocks
    if holds_blocks:
        opened.add(module)
    return holds_blocks


def _is_chain(container: nn.Module, ancestors: _Ancestors) -> bool:
    """Return whether a list of modules has two of one class of which the second takes what the first returned."""
    if not isinstance(container, nn.ModuleList | nn.Sequential | nn.ModuleDict):
        return False
    blocks = [child for child in container.children() if is_composite(child) and child in ancestors.own_bit]
    classes = Counter(type(block) for block in blocks)
    repeated = [block for block in blocks if classes[type(block)] > 1]
    return any(bool(ancestors.inputs[later] & ancestors.own_bit[earlier]) for earlier, later in pairwise(repeated))


def _size(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())
