"""Forward and backward of a user's layer without a GPU: what they compute, keep, take for a moment and move."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainwright.families import CustomProduct
from trainwright.layer import NO_TRAFFIC, Traffic
from trainwright_worker.fused_attention import FusedAttention
from trainwright_worker.layers.custom import CustomLayers, is_without_backward, made_on
from trainwright_worker.layers.custom_boundaries import example_inputs
from trainwright_worker.layers.custom_errors import format_value
from trainwright_worker.layers.custom_layer import CustomLayer
from trainwright_worker.live_bytes import AllocationTracker, passed_on, storage_id
from trainwright_worker.model_description.formats import in_format
from trainwright_worker.model_description.products import Product, product_of, products_per_row

_ROWS: Final = {"meta": 8, "cpu": 2}
"""Rows of the first of two runs, by device, the second has twice as many; their common part does not depend on rows. Enough
for rows to take more than the gradients of weights where that costs nothing.
"""

_NO_KERNEL = ("empty", "empty_like", "empty_strided", "_unsafe_view")
"""Operators of ATen besides views that only allocate or rename."""

_STATISTICS: Final = ("running_mean", "running_var")
"""Arguments that operators of batch normalisation change in training."""

_PRODUCTS_AND_COPIES: Final = (
    *("mm", "matmul", "mv", "convolution", "attention", "linear"),
    *("copy", "clone", "cat", "stack", "fill", "zero", "zeros", "ones", "full", "nll_loss"),
)
"""Parts of names of operators that are priced as products, or that a runtime's streaming ratio counts with the others."""


@dataclass(frozen=True, slots=True)
class PassCounts:
    """Counts of a layer's forward and backward for each row; the last five are 0 where the backward does not run without a GPU.

    Attributes:
        forward_flops: of products.
        saved_elements: values of the number format that the forward keeps for the backward, the layer's input included.
        saved_bytes: bytes that it keeps in formats of their own.
        half_saved_bytes: bytes of all that it keeps in half formats; 0: its values take 2 bytes there.
        passed_elements: floats of the input that it hands on unchanged, which what it keeps leaves out.
        changed_buffer_bytes: of the buffers that a forward writes, or puts others in the place of, whatever the rows.
        products: of the forward, by shape.
        workspace_bytes: what one more row adds to the peak besides what the layer keeps, in float32.
        forward_kernels, backward_kernels: operators that compute, whatever the rows.
        traffic: of operators besides products, copies and conversions, in bfloat16 if the layer runs in that.
    """

    forward_flops: float
    saved_elements: float
    saved_bytes: float
    half_saved_bytes: float
    passed_elements: float
    changed_buffer_bytes: int
    products: tuple[CustomProduct, ...]
    workspace_bytes: float = 0.0
    forward_kernels: int = 0
    backward_kernels: int = 0
    traffic: Traffic = NO_TRAFFIC


class _ForwardError(RuntimeError):
    """Failure of a forward, with the sentence that states what to change."""

    def __init__(self, sentence: ValueError) -> None:
        super().__init__(str(sentence))
        self.sentence = sentence


def count_passes(layers: CustomLayers, number: int) -> PassCounts:
    """Return counts of a layer alone, on torch's meta device or, if it needs values, the CPU.

    Raises ValueError if its forward fails on both.
    """
    device = "meta"
    try:
        runs = _runs(layers, number, device, torch.float32)
    except RuntimeError:  # deliberate: a layer that needs values runs on the CPU
        device = "cpu"
        try:
            runs = _runs(layers, number, device, torch.float32)
        except _ForwardError as error:
            raise error.sentence from error
    try:
        half_runs = _runs(layers, number, device, torch.bfloat16)
    except RuntimeError:  # deliberate: it needs float32
        half_runs = runs
    fewer, more = runs
    whole, others = runs.per_row("saved_bytes"), max(runs.per_row("other_saved_bytes"), 0.0)
    elements = max(whole - others, 0.0) / torch.float32.itemsize
    half_bytes = max(half_runs.per_row("saved_bytes"), 0.0)
    counts = PassCounts(
        max(runs.per_row("flops"), 0.0),
        elements,
        others,
        0.0 if half_runs is runs or half_bytes == torch.bfloat16.itemsize * elements + others else half_bytes,
        max(runs.per_row("passed_elements"), 0.0),
        _changed_buffer_bytes(layers, number, device),
        products_per_row(fewer.products, more.products, more.rows - fewer.rows),
    )
    if not (fewer.has_backward and more.has_backward):  # profiles measure it
        return counts
    return replace(
        counts,
        workspace_bytes=max(runs.per_row("peak_bytes") - runs.per_row("saved_bytes"), 0.0),
        forward_kernels=fewer.forward_kernels,
        backward_kernels=fewer.backward_kernels,
        traffic=_traffic(half_runs),
    )


def _traffic(runs: _Runs) -> Traffic:
    """Return what each further row moves, by operators that write more for it: not those of weights and their gradients."""
    fewer, more = runs
    rows = more.rows - fewer.rows

    def per_row(few: list[_Moved], many: list[_Moved]) -> tuple[float, float]:
        if len(few) != len(many):
            return 0.0, 0.0
        by_row = [(first, second) for first, second in zip(few, many, strict=True) if second.written > first.written]
        elements, others = (sum(second[part] - first[part] for first, second in by_row) for part in (0, 1))
        return elements / rows, others / rows

    forwards = fewer.forward_kernels, more.forward_kernels
    forward = per_row(fewer.moved[: forwards[0]], more.moved[: forwards[1]])
    return Traffic(*forward, *per_row(fewer.moved[forwards[0] :], more.moved[forwards[1] :]))


def _changed_buffer_bytes(layers: CustomLayers, number: int, device: str) -> int:
    """Return the bytes of the buffers that a layer's forward writes, or puts others in the place of."""
    with made_on(layers, number, device) as layer:
        before = {name: (buffer, storage_id(buffer)) for name, buffer in layer.named_buffers()}
        if not before:
            return 0
        inputs = example_inputs(layers, layer, layers.probed_rows, torch.float32)
        with torch.no_grad(), _Writes() as writes:
            layer(*inputs)
        behind = dict(layer.named_buffers())
    return sum(
        buffer.nbytes
        for name, (buffer, storage) in before.items()
        if storage in writes.storages or behind.get(name) is not buffer
    )


class _Writes(TorchDispatchMode):
    """Recorder of the storages that operators write, whether autograd notices or not."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        arguments = func._schema.arguments  # noqa: SLF001 - there is no public name for it
        given = {**{argument.name: value for argument, value in zip(arguments, args, strict=False)}, **(kwargs or {})}
        for argument in arguments:
            alias = argument.alias_info
            # Batch normalisation does not declare that it writes its running statistics.
            writes_statistics = argument.name in _STATISTICS and (given.get("training") or given.get("train"))
            if (alias is not None and alias.is_write) or writes_statistics:
                values = tree_leaves(given.get(argument.name))
                self.storages |= {storage_id(value) for value in values if isinstance(value, Tensor)}
        return func(*args, **(kwargs or {}))


class _Moved(NamedTuple):
    """Values in the layer's format, and bytes in others, that an operator reads and writes; bytes that it writes."""

    elements: int
    others: int
    written: int


@dataclass(frozen=True, slots=True)
class _Run:
    rows: int
    saved_bytes: int
    other_saved_bytes: int
    passed_elements: int
    peak_bytes: int
    forward_kernels: int
    backward_kernels: int
    has_backward: bool
    products: list[Product]
    moved: list[_Moved]

    @property
    def flops(self) -> float:
        return sum(product.flops for product in self.products)

    @classmethod
    def of(cls, layers: CustomLayers, layer: CustomLayer, rows: int, dtype: torch.dtype) -> _Run:
        boundary, data = example_inputs(layers, layer, rows, dtype)
        formats = layers.formats(layer.number, dtype)
        gradients = tuple(
            torch.zeros(rows, *shape, dtype=own)
            for shape, own in zip(layers.boundary(layer.number), formats, strict=True)
        )
        without_backward = is_without_backward(layers, layer.number)
        for parameter in layer.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        of_weights = [parameter.grad for parameter in layer.parameters() if parameter.grad is not None]
        existing = [*boundary, *data.values(), *gradients, *of_weights, *layer.parameters(), *layer.buffers()]
        saved = _Saved(layer, () if without_backward else (*boundary, *data.values()), dtype)
        with FusedAttention(), AllocationTracker(existing) as tracker, _Kernels(dtype) as kernels:
            try:
                with torch.set_grad_enabled(not without_backward), saved:
                    made = layer.compute([*boundary, *data.values()])
                    output = layer.output(made)
            except RuntimeError as error:
                failure = layers.failure(layer, [*boundary, *data.values()], error, when=f" for {rows} rows")
                raise _ForwardError(failure) from error
            _check_shapes(layers, layer, made, rows)
            passed = [] if without_backward or layer.is_last else passed_on(boundary, made)
            del made
            forward_kernels, products = len(kernels.moved), list(kernels.products)
            saved_bytes, other_saved_bytes = saved.count(passed)
            has_backward = True
            if not without_backward:
                try:
                    output.backward(gradients)
                except RuntimeError:  # deliberate: the forward counts
                    has_backward = False
        return cls(
            rows,
            saved_bytes,
            other_saved_bytes,
            sum(value.numel() for value in passed),
            tracker.peak_bytes,
            forward_kernels,
            len(kernels.moved) - forward_kernels,
            has_backward,
            products,
            kernels.moved,
        )


def _check_shapes(layers: CustomLayers, layer: CustomLayer, made: Sequence[Tensor], rows: int) -> None:
    """Refuse tensors that do not grow with the rows, such as those of a first dimension of the size of the probe's rows."""
    shapes = [()] * len(made) if layer.is_last else layers.boundary(layer.number)
    for value, shape in zip(made, shapes, strict=True):
        if tuple(value.shape) != (expected := (rows, *shape)):
            raise layers.error(
                f"{layer.label} returns {format_value(value)} for {rows} rows, not {expected}; make the first dimension of "
                "each tensor that of the rows, and the others the same for any number of them"
            )


class _Runs(NamedTuple):
    fewer: _Run
    more: _Run

    def per_row(self, field: str) -> float:
        """Return what each further row adds to a figure."""
        return float(getattr(self.more, field) - getattr(self.fewer, field)) / (self.more.rows - self.fewer.rows)


def _runs(layers: CustomLayers, number: int, device: str, dtype: torch.dtype) -> _Runs:
    rows = max(layers.model.min_rows, _ROWS[device])
    with made_on(layers, number, device) as layer:
        in_format(layer, dtype)
        return _Runs(*(_Run.of(layers, layer, count, dtype) for count in (rows, 2 * rows)))


class _Saved(torch.autograd.graph.saved_tensors_hooks):
    """Recorder of the tensors that a forward keeps for its backward, its inputs included and its weights not."""

    def __init__(self, layer: CustomLayer, inputs: Sequence[Tensor], dtype: torch.dtype) -> None:
        super().__init__(self._store, lambda saved: saved)
        self._dtype = dtype
        self._weights = {storage_id(parameter) for parameter in layer.parameters()}
        self._stored = {storage_id(value): value for value in inputs}

    def _store(self, saved: Tensor) -> Tensor:
        if storage_id(saved) not in self._weights:
            # Keeps it alive: addresses identify storages only while all of them live.
            self._stored[storage_id(saved)] = saved
        return saved

    def count(self, passed: Sequence[Tensor]) -> tuple[int, int]:
        """Return all bytes and those in other formats, and forget the tensors, so that the backward can free them.

        Inputs that the layer hands on count where they are used last.
        """
        for value in passed:
            self._stored.pop(storage_id(value), None)
        values = list(self._stored.values())
        self._stored.clear()
        return _storage_bytes(values), _storage_bytes(value for value in values if value.dtype is not self._dtype)


def _storage_bytes(values: Iterable[Tensor]) -> int:
    return sum(value.untyped_storage().nbytes() for value in values)


class _Kernels(TorchDispatchMode):
    """Recorder of what operators that compute move: neither views nor allocations."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self.moved: list[_Moved] = []
        self.products: list[Product] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if (product := product_of(func, args, kwargs or {}, result)) is not None:
            self.products.append(product)
        if not func.is_view and name not in _NO_KERNEL:
            counts = not any(word in name for word in _PRODUCTS_AND_COPIES)
            read, written = (
                [value for value in tree_leaves(part) if isinstance(value, Tensor)] for part in (args, result)
            )
            if name == "_log_softmax_backward_data":
                read = read[1:]  # a gradient of the targets alone, which the loss made and a fused one never writes
            self.moved.append(self._of(read, written) if counts else _Moved(0, 0, 0))
        return result

    def _of(self, read: list[Tensor], written: list[Tensor]) -> _Moved:
        elements = others = 0
        for value in (*read, *written):
            size = min(value.nbytes, value.untyped_storage().nbytes())  # an expanded value is read once
            if value.dtype is self._dtype:
                elements += size // value.itemsize
            else:
                others += size
        return _Moved(elements, others, sum(value.nbytes for value in written))
