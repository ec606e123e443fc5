"""Attention: which kernel a device has for it, and shared keys and values for a kernel that knows none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from layer_runs import made, run
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.nn.attention import SDPBackend

from trainwright.families import T5, Swin
from trainwright.model import Model
from trainwright_worker.layers import attention
from trainwright_worker.layers.attention import AttentionKernel, attention_kernel, causal_attention
from trainwright_worker.layers.registry import make_family_layers
from trainwright_worker.measure.attention_kernels import attention_kernels

V100, T4, A100, L4, H100, RTX50 = (7, 0), (7, 5), (8, 0), (8, 9), (9, 0), (12, 0)
HALF, BFLOAT, SINGLE = torch.float16, torch.bfloat16, torch.float32
FLASH, EFFICIENT, MATH = AttentionKernel


@pytest.mark.parametrize(
    ("capability", "dtype", "head_size", "is_biased", "kernel"),
    [
        (A100, BFLOAT, 128, False, FLASH),
        (H100, HALF, 100, False, FLASH),
        (A100, SINGLE, 128, False, EFFICIENT),
        (V100, HALF, 128, False, EFFICIENT),
        (T4, SINGLE, 30, False, EFFICIENT),
        (T4, BFLOAT, 128, False, MATH),
        (V100, HALF, 20, False, MATH),
        (A100, SINGLE, 30, False, MATH),
        (A100, BFLOAT, 512, False, EFFICIENT),
        (A100, BFLOAT, 208, False, FLASH),
        (L4, BFLOAT, 208, False, EFFICIENT),
        (RTX50, BFLOAT, 208, False, EFFICIENT),
        (L4, BFLOAT, 256, False, FLASH),
        (A100, BFLOAT, 64, True, EFFICIENT),
        (V100, SINGLE, 32, True, EFFICIENT),
    ],
)
def test_gpus_kernel_follows_from_capability_dtype_and_head(
    capability: tuple[int, int], dtype: torch.dtype, head_size: int, is_biased: bool, kernel: AttentionKernel
) -> None:
    assert attention_kernel("cuda", capability, dtype, head_size, is_biased=is_biased) is kernel


@pytest.mark.parametrize("is_biased", [False, True])
@pytest.mark.parametrize("dtype", [SINGLE, BFLOAT])
def test_cpus_kernel_is_torchs_choice(dtype: torch.dtype, is_biased: bool) -> None:
    query, shared = torch.zeros(1, 4, 8, 20, dtype=dtype), torch.zeros(1, 2, 8, 20, dtype=dtype)
    bias = torch.zeros(1, 4, 8, 8, dtype=dtype, requires_grad=True) if is_biased else None
    chosen = torch._fused_sdp_choice(query, shared, shared, bias, 0.0, bias is None, enable_gqa=True)
    expected = {FLASH: SDPBackend.FLASH_ATTENTION, MATH: SDPBackend.MATH}
    assert expected[attention_kernel("cpu", (0, 0), dtype, 20, is_biased=is_biased)] == SDPBackend(chosen)


@pytest.mark.parametrize(
    "family",
    [T5(1, 32, 4, 8, 32), Swin((2,), 16, (4,), image_size=32, patch_size=4, window_size=4, classes=8)],
    ids=lambda family: family.family,
)
def test_keys_of_biases_are_adjacent(family: T5 | Swin, monkeypatch: pytest.MonkeyPatch) -> None:
    # torch gives a bias whose last stride is not 1 the kernel that stores all scores, on GPUs alone.
    strides = []
    attend = functional.scaled_dot_product_attention

    def record(*parts: torch.Tensor, attn_mask: torch.Tensor | None = None, **more) -> torch.Tensor:
        if attn_mask is not None:
            strides.append(attn_mask.stride(-1))
        return attend(*parts, attn_mask=attn_mask, **more)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", record)
    model = Model.of(family)
    layers = made(model)
    fields = tuple(dict.fromkeys(field for layer in layers for field in layer.reads))
    run(layers, make_family_layers(model).rows(fields, seed=1, iteration=0, first=0, count=2))
    assert strides == [1, 1]


def parts(heads: int = 6, groups: int = 2, device: str = "cpu") -> list[torch.Tensor]:
    """Return queries, keys and values in the layout of their projections."""
    shapes = [(3, 5, count, 8) for count in (heads, groups, groups)]
    return [torch.randn(shape, device=device).transpose(1, 2).requires_grad_() for shape in shapes]


@pytest.fixture
def efficient_on_cpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give CPUs the memory-efficient kernel's two operators, and attention the choice of them."""
    nothing = torch.zeros(())

    def shares(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        scores = query @ key.mT / query.shape[-1] ** 0.5
        hidden = torch.ones_like(scores).triu(1).bool()
        return (scores.masked_fill(hidden, float("-inf")) if mask is None else scores + mask).softmax(-1)

    def forward(query, key, value, mask, *others):
        assert others == ((True, 0.0, True) if mask is None else (True,))  # with sums, no dropout, causal
        return shares(query, key, mask) @ value, torch.zeros(query.shape[:3]), nothing.clone(), nothing.clone()

    def backward(gradient, query, key, value, mask, *others):
        assert others[4:] == (0.0, [True, True, True, False], *([True] if mask is None else []))
        probabilities, of_shares = shares(query, key, mask), gradient @ value.mT
        of_scores = probabilities * (of_shares - (of_shares * probabilities).sum(-1, keepdim=True))
        of_scores = of_scores / query.shape[-1] ** 0.5
        return of_scores @ key, of_scores.mT @ query, probabilities.mT @ gradient, nothing.clone()

    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_efficient_attention", forward, "CPU")
    library.impl("_scaled_dot_product_efficient_attention_backward", backward, "CPU")
    monkeypatch.setattr(attention, "attention_kernel", lambda *_: EFFICIENT)
    yield
    library._destroy()


@pytest.mark.parametrize("window", [None, 2])
def test_expanded_attention_equals_grouped_attention(window: int | None, efficient_on_cpus: None) -> None:
    ours = parts()
    theirs = [one.detach().clone().requires_grad_() for one in ours]
    gradient = torch.randn(3, 6, 5, 8)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        mixed = causal_attention(*ours, window)
    places = torch.arange(5)
    distance = places.unsqueeze(1) - places
    shown = (distance >= 0) & (distance < (window or 5))
    expected = functional.scaled_dot_product_attention(*theirs, attn_mask=shown, enable_gqa=True)
    torch.testing.assert_close(mixed, expected)
    mixed.backward(gradient)
    expected.backward(gradient)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    shared = 2 * ours[1].numel()
    assert sum(one.numel() for one in kept if one.dim() == 4) == 2 * ours[0].numel() + shared, "expanded keys are kept"


def test_expanded_attention_calls_the_gpus_kernel_as_torch_declares_it() -> None:
    with FakeTensorMode():
        query, key, value = (one.detach() for one in parts(device="cuda"))
        function = attention._ExpandedAttention
        mixed = function.apply(query, key, value, None, None)
        context = type("Context", (), {})()
        context.save_for_backward = lambda *saved: setattr(context, "saved_tensors", saved)
        function.forward(context, query, key, value, None, None)
        *gradients, of_mask, of_scale = function.backward(context, torch.empty_like(mixed))
        assert (of_mask, of_scale) == (None, None)
        assert [one.shape for one in gradients] == [query.shape, key.shape, value.shape]
        assert {one.device.type for one in (mixed, *gradients)} == {"cuda"}


@pytest.mark.parametrize("size", [8, 6])
def test_flash_attention_within_a_window_keeps_no_scores_as_torch_declares_it(size: int) -> None:
    heads = [torch.empty(3, count, 5, size, device="meta", requires_grad=True) for count in (6, 2, 2)]
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        mixed = attention.windowed_flash_attention(*heads, 3)
    assert mixed.shape == heads[0].shape
    assert sum(one.numel() for one in kept if one.dim() == 4) == 3 * 5 * 8 * (6 + 2 + 2 + 6)
    mixed.sum().backward()
    assert [one.grad.shape for one in heads] == [one.shape for one in heads]


def test_mask_of_a_window_has_rows_that_kernels_take() -> None:
    mask = attention.window_mask(5, 2, HALF, torch.device("cpu"))
    assert (mask == 0).int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 1, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 1, 1],
    ]
    assert mask.stride() == (16, 1)


@pytest.mark.parametrize(("is_biased", "kernels"), [(False, ("flash",)), (True, ("math",))])
def test_kernels_of_attention_are_named_as_its_profile_states_them(is_biased: bool, kernels: tuple[str, ...]) -> None:
    heads = torch.randn(1, 2, 4, 8)
    bias = torch.zeros(2, 4, 4, requires_grad=True) if is_biased else None
    assert attention_kernels(lambda: functional.scaled_dot_product_attention(heads, heads, heads, bias)) == kernels


def test_work_without_attention_has_no_kernels() -> None:
    assert attention_kernels(lambda: torch.zeros(2) + 1) == ()
