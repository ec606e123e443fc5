"""Parameters, FLOPs, saved bytes and boundaries of every layer kind equal those of the same layer in torch."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch_models import reference
from torch_models.measure import measure
from torch_models.parts import Reference

from trainwright.families import T5, Bert, Gpt, Llama, Moe, Swin, TransGan, Vit, WideResnet
from trainwright.families.blocks import AttentionShape
from trainwright.layer import Attention, Dtype
from trainwright.model import Model

FAMILIES = (
    Gpt(2, 32, 4, 24, 50),
    Gpt(2, 32, 4, 24, 50, dropout=True),
    Gpt(1, 32, 4, 24, 50, activation="relu"),
    Gpt(1, 32, 4, 24, 50, rotary_size=2, parallel_residual=True, tied_embeddings=False, dropout=True),
    Gpt(1, 32, 4, 24, 50, parallel_residual=True, shared_norm=True, key_value_heads=2, biases=False),
    Llama(2, 32, 4, 24, 50, intermediate_size=56, key_value_heads=2),
    Llama(1, 32, 4, 24, 50, tied_embeddings=True),
    Bert(2, 32, 4, 24, 50),
    Bert(2, 32, 4, 24, 50, intermediate_size=40, next_sentence=False),
    Bert(2, 32, 4, 24, 50, dropout=True),
    T5(2, 32, 4, 24, 50, decoder_sequence_length=6, decoder_layers=1, intermediate_size=48),
    T5(1, 32, 4, 24, 50, tied_embeddings=False),
    T5(1, 32, 4, 24, 50, decoder_sequence_length=6, dropout=True),
    T5(1, 24, 4, 24, 50, decoder_sequence_length=6, head_size=8, gated=True, dropout=True),
    Moe(2, 32, 4, 24, 50, experts=4, expert_every=2, intermediate_size=48, key_value_heads=2),
    Moe(1, 32, 4, 24, 50, experts=6, experts_per_token=1, intermediate_size=48, gated=False),
    Vit(2, 32, 4, 32, 8, classes=10),
    Swin((1, 2, 1), 16, (2, 4, 8), image_size=64, window_size=4, classes=10),
    WideResnet(50, 2, "both", 8, 64, classes=10),
    WideResnet(50, 3, "second", 4, 32, classes=10),
    TransGan((1, 1, 0, 1), 64, 2, 4, 16, window_size=8),
    TransGan((1,), 64, 2, 4, 16, dropout=True, fused_gelu=False),
)

KINDS = [
    pytest.param(family, kind.name, id=f"{family.family}{number}-{kind.name}")
    for number, family in enumerate(FAMILIES)
    for kind in Model.of(family).kinds
]


def kind_of(family, name: str, attention: Attention):
    return next(kind for kind in Model.of(family, attention=attention).kinds if kind.name == name)


@pytest.mark.parametrize(("family", "name"), KINDS)
@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.FLOAT16])
def test_activations_equal_the_meta_device_with_stored_attention(family, name: str, dtype: Dtype) -> None:
    counted = kind_of(family, name, Attention.STORED)
    measured = measure(reference(family, name, stored=True), "meta", getattr(torch, dtype))
    assert counted.parameters == measured.parameters
    assert counted.forward_flops_per_row == measured.flops
    assert counted.saved_bytes_per_row(dtype) == measured.saved_bytes
    assert counted.output_elements_per_row == measured.boundary


def with_attention() -> list:
    """Kinds whose attention is fused; all others are as they are without."""
    return [
        kind for kind in KINDS if any(o.name == "attention" for o in kind_of(*kind.values, Attention.FUSED).operators)
    ]


@pytest.mark.parametrize(("family", "name"), with_attention())
def test_fused_attention_stores_what_the_cpu_kernel_stores(family, name: str) -> None:
    """In float32: in half precision that kernel's normalisations keep half-precision statistics, unlike a GPU's."""
    counted = kind_of(family, name, Attention.FUSED)
    layer = reference(family, name, stored=False)
    measured = measure(Reference(layer.module.to_empty(device="cpu"), layer.inputs), "cpu", torch.float32)
    assert counted.saved_bytes_per_row(Dtype.FLOAT32) == measured.saved_bytes
    assert counted.forward_flops_per_row == kind_of(family, name, Attention.STORED).forward_flops_per_row


@pytest.mark.parametrize("shape", [AttentionShape.of_itself(24, 32, 4), AttentionShape(6, 24, 24, 4, 32, 16)])
@pytest.mark.parametrize("dtype", Dtype)
def test_unfused_kernel_stores_scores_in_float32(shape: AttentionShape, dtype: Dtype) -> None:
    size, groups = shape.width // shape.heads, shape.heads * shape.key_width // shape.width

    class Unfused(torch.nn.Module):
        def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            with sdpa_kernel([SDPBackend.MATH]):
                return functional.scaled_dot_product_attention(query, key, value, enable_gqa=groups < shape.heads)

    def inputs(rows: int, device: str, kind: torch.dtype) -> tuple[torch.Tensor, ...]:
        sizes = [(shape.heads, shape.queries), (groups, shape.keys), (groups, shape.keys)]
        return tuple(torch.randn(rows, *one, size, dtype=kind, device=device, requires_grad=True) for one in sizes)

    operators = shape.operators(Attention.MATH)
    measured = measure(Reference(Unfused(), inputs), "cpu", getattr(torch, dtype))
    assert sum(one.saved_bytes(dtype, 1) for one in operators) == measured.saved_bytes
    assert sum(one.forward_flops_per_row for one in operators) == measured.flops
