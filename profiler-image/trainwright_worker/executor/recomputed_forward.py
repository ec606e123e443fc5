"""Forwards that are recomputed: what a user's layer changes in its first forward must not differ in the second one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainwright_worker.layers.layer import Boundary, Data, Layer, Output

BufferValues = tuple[Tensor | None, ...]
"""Values of the buffers that a layer changes; None for one that does not exist yet."""


@dataclass(frozen=True, slots=True)
class _Buffer:
    owner: nn.Module
    name: str

    def read(self) -> Tensor | None:
        buffer: Tensor | None = getattr(self.owner, self.name)
        return buffer

    def copy(self) -> Tensor | None:
        buffer = self.read()
        return None if buffer is None else buffer.detach().clone()

    def write(self, values: Tensor | None) -> None:
        """Set the values, in the same tensor if it can hold them, since a module may refer to that elsewhere."""
        buffer = self.read()
        if buffer is None or values is None or (buffer.shape, buffer.dtype) != (values.shape, values.dtype):
            setattr(self.owner, self.name, values)
        else:
            buffer.copy_(values)


def _buffers(module: nn.Module) -> list[_Buffer]:
    return [_Buffer(owner, name) for owner in module.modules() for name, _ in owner.named_buffers(recurse=False)]


class RecomputedForward:
    """First forwards of a layer, and what their recomputes need besides inputs, random numbers and weights.

    Which buffers and inputs a forward changes is found in the first one. Later ones copy only these: buffers for the recompute,
    inputs so that the forward changes the copy.
    """

    def __init__(self, number: int, module: Layer) -> None:
        self._number, self._module = number, module
        self._changed: tuple[_Buffer, ...] | None = None
        self._unchanged: tuple[_Buffer, ...] = ()
        self._changes_boundary = self._changes_fields = False

    def run(
        self, inputs: Boundary, fields: Data, compute: Callable[[Boundary, Data], Output]
    ) -> tuple[Output, BufferValues]:
        """Return the output of a forward whose backward recomputes it, and the values that it found in changed buffers.

        Raises RuntimeError if it changes a buffer that the layer's first forward did not change.
        """
        if self._module.has_pure_forward:
            return compute(inputs, fields), ()
        if self._changed is None:
            return self._run_and_find_changes(inputs, fields, compute)
        values = tuple(buffer.copy() for buffer in self._changed)
        states = [_state(buffer.read()) for buffer in self._unchanged]
        output = compute(
            _copied(inputs) if self._changes_boundary else inputs,
            {name: value.clone() for name, value in fields.items()} if self._changes_fields else fields,
        )
        for buffer, state in zip(self._unchanged, states, strict=True):
            if _state(buffer.read()) != state:
                raise RuntimeError(
                    f"layer {self._number} changes its buffer {buffer.name} now, but did not in its first forward, so that its "
                    "recompute lacks the former values; change it in every forward, or plan without recompute"
                )
        return output, values

    @contextmanager
    def repeating(self, values: BufferValues) -> Iterator[None]:
        """Give the changed buffers the values of a first forward, and those of now back at the end."""
        if not values or self._changed is None:
            yield
            return
        current = tuple(buffer.copy() for buffer in self._changed)
        self._write(values)
        yield
        self._write(current)

    def _run_and_find_changes(
        self, inputs: Boundary, fields: Data, compute: Callable[[Boundary, Data], Output]
    ) -> tuple[Output, BufferValues]:
        before = {buffer: buffer.copy() for buffer in _buffers(self._module)}
        passed_inputs, passed_fields = _copied(inputs), {name: value.clone() for name, value in fields.items()}
        output = compute(passed_inputs, passed_fields)
        buffers = _buffers(self._module)
        self._changed = tuple(buffer for buffer in buffers if _differ(before.get(buffer), buffer.read()))
        self._unchanged = tuple(buffer for buffer in buffers if buffer not in self._changed)
        self._changes_boundary = any(map(_differ, inputs, passed_inputs))
        self._changes_fields = any(_differ(value, passed_fields[name]) for name, value in fields.items())
        return output, tuple(before.get(buffer) for buffer in self._changed)

    @torch.no_grad()
    def _write(self, values: BufferValues) -> None:
        for buffer, value in zip(self._changed or (), values, strict=True):
            buffer.write(value)


def _copied(inputs: Boundary) -> Boundary:
    return tuple(tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in inputs)


def _differ(before: Tensor | None, behind: Tensor | None) -> bool:
    if before is None or behind is None:
        return before is not behind
    return before.dtype != behind.dtype or not torch.equal(before, behind)


def _state(tensor: Tensor | None) -> tuple[int, int]:
    """Return what differs when a tensor is replaced or changed in place."""
    return id(tensor), 0 if tensor is None else tensor._version  # noqa: SLF001 (there is no public name for it)
