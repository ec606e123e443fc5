"""Projection onto a vocabulary: rows of half-precision logits and gradients are aligned, and the values are a product's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from trainwright.families import Bert, Gpt, Llama
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright_worker.executor.stage_module import TORCH_DTYPES
from trainwright_worker.layers.layer import to_device
from trainwright_worker.layers.registry import make_family_layers
from trainwright_worker.layers.tensor_parallel import TensorShard
from trainwright_worker.layers.token_models import project


class Products(TorchDispatchMode):
    """Records the strides, in bytes, of every matrix that a product reads or writes."""

    def __init__(self) -> None:
        super().__init__()
        self.strides: set[int] = set()

    def __torch_dispatch__(self, function: Callable[..., Any], _: object, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket in {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_}:
            matrices = [value for value in (*args, result) if isinstance(value, Tensor) and value.dim() == 2]
            self.strides |= {max(matrix.stride()) * matrix.element_size() for matrix in matrices}
        return result


@pytest.mark.parametrize("dtype", [Dtype.FLOAT16, Dtype.BFLOAT16])
@pytest.mark.parametrize(
    "family", [Gpt(1, 64, 4, 8, 150), Llama(1, 64, 4, 8, 150), Bert(1, 64, 4, 8, 150, next_sentence=False)]
)
@pytest.mark.parametrize("degree", [1, 2])
def test_rows_of_a_heads_products_are_aligned(family: Gpt | Llama | Bert, dtype: Dtype, degree: int) -> None:
    model = Model.of(family, dtype)
    layers, number = make_family_layers(model), len(model.layers) - 1
    head = layers.make(number, seed=1, shard=TensorShard(0, degree), shared={}).to(TORCH_DTYPES[dtype])
    data = layers.rows(head.reads, seed=1, iteration=0, first=0, count=2)
    hidden = torch.randn(2, 8, 64, dtype=TORCH_DTYPES[dtype], requires_grad=True)
    with Products() as products:
        head((hidden,), to_device(data, torch.device("cpu"), TORCH_DTYPES[dtype])).loss.backward()
    assert products.strides
    assert all(stride % 16 == 0 for stride in products.strides), products.strides


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("entries", [48, 53, 150])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_values_and_gradients_are_those_of_a_linear_layer(dtype: torch.dtype, entries: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = [(3, 5, 64), (entries, 64), *([(entries,)] if has_bias else [])]
    values = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    upstream = torch.randn(3, 5, entries, generator=generator)

    def gradients(product: Callable[..., Tensor]) -> list[Tensor]:
        inputs = [value.clone().requires_grad_() for value in values]
        logits = product(*inputs).float()
        logits.backward(upstream)
        return [logits.detach(), *(value.grad.float() for value in inputs)]

    tolerance = {torch.float32: 0.0, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    for found, expected in zip(gradients(project), gradients(functional.linear), strict=True):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))
