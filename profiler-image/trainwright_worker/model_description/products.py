"""Products of a user's layer by shape, for the planner's estimates from data sheets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, Final, NamedTuple

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from trainwright.families import MAX_PRODUCTS, CustomProduct, ProductName

_MATRICES: Final = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}
"""Operators that multiply two matrices, and the place of the first one among their arguments."""


class Product(NamedTuple):
    """One product for all rows; `first` and `second` are the values of its matrices, the first of `batch` × `positions` rows.

    Without a name its shape is unknown.
    """

    name: ProductName | None
    flops: float
    batch: int
    positions: int
    first: int
    second: int
    outputs: int
    is_causal: bool = False


def product_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Product | None:
    """Return the product that an operator of ATen computes; None if it computes none."""
    name = func.overloadpacket.__name__
    count = flop_registry.get(func.overloadpacket)
    if "scaled_dot_product" in name and "backward" not in name:
        return _attention(func, args, kwargs)
    if count is None:
        return None
    flops = float(count(*args, **kwargs, out_val=result))
    if name in _MATRICES:
        place = _MATRICES[name]
        first, second = args[place], args[place + 1]
        batch = first.shape[0] if first.dim() == 3 else 1
        return Product("matmul", flops, batch, first.shape[-2], _stored(first), _stored(second), result.numel())
    if name == "convolution":
        values, weight, is_transposed = args[0], args[1], args[6]
        pixels = prod((values if is_transposed else result).shape[2:])
        return Product(
            "convolution", flops, 1, values.shape[0] * pixels, values.numel(), weight.numel(), result.numel()
        )
    return Product(None, flops, 1, 1, 0, 0, 0)


def _attention(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Product:
    names = [argument.name for argument in func._schema.arguments]  # noqa: SLF001 - there is no public name for it
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    query, key, value = (given[name] for name in ("query", "key", "value"))
    heads = prod(query.shape[:-2])
    positions, keys = query.shape[-2], key.shape[-2]
    flops = 2.0 * heads * positions * keys * (query.shape[-1] + value.shape[-1])
    read = query.numel() + key.numel() + value.numel()
    written = heads * positions * value.shape[-1]
    return Product("attention", flops, heads, positions, read, 0, written, bool(given.get("is_causal")))


def _stored(value: Tensor) -> int:
    """Return the values of a tensor in memory, where an expanded one has fewer."""
    return min(value.numel(), value.untyped_storage().nbytes() // value.itemsize)


def products_per_row(fewer: Sequence[Product], more: Sequence[Product], rows: int) -> tuple[CustomProduct, ...]:
    """Return the products of each of `rows` further rows by shape, the largest first; none where their numbers differ."""
    if len(fewer) != len(more):
        return ()
    by_row = [_per_row(few, many, rows) for few, many in zip(fewer, more, strict=True)]
    calls = Counter(product for product in by_row if product is not None)
    grouped = [replace(product, calls=number) for product, number in calls.items()]
    grouped.sort(key=lambda product: product.calls * product.forward_flops_per_row, reverse=True)
    if len(grouped) > MAX_PRODUCTS:
        grouped[MAX_PRODUCTS - 1 :] = [_merged(grouped[MAX_PRODUCTS - 1 :])]
    return tuple(grouped)


def _per_row(few: Product, many: Product, rows: int) -> CustomProduct | None:
    """Return what one further row adds; None for products of weights alone, and where only sums over rows get longer."""
    flops, first, second, outputs = (
        (getattr(many, part) - getattr(few, part)) / rows for part in ("flops", "first", "second", "outputs")
    )
    if many.name is None or min(flops, outputs, first + second) <= 0:
        return None
    name, inputs = many.name, first
    positions: float
    if name == "attention":
        positions = many.positions
    elif first > 0 and second > 0 and many.batch > few.batch:  # each row has both matrices
        name, positions, inputs = "batched_matmul", many.positions, first + second
    elif first > 0:
        positions = (many.batch * many.positions - few.batch * few.positions) / rows
    else:  # the first matrix is the same for all rows
        positions, inputs = outputs / many.positions, second
    flops, inputs, outputs = (max(size, 1.0) for size in (flops, inputs, outputs))
    return CustomProduct(name, max(round(positions), 1), flops, inputs, outputs, is_causal=many.is_causal)


def _merged(products: Sequence[CustomProduct]) -> CustomProduct:
    """Return the mean of products of several shapes, as often as all of them are called."""
    calls = sum(product.calls for product in products)

    def mean(field: str) -> float:
        return sum(float(product.calls * getattr(product, field)) for product in products) / calls

    return CustomProduct(
        "matmul",
        max(round(mean("positions_per_row")), 1),
        mean("forward_flops_per_row"),
        mean("input_elements_per_row"),
        mean("output_elements_per_row"),
        calls,
    )
