"""Estimates follow the kernels, the attention, the loss and the recompute of a runtime, and a card's power limit."""

from __future__ import annotations

import numpy as np
import pytest

from trainwright.accelerators import data_sheet, estimate_profiles
from trainwright.accelerators.roofline import Roof, layer_seconds, operator_seconds
from trainwright.families import Bert, Gpt, Vit
from trainwright.layer import Attention, Dtype, OperatorKind
from trainwright.model import Model
from trainwright.profiles import LayerCost
from trainwright.runtime import AttentionLibrary, Kernels, Runtime, SelectiveRecompute

GPT = Gpt(2, 1024, 16, 2048, 50304, dropout=True)
BERT_LARGE_SECONDS = {
    Kernels.EAGER: (9.14e-3, 18.43e-3),
    Kernels.FUSED: (7.6e-3, 16.19e-3),
    Kernels.COMPILED: (6.87e-3, 15.42e-3),
}
"""Forward and backward of a layer on V100 at 8 × 512 and 96 × 128 tokens (https://github.com/spcl/substation)."""


def _cost(kind: str, runtime: Runtime, *, family=GPT, attention=Attention.FUSED, **options) -> LayerCost:
    model = Model.of(family, Dtype.BFLOAT16, attention)
    found = estimate_profiles(model, ["A100-80"], tensor_degrees=[1], rows=[4], runtime=runtime, **options)
    return found.cost("A100-80", kind, 1, 4)


@pytest.mark.parametrize("kernels", list(Kernels))
def test_layers_of_bert_take_the_published_seconds(kernels):
    roof = Roof.of(data_sheet("V100"), Dtype.FLOAT16, tensor_float32=False, runtime=Runtime(kernels=kernels))
    for tokens, rows, published in zip((512, 128), (8, 96), BERT_LARGE_SECONDS[kernels], strict=True):
        family = Bert(24, 1024, 16, sequence_length=tokens, dropout=True)
        block = Model.of(family, Dtype.FLOAT16, Attention.STORED).kind("block")
        found = layer_seconds(block, roof, [1], [rows])
        assert float(found.forward[0, 0] + found.backward[0, 0]) == pytest.approx(published, rel=0.04)


@pytest.mark.parametrize(
    ("accelerator", "dtype", "library", "expected"),
    [
        ("V100", Dtype.FLOAT16, AttentionLibrary.CUDNN, Attention.STORED),
        ("T4", Dtype.FLOAT16, AttentionLibrary.CUDNN, Attention.STORED),
        ("A100-80", Dtype.FLOAT16, AttentionLibrary.CUDNN, Attention.FUSED),
        ("A100-80", Dtype.BFLOAT16, AttentionLibrary.CUDNN, Attention.FUSED),
        ("A100-80", Dtype.FLOAT32, AttentionLibrary.CUDNN, Attention.STORED),
        ("H100", Dtype.BFLOAT16, AttentionLibrary.FLASH_ATTENTION_1, Attention.FUSED),
        ("V100", Dtype.FLOAT16, AttentionLibrary.PYTORCH, Attention.FUSED),
        ("V100", Dtype.BFLOAT16, AttentionLibrary.PYTORCH, Attention.MATH),
        ("V100", Dtype.BFLOAT16, AttentionLibrary.CUDNN, Attention.STORED),
        ("A100-80", Dtype.BFLOAT16, AttentionLibrary.STORED, Attention.STORED),
    ],
)
def test_attention_is_that_of_the_library_on_each_accelerator(accelerator, dtype, library, expected):
    options = {"tensor_degrees": [1, 2], "rows": [1, 4], "runtime": Runtime(attention_library=library)}
    estimated, as_expected = (
        estimate_profiles(Model.of(GPT, dtype, attention), [accelerator], **options).layers
        for attention in (Attention.FUSED, expected)
    )
    assert estimated == as_expected
    fused = estimate_profiles(Model.of(GPT, Dtype.BFLOAT16), ["A100-80"], **options | {"runtime": None}).layers
    saved, of_fused = (sum(layer.activation_bytes for layer in layers) for layers in (estimated, fused))
    assert (saved > of_fused) == (expected is not Attention.FUSED)


def test_kernels_change_no_matrix_product():
    one = np.array([[1.0]])
    block = Model.of(GPT, Dtype.BFLOAT16).kind("block")
    eager, compiled = (
        Roof.of(data_sheet("A100-80"), Dtype.BFLOAT16, tensor_float32=False, runtime=Runtime(kernels=kernels))
        for kernels in (Kernels.EAGER, Kernels.COMPILED)
    )
    for operator in block.operators:
        slow, fast = (float(operator_seconds(operator, roof, one, 4 * one).forward[0, 0]) for roof in (eager, compiled))
        assert slow == fast if operator.kind is OperatorKind.MATMUL else slow >= fast


def test_causal_attention_computes_the_visible_blocks():
    def share(tokens: int) -> float:
        roof = Roof.of(data_sheet("A100-80"), Dtype.BFLOAT16, tensor_float32=False)
        kinds = (
            Model.of(Gpt(1, 1024, 16, tokens, 100), Dtype.BFLOAT16).kind("block"),
            Model.of(Bert(1, 1024, 16, sequence_length=tokens), Dtype.BFLOAT16).kind("block"),
        )
        attention = [next(one for one in kind.operators if one.kind is OperatorKind.ATTENTION) for kind in kinds]
        one = np.array([[1.0]])
        causal, full = (float(operator_seconds(each, roof, one, 16 * one).forward[0, 0]) for each in attention)
        return causal / full

    assert share(128) == 1
    assert share(512) == pytest.approx(5 / 8)
    assert share(16384) == pytest.approx(129 / 256)


def test_images_have_no_causal_attention():
    block = Model.of(Vit(2, 192, 3), Dtype.BFLOAT16).kind("block")
    assert not any(operator.is_causal for operator in block.operators)


def test_the_first_flash_attention_is_slower_than_the_second():
    first, second = (
        _cost("block", Runtime(attention_library=library))
        for library in (AttentionLibrary.FLASH_ATTENTION_1, AttentionLibrary.PYTORCH)
    )
    assert first.forward_seconds > second.forward_seconds
    assert first.activation_bytes == second.activation_bytes


def test_a_fused_loss_saves_no_log_probabilities_and_takes_less_time():
    fused, plain = (_cost("head", Runtime(fuses_loss=fuses)) for fuses in (True, False))
    assert plain.activation_bytes - fused.activation_bytes == 4 * 2048 * 4 * 50304
    assert fused.backward_seconds < plain.backward_seconds


def test_a_tuning_factor_slows_products_alone():
    tuned, slower = (
        Roof.of(data_sheet("A100-80"), Dtype.BFLOAT16, tensor_float32=False, runtime=Runtime(product_ratio=ratio))
        for ratio in (1.0, 0.8)
    )
    one, many = np.array([[1.0]]), np.array([[64.0]])
    for operator in Model.of(GPT, Dtype.BFLOAT16).kind("block").operators:
        fast, slow = (float(operator_seconds(operator, roof, one, many).forward[0, 0]) for roof in (tuned, slower))
        assert slow == pytest.approx(fast / 0.8 if operator.kind is OperatorKind.MATMUL else fast)


def test_an_optimizer_moves_the_bytes_that_the_runtime_states():
    fused, unfused = (_cost("block", Runtime(update_bytes_per_parameter=each)) for each in (0.0, 68.0))
    assert unfused.update_seconds == pytest.approx(2 * fused.update_seconds)  # 34 bytes, with a half-precision copy


def test_a_power_limit_slows_products_in_proportion():
    one, many = np.array([[1.0]]), np.array([[64.0]])
    product = next(o for o in Model.of(GPT, Dtype.BFLOAT16).kind("block").operators if o.name == "feed_forward_in")
    sheet = data_sheet("H100")
    whole, limited = (Roof.of(each, Dtype.BFLOAT16, tensor_float32=False) for each in (sheet, sheet.limited_to(350.0)))
    fast, slow = (float(operator_seconds(product, roof, one, many).forward[0, 0]) for roof in (whole, limited))
    assert slow == pytest.approx(2 * fast)
    assert limited.bytes_per_second == whole.bytes_per_second


def test_a_clusters_power_limit_reaches_the_profiles():
    plain, limited = (_cost("block", Runtime(), power_watts=watts) for watts in (None, {"A100-80": 100.0}))
    assert limited.forward_seconds > 2 * plain.forward_seconds


def test_selective_recompute_of_attention_drops_the_scores():
    def cost(recompute: SelectiveRecompute | None) -> LayerCost:
        return _cost("block", Runtime(selective_recompute=recompute), attention=Attention.STORED)

    plain, selective = cost(None), cost(SelectiveRecompute.ATTENTION)
    scores = 4 * 16 * 2048**2
    assert plain.activation_bytes - selective.activation_bytes == scores * (2 + 2 + 1)
    assert selective.forward_seconds == plain.forward_seconds
    assert 0 < selective.backward_seconds - plain.backward_seconds < plain.forward_seconds


def test_selective_recompute_of_operators_saves_less_and_computes_less_than_a_forward_again():
    plain, selective = (
        _cost("block", Runtime(selective_recompute=recompute)) for recompute in (None, SelectiveRecompute.OPERATORS)
    )
    # The layer's input, half of the outputs of its products (3 + 1 + 4 + 1 widths), and attention's output.
    assert selective.activation_bytes == 4 * 2048 * 1024 * 2 * (1 + 4.5 + 1)
    assert selective.activation_bytes < plain.activation_bytes
    assert 0 < selective.backward_seconds - plain.backward_seconds < plain.forward_seconds


def test_selective_recompute_leaves_layers_without_attention_as_they_are():
    plain, selective = (
        _cost("head", Runtime(selective_recompute=recompute)) for recompute in (None, SelectiveRecompute.OPERATORS)
    )
    assert plain == selective


def test_host_bounds_small_layers_and_no_large_ones():
    fast, slow = (_cost("block", Runtime(host_seconds_per_operator=seconds)) for seconds in (0.0, 1e-3))
    operators = len(Model.of(GPT, Dtype.BFLOAT16).kind("block").operators)
    assert slow.forward_seconds == pytest.approx(1e-3 * operators)
    assert slow.backward_seconds == pytest.approx(2.2e-3 * operators)
    assert fast.forward_seconds < slow.forward_seconds
    barely = Runtime(
        host_seconds_per_operator=0.99 * min(fast.forward_seconds, fast.backward_seconds / 2.2) / operators
    )
    assert _cost("block", barely) == fast


def test_host_issues_what_is_computed_again():
    def backward(recompute):
        runtime = Runtime(selective_recompute=recompute, host_seconds_per_operator=1e-3)
        return _cost("block", runtime, attention=Attention.STORED).backward_seconds

    assert backward(SelectiveRecompute.ATTENTION) > backward(None)
