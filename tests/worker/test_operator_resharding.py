"""Conversions between layouts on a mesh, and what is computed on parts there."""

from __future__ import annotations

import itertools

import pytest
import torch
from tensor_group import run_mesh
from torch.nn import functional

from trainwright_worker.layers.operators.layouts import (
    COPIED,
    EVERYWHERE,
    PARTIAL,
    REPLICATED,
    Layout,
    conversion_steps,
    dual,
)
from trainwright_worker.layers.operators.local_functions import attend_causally, divided_norm
from trainwright_worker.layers.operators.resharding import Mesh, reshard

ROWS, POSITIONS, WIDTH = 0, 1, 2
SHAPE = (2, 2)
SIZES = (4, 4, 8)
SOURCES = (REPLICATED, PARTIAL, ROWS, WIDTH)
TARGETS = (REPLICATED, COPIED, ROWS, WIDTH)


def values(seed: int, *sizes: int) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def local(mesh: Mesh, whole: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return what a rank has of a tensor; of partial sums the first rank has one half more than the tensor."""
    part = mesh.own_part(whole, layout).clone()
    for placement, coordinate, size in zip(layout, mesh.coordinates, mesh.shape, strict=True):
        if placement == PARTIAL:
            part *= 1.5 if coordinate == 0 else -0.5 / (size - 1)
    return part


def gradient_layout(layout: Layout) -> Layout:
    return dual(layout[0]), dual(layout[1])


def test_every_layout_becomes_every_other_one_and_its_gradient_the_reverse() -> None:
    pairs = list(itertools.product(itertools.product(SOURCES, repeat=2), itertools.product(TARGETS, repeat=2)))
    first, second, of_first = values(1, *SIZES), values(2, 4, 4, 4), values(3, *SIZES)

    def run(mesh: Mesh) -> None:
        for source, target in pairs:
            leaf = local(mesh, first, source).requires_grad_()
            made = reshard(mesh, (leaf, local(mesh, second, source)), source, target)
            torch.testing.assert_close(made[0], local(mesh, first, target), msg=f"{source} → {target}")
            torch.testing.assert_close(made[1], local(mesh, second, target), msg=f"{source} → {target}")
            made[0].backward(local(mesh, of_first, gradient_layout(target)))
            expected = local(mesh, of_first, gradient_layout(source))
            torch.testing.assert_close(leaf.grad, expected, msg=f"gradient of {source} → {target}")

    run_mesh(SHAPE, run)


def test_equal_layouts_need_no_step() -> None:
    assert conversion_steps(SHAPE, SIZES, (ROWS, WIDTH), (ROWS, WIDTH)) == ()


def test_change_of_the_sharded_axis_is_one_exchange() -> None:
    (step,) = conversion_steps(SHAPE, SIZES, (ROWS, POSITIONS), (ROWS, WIDTH))
    assert (step.dimension, step.source, step.target) == (1, POSITIONS, WIDTH)


def test_partial_sum_is_scattered_to_where_it_is_read_in_parts() -> None:
    (step,) = conversion_steps(SHAPE, SIZES, (ROWS, PARTIAL), (ROWS, WIDTH))
    assert (step.source, step.target) == (PARTIAL, WIDTH)


def test_conversion_shards_no_axis_unevenly_on_the_way() -> None:
    for step in conversion_steps(SHAPE, (2, 6, 6), (ROWS, REPLICATED), (WIDTH, REPLICATED)):
        assert step.target != POSITIONS
    with pytest.raises(ValueError, match="no conversion from layout"):
        conversion_steps(SHAPE, (4, 4, 6), EVERYWHERE, (WIDTH, WIDTH))


@pytest.mark.parametrize("has_bias", [False, True])
def test_norm_of_a_divided_width_equals_that_of_all_of_it(*, has_bias: bool) -> None:
    whole, weight = values(1, 2, 3, 12).requires_grad_(), values(2, 12).requires_grad_()
    bias = values(3, 12).requires_grad_() if has_bias else None
    gradient, layout = values(4, 2, 3, 12), (WIDTH, WIDTH)
    if bias is not None:
        expected = functional.layer_norm(whole, (12,), weight, bias, 1e-5)
    else:
        expected = functional.rms_norm(whole, (12,), weight, 1e-5)
    expected.backward(gradient)

    def run(mesh: Mesh) -> None:
        own = mesh.own_part(whole.detach(), layout).clone().requires_grad_()
        part = slice(*mesh.interval(layout, WIDTH, 12))
        own_weight = weight.detach()[part].clone().requires_grad_()
        own_bias = None if bias is None else bias.detach()[part].clone().requires_grad_()
        group = mesh.group((0, 1))
        assert group is not None
        made = divided_norm(own, own_weight, own_bias, group, 1e-5)
        made.backward(mesh.own_part(gradient, layout))
        close = {"rtol": 1e-5, "atol": 1e-5}  # computed in float32
        torch.testing.assert_close(made, mesh.own_part(expected.detach(), layout), **close)
        torch.testing.assert_close(own.grad, mesh.own_part(whole.grad, layout), **close)
        torch.testing.assert_close(own_weight.grad, weight.grad[part], **close)
        if bias is not None and own_bias is not None:
            torch.testing.assert_close(own_bias.grad, bias.grad[part], **close)

    run_mesh(SHAPE, run)


@pytest.mark.parametrize("groups", [2, 4])
def test_attention_of_some_queries_equals_theirs_among_all(groups: int) -> None:
    queries, keys, passed = values(1, 2, 6, 16), values(2, 2, 6, groups * 4), values(3, 2, 6, groups * 4)
    whole = attend_causally(queries, keys, passed, (4, groups), 0)
    for first in (0, 2, 4):
        part = attend_causally(queries[:, first : first + 2], keys, passed, (4, groups), first)
        torch.testing.assert_close(part, whole[:, first : first + 2])
