"""Refusals of describe: habits of a user's layers that plans would change, each in one sentence with the way out."""

from __future__ import annotations

import sys

import pytest
import torch

from trainwright.families import Custom
from trainwright_worker import describe as command
from trainwright_worker.model_description.description import describe

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(
    ("habit", "told"),
    [
        (
            "habits:contrast",
            r"layer 1 \(Contrast\) gives rows together other losses .* it mixes them.*whole_batch=True",
        ),
        ("habits:batch_norm", r"layer 1 \(BatchNorm1d\) fails for one row alone .*min_rows=2 or more"),
        ("habits:wide_batch_norm", r"layer 1 \(Sequential\) gives rows together .*BatchNorm1d normalises.*min_rows"),
        (
            "habits:codebook",
            r"layer 1 \(Codebook\) changes buffer codes by the rows .* also reads it.*whole_batch=True",
        ),
        ("format_habits:complex_weights", r"weight filter of layer 1 \(Spectral\) is complex64.*view_as_complex"),
        ("format_habits:double_weights", r"weight weight of layer 1 \(Double\) is float64, but .* make it float32"),
        ("format_habits:float32_inside", r"layer 1 \(Embed\) fails in bfloat16 .*float32.*to\(self.weight.dtype\)"),
        (
            "format_habits:hands_on_bfloat16",
            r"layer 1 \(Autocast\) hands on bfloat16 where the plan computes in float32; end it",
        ),
        (
            "format_habits:infinite_field",
            r"field 'targets' of rows\(\) holds 70000, which is infinite in float16; give CustomModel keep_float32=\['targets'\]",
        ),
        ("habits:relu_in_place", r"layer 1 \(ReLU\) fails .*changes its input in place.*inplace=False"),
        ("habits:clamps_its_weight", r"layer 1 \(Scaled\) changes its weight scale in its forward.*bounded copy"),
        ("drawn_habits:own_generator", r"layer 1 \(Noise\) differs by .* between two forwards .*default generator"),
        (
            "drawn_habits:pythons_random",
            r"layer 1 \(Noise\) draws from Python's random in its forward.*default generator",
        ),
        ("drawn_habits:numpys_random", r"layer 1 \(Noise\) draws from numpy.random in its forward"),
        (
            "drawn_habits:numpy_weights",
            r"layer 1 \(Linear\) starts with other weights in another process.*default generator",
        ),
        (
            "drawn_habits:rows_by_hash_of_text",
            r"field 'targets' of rows\(\) has other values in another process.*hash\(\)",
        ),
        ("drawn_habits:rows_by_process", r"field 'targets' of rows\(\) has other values in another process"),
        ("format_habits:lazy", r"weight weight of layer 1 \(LazyLinear\) has no size .*Linear in place of LazyLinear"),
        ("format_habits:missing_module", r"layer 1 \(Flash\) fails .*install flash_attention_of_nobody"),
        ("format_habits:gpu_kernel", r"layer 1 \(Kernel\) fails .*register_fake"),
        ("cached_habits:in_a_forward", r"layer 1 \(Adds\) fails .*left in .* a cache.*\(functools.cache\) the device"),
        ("cached_habits:moved", r"layer 1 \(Adds\) fails .*left in .* a cache.*\(functools.cache\) the device"),
        ("cached_habits:in_a_buffer", r"layer 1 \(Adds\) fails .*left in .* a cache.*in this layer's own function"),
        (
            "drawn_habits:rows_in_an_order_of_the_call",
            r"field 'inputs' of rows\(\) has other values for row \d when .* alone",
        ),
        ("drawn_habits:mixup", r"layer 1 \(Mixup\) gives rows together other values .*it mixes them"),
        (
            "habits:loss_by_a_function",
            r"layer 1 \(Balanced\) hands back gradients that do not grow .*to the last layer",
        ),
        (
            "habits:counts_forwards",
            r"layer 1 \(Annealed\) changes its attribute step in every forward.*field of rows\(\)",
        ),
        ("habits:reads_the_gradient_mode", r"layer 1 \(ByMode\) differs by 100.0% with recompute.*is_grad_enabled"),
        (
            "habits:weights_of_the_first_rows",
            r"layer 1 \(ActNorm\) changes its weight size in its forward",
        ),
        (
            "format_habits:tensor_that_is_no_buffer",
            r"layer 1 \(Masked\) computes with a tensor that stays on the CPU.*register_buffer",
        ),
        ("habits:functions_by_layer", r"layer 2 \(Applied\) gives rows together other values .*it mixes them"),
        ("habits:skip_through_a_global", r"layer 2 \(Takes\) fails .*left in a global.*hand it on"),
        (
            "format_habits:sparse_matrix",
            r"layer 1 \(SparseGraph\) fails .*indices and values of a sparse matrix as buffers",
        ),
        ("format_habits:sparse_rows", r"layer 1 \(SparseGraph\) fails .*indices and values of a sparse matrix"),
        (
            "format_habits:sparse_gradients",
            r"layer 1 \(SparseGradients\) fails .*leave sparse=True out of the embedding",
        ),
        ("format_habits:sparse_between_layers", r"layer 1 hands on a sparse tensor, .* hand on .to_dense\(\) of it"),
        ("format_habits:quantized_matrix", r"layer 1 cannot be made: .*integers and the scales .* as buffers"),
        (
            "format_habits:late_buffer",
            r"layer 1 \(LateBuffer\) changes its buffer mean from NoneType to float32 \(8,\)",
        ),
        (
            "format_habits:growing_buffer",
            r"its buffer rows from float32 \(1, 8\) to float32 \(3, 8\) in a forward, which",
        ),
    ],
)
def test_habit_that_plans_would_change_is_refused(habit: str, told: str) -> None:
    with pytest.raises(ValueError, match=told) as refusal:
        describe(habit)
    assert str(refusal.value).startswith(f"entry point {habit}: ")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("habit", "given"),
    [
        ("habits:contrast_over_the_batch", {"whole_batch": True}),
        ("habits:codebook_over_the_batch", {"whole_batch": True}),
        ("habits:wide_batch_norm_of_two_rows", {"min_rows": 2}),
        ("drawn_habits:reads_by_index", {}),
        ("habits:doubles_its_inputs", {}),
        ("drawn_habits:dropout", {}),
        ("format_habits:large_field_in_float32", {"keep_float32": ("targets",)}),
        ("habits:reversed_gradient", {}),
        ("cached_habits:by_device", {}),
        ("format_habits:reads_values_as_it_is_made", {}),
    ],
)
def test_ways_out_and_numbers_by_row_are_described(habit: str, given: dict[str, object]) -> None:
    found = describe(habit)
    assert (found.min_rows, found.whole_batch, found.keep_float32) == (
        given.get("min_rows", 1),
        given.get("whole_batch", False),
        given.get("keep_float32", ()),
    )
    assert found.checks is not None
    assert not found.checks.left_out


def test_model_of_one_format_is_checked_in_that_alone() -> None:
    with pytest.raises(
        ValueError, match=r"layer 1 .* fails in bfloat16 .*or train in float32 alone \(describe --dtype"
    ):
        describe("format_habits:spectral_norm")
    found = describe("format_habits:spectral_norm", dtypes=[torch.float32])
    assert found.checks is not None
    assert found.checks.left_out == ("bfloat16 and float16, so train it in another format (dtype)",)


def test_every_format_without_kernels_is_named() -> None:
    found = describe("format_habits:without_half_kernels", check_seconds=0)
    assert found.checks is not None
    assert "bfloat16 and float16 of layer 1, for which the CPU has no kernels" in found.checks.left_out


def test_loss_of_a_function_is_described_where_no_format_scales_losses() -> None:
    found = describe("habits:loss_by_a_function", dtypes=[torch.bfloat16])
    assert found.checks is not None
    assert not found.checks.remarks


def test_buffer_that_counts_forwards_is_remarked() -> None:
    found = describe("habits:counts_forwards_in_a_buffer")
    assert found.checks is not None
    assert any("with buffer step, which each forward changes" in remark for remark in found.checks.remarks)


def test_a_changed_buffer_that_no_checkpoint_holds_is_remarked_on() -> None:
    found = describe("format_habits:buffer_that_is_not_persistent")
    assert found.checks is not None
    (remark,) = found.checks.remarks
    assert remark.startswith("layer 1 (Passing) changes buffer seen, which is not persistent: where training resumes")


def test_products_of_autocast_are_remarked_with_their_figure() -> None:
    found = describe("format_habits:multiplies_in_autocast")
    assert found.checks is not None
    assert any(r"(InAutocast) multiplies in a half format (autocast)" in remark for remark in found.checks.remarks)


def test_rounded_whole_numbers_are_remarked_with_their_figures() -> None:
    found = describe("format_habits:rounded_field")
    assert found.checks is not None
    assert any("bfloat16 rounds (999 becomes 1000)" in remark for remark in found.checks.remarks)
    kept = describe("format_habits:kept_field")
    assert kept.keep_float32 == ("targets",)
    assert kept.checks is not None
    assert not kept.checks.remarks


def test_what_the_time_or_the_device_do_not_allow_is_named(capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["describe", "format_habits:gpu_kernel_with_shapes", "--check-seconds", "60"])
    assert command.main() == 0
    assert "not checked: values of Kernel (layer 1): the CPU has no kernels for it" in capsys.readouterr().err
    without = describe("habits:contrast", check_seconds=0)
    assert isinstance(without, Custom)
    assert without.checks is not None
    assert without.checks.left_out == ("values of all layers: no time was given for checks (--check-seconds)",)
    short = describe("habits:slow", check_seconds=0.5)
    assert short.checks is not None
    assert any("the time for checks is over" in one for one in short.checks.left_out)


def test_checks_leave_torchs_numbers_alone() -> None:
    torch.manual_seed(4)
    expected = torch.randn(3)
    torch.manual_seed(4)
    describe("drawn_habits:dropout")
    assert torch.equal(torch.randn(3), expected)


@pytest.mark.parametrize(
    "name",
    ["diffusion_transformer", "convolution_attention_scan", "two_towers_over_the_batch", "unet", "decoder"],
)
def test_models_of_other_kinds_pass(name: str) -> None:
    found = describe(f"own_models:{name}")
    assert found.checks is not None
    assert not found.checks.left_out


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("two_towers", r"layer 2 \(Contrast\) gives rows together other losses .*whole_batch=True"),
        ("decoder_in_float32", r"layer 1 \(Causal\) fails in bfloat16 .*same dtype.*to\(self.weight.dtype\)"),
    ],
)
def test_models_of_other_kinds_are_refused_rightly(name: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        describe(f"own_models:{name}")
