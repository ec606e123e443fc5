"""Known totals, torch's own layers, tensor parallelism, boundaries, refusals and documents of the families."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch_models.measure import measure
from torch_models.parts import Reference, hidden, inputs

from trainwright import documents
from trainwright.families import (
    FAMILIES,
    T5,
    Bert,
    Custom,
    CustomKind,
    Gpt,
    Llama,
    Moe,
    Swin,
    TransGan,
    Vit,
    WideResnet,
)
from trainwright.families.blocks import AttentionShape
from trainwright.layer import Attention, Dtype, Split
from trainwright.model import Model
from trainwright.training import Training

STEM = CustomKind("stem", 9_536, 1.2e8, 65_536, 120_000.0, 8_000.0)
HEAD = CustomKind("head", 5_130, 1e4, 1, 1_000.0)
EVERY = (
    Gpt(24, 1024, 16, 1024, 52256),
    Llama(32, 4096, 32, 4096),
    Bert(32, 1280, 20),
    Vit(32, 1280, 16),
    Swin((2, 2, 26, 2), 320),
    T5(16, 1024, 16, decoder_sequence_length=4),
    Moe(32, 4096, 32, 4096, intermediate_size=14336, key_value_heads=8),
    WideResnet(),
    TransGan(),
    Custom(
        "package.models:resnet",
        (
            STEM,
            CustomKind("block", 74_000, 6e8, 65_536, 400_000.0),
            HEAD,
        ),
        ("stem", "block", "block", "head"),
    ),
)


@pytest.mark.parametrize(
    ("family", "parameters"),
    [
        # As the published checkpoints count, to the last one.
        (Gpt(12, 768, 12, 1024, 50257), 124_439_808),  # GPT-2
        (Gpt(24, 1024, 16, 1024, 50257), 354_823_168),  # GPT-2 medium
        (Llama(32, 4096, 32, 4096), 6_738_415_616),  # Llama-2 7B
        (Llama(40, 5120, 40, 4096), 13_015_864_320),  # Llama-2 13B
        (Llama(32, 4096, 32, 8192, 128256, 14336, 8), 8_030_261_248),  # Llama-3 8B
        (Llama(16, 2048, 32, 8192, 128256, 8192, 8, tied_embeddings=True), 1_235_814_400),  # Llama-3.2 1B
        (Bert(12, 768, 12, next_sentence=False), 109_514_298),  # BERT base with its head for masked tokens
        (T5(12, 768, 12), 222_903_552),  # T5 base
        (Moe(32, 4096, 32, 4096, intermediate_size=14336, key_value_heads=8), 46_702_792_704),  # Mixtral 8x7B
        (Vit(12, 768, 12), 86_567_656),  # ViT-B/16
        (Swin((2, 2, 6, 2), 96), 28_288_354),  # Swin-T
        (WideResnet(), 68_883_240),  # Wide-ResNet-50-2
        (WideResnet(101), 126_886_696),  # Wide-ResNet-101-2
        (WideResnet(width_factor=1), 25_557_032),  # ResNet-50
    ],
)
def test_known_models_have_the_published_parameter_counts(family, parameters: int) -> None:
    assert Model.of(family).parameters == parameters


@pytest.mark.parametrize(
    ("family", "millions"),
    [
        # Galvatron-BMW, Table I, which truncates to integers. It does not say how many heads BERT, ViT and
        # Swin have, nor what their heads are: BERT's pooler and second head are needed for its figures, and patches of
        # 16 pixels for ViT's.
        (Bert(32, 1280, 20), 672),
        (Bert(48, 1280, 20), 987),
        (Bert(128, 2560, 40), 10_163),  # "10.2B"
        (Vit(32, 1280, 16), 632),
        (Vit(48, 1280, 16), 947),
        (Vit(128, 2560, 16), 10_075),  # "10.1B"
        (T5(16, 1024, 16), 502),
        (T5(24, 1024, 16), 737),
        (T5(16, 1024, 16, decoder_sequence_length=4), 502),
        (Swin((2, 2, 26, 2), 320), 701),
        (Swin((2, 2, 42, 2), 320), 1016),
        # AMP's GPT-2: the vocabulary is padded to 52,256.
        (Gpt(24, 1024, 16, 1024, 52256), 356),
    ],
)
def test_transformers_of_the_papers_have_the_published_parameter_counts(family, millions: int) -> None:
    assert Model.of(family).parameters // 10**6 == millions


@pytest.mark.parametrize(
    ("depth", "base", "width", "billions"),
    [(50, 160, 2, 0.25), (50, 320, 2, 1), (50, 448, 2, 2), (50, 640, 2, 4), (50, 320, 16, 6.8), (101, 320, 16, 13)],
)
def test_wide_resnets_of_alpa_have_the_published_parameter_counts(
    depth, base: int, width: int, billions: float
) -> None:
    """Table 8 of its appendix, rounded there."""
    found = Model.of(WideResnet(depth, width, "second", base, classes=1024)).parameters
    assert found == pytest.approx(billions * 1e9, rel=0.03)


@pytest.mark.parametrize("norm_first", [True, False])
def test_blocks_have_the_sizes_of_torch_modules(norm_first: bool) -> None:
    theirs = nn.TransformerEncoderLayer(
        32, 4, 128, dropout=0, activation="gelu", batch_first=True, norm_first=norm_first, device="meta"
    )
    measured = measure(Reference(theirs, inputs(hidden(24, 32))), "meta", torch.float32)
    family = Gpt(1, 32, 4, 24, 50) if norm_first else Bert(1, 32, 4, 24, 50)
    block = Model.of(family).kind("block")
    assert block.parameters == measured.parameters
    assert block.forward_flops_per_row == measured.flops


def test_decoder_block_has_the_size_of_the_torch_module() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerDecoderLayer(32, 4, 128, dropout=0, batch_first=True, bias=False, device="meta")

        def forward(self, state: torch.Tensor, encoded: torch.Tensor) -> torch.Tensor:
            return self.layer(state, encoded)

    measured = measure(Reference(Pair(), inputs(hidden(6, 32), hidden(24, 32))), "meta", torch.float32)
    t5 = T5(1, 32, 4, 24, 50, decoder_sequence_length=6)
    decoder = Model.of(t5).kind("decoder")
    assert decoder.parameters - decoder.shared_parameters == measured.parameters
    assert decoder.forward_flops_per_row == measured.flops


@pytest.mark.parametrize("window", [1, 5, 23, 24])
def test_fused_attention_counts_the_pairs_within_a_window_twice_as_those_before_a_position(window: int) -> None:
    shown = sum(min(position + 1, window) for position in range(24))
    (operator,) = AttentionShape(24, 24, 24, 4, 32, 32, is_causal=True, window=window).operators(Attention.FUSED)
    assert operator.forward_flops_per_row == 4 * 32 * (2 * shown - window)  # without one T², and T(T + 1) / 2 are shown


def test_norms_over_the_width_exchange_their_statistics_in_a_tensor_group() -> None:
    llama = Llama(1, 32, 4, 24, query_key_norm=True, query_key_norm_over="width")
    block = Model.of(llama).kind("block")
    assert block.segments[0].forward_gathered_bytes_per_row == 16 * 24
    assert block.parameters - Model.of(Llama(1, 32, 4, 24)).kind("block").parameters == 2 * 32
    with pytest.raises(ValueError, match=r"query_key_norm_over needs llama\.query_key_norm, got width without"):
        Llama(1, 32, 4, 24, query_key_norm_over="width")


def test_blocks_have_windows_but_for_every_nth() -> None:
    llama = Llama(6, 32, 4, 24, attention_window=8, full_attention_every=3)
    assert Model.of(llama).layers[1:-1] == ("window_block", "window_block", "block") * 2
    full, within = (Model.of(llama).kind(name).forward_flops_per_row for name in ("block", "window_block"))
    assert full - within == 4 * 32 * (24**2 - 8 * (2 * 24 - 8))
    assert Model.of(replace(llama, sequence_length=8)).layers[1:-1] == ("block",) * 6
    stored = Model.of(llama, attention=Attention.STORED)
    assert stored.kind("window_block").forward_flops_per_row == stored.kind("block").forward_flops_per_row
    with pytest.raises(ValueError, match=r"full_attention_every needs moe\.attention_window, got 2 without; give both"):
        Moe(6, 32, 4, 24, full_attention_every=2)


@pytest.mark.parametrize("family", EVERY, ids=lambda family: family.family)
@pytest.mark.parametrize("attention", Attention)
def test_max_tensor_degree_divides_every_split_size(family, attention: Attention) -> None:
    model = Model.of(family, Dtype.FLOAT16, attention)
    whole = model.max_tensor_degree
    for kind in model.kinds:
        for operator in kind.operators:
            if operator.split is not Split.NONE:
                assert operator.weight_elements % whole == 0
        assert kind.is_tensor_parallel == (kind.tensor_all_reduces > 0)
        assert kind.parameters_at(1) == kind.parameters
        if kind.is_tensor_parallel:
            kept = [kind.saved_bytes_per_row(Dtype.FLOAT16, degree) for degree in (1, whole)]
            # Per row: inputs of what is divided by columns stay whole, the rest is divided.
            assert kept[0] / whole < kept[1] <= kept[0]
            boundary = kind.output_elements_per_row
            for segment in kind.segments:
                assert 0 < segment.forward_all_reduce_elements_per_row <= boundary
                assert segment.backward_all_reduce_elements_per_row >= segment.forward_all_reduce_elements_per_row
    assert [name for name in model.layers if name not in {kind.name for kind in model.kinds}] == []
    assert {kind.name for kind in model.kinds} == set(model.layers)


def test_fused_attention_stores_no_scores() -> None:
    for family in EVERY:
        if isinstance(family, WideResnet):
            continue
        stored, fused = (Model.of(family, Dtype.FLOAT16, a) for a in (Attention.STORED, Attention.FUSED))
        for name in set(stored.layers):
            before, after = stored.kind(name), fused.kind(name)
            assert before.parameters == after.parameters
            assert before.forward_flops_per_row == after.forward_flops_per_row
            less = before.saved_bytes_per_row(Dtype.FLOAT16) - after.saved_bytes_per_row(Dtype.FLOAT16)
            assert (less > 0) == before.is_tensor_parallel


def test_boundary_after_the_t5_encoder_holds_two_tensors() -> None:
    model = Model.of(T5(2, 64, 4, 512, 100, decoder_sequence_length=4))
    assert model.layers == ("embedding", *["encoder"] * 2, "decoder_embedding", *["decoder"] * 2, "head")
    sizes = [model.kind_of(layer).output_elements_per_row for layer in range(7)]
    assert sizes == [512 * 64] * 3 + [(512 + 4) * 64] * 3 + [1]
    cross = model.kind("decoder").segments[1]
    assert cross.forward_all_reduce_elements_per_row == 4 * 64
    assert cross.backward_all_reduce_elements_per_row == (4 + 512) * 64


def test_shared_weights_count_once() -> None:
    tied, free = (Model.of(T5(3, 64, 4, 16, 100, tied_embeddings=tied)) for tied in (True, False))
    assert free.parameters - tied.parameters == 64 * 100
    owners = {kind.name for kind in tied.kinds if kind.shared_weight == "token_embedding"}
    assert owners == {"embedding", "decoder_embedding", "head"}
    assert {kind.name for kind in free.kinds if kind.shared_weight == "token_embedding"} == owners - {"head"}


def test_every_second_moe_block_has_experts() -> None:
    model = Model.of(Moe(4, 32, 4, 16, experts=8, expert_every=2))
    assert model.layers == ("embedding", "block", "expert_block", "block", "expert_block", "head")
    plain, expert = model.kind("block"), model.kind("expert_block")
    one = plain.segments[1].operators
    weights = sum(operator.weight_elements for operator in one if operator.split is not Split.NONE)
    assert expert.parameters == plain.parameters + 7 * weights + 32 * 8
    router = 2 * 16 * 32 * 8
    assert expert.segments[1].forward_flops_per_row == 2 * plain.segments[1].forward_flops_per_row + router


def test_transgan_stages_grow_in_tokens_and_narrow_in_width() -> None:
    model = Model.of(TransGan())
    wide, narrow = model.kind("block_0"), model.kind("block_5")
    assert wide.output_elements_per_row == 9 * 9 * 1024
    assert narrow.output_elements_per_row == 288 * 288 * 16
    assert model.layers.count("block_0") == model.layers.count("block_5") == 12
    assert len(model.layers) == 1 + 12 + 5 + 12 + 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Gpt(2, 10, 3, 4, 5), r"gpt.hidden_size 10 must be a multiple of gpt.heads 3"),
        (lambda: Gpt(0, 8, 2, 4, 5), "gpt.layers must be 1 … 100000, got 0"),
        (lambda: Gpt(10**12, 8, 2, 4, 5), "gpt.layers must be 1 … 100000, got 1000000000000"),
        (lambda: Gpt(2, 8, 2, 4, 10**400), r"gpt.vocabulary_size must be at most 1e\+30, got a number of 1329 bits"),
        (lambda: Llama(2, 8, 4, 4, key_value_heads=3), "llama.heads 4 must be a multiple of llama.key_value_heads 3"),
        (lambda: Llama(2, 8, 4, 4, intermediate_size=0), "llama.intermediate_size must be at least 1, got 0"),
        (lambda: Bert(2, 8, 2, token_types=0), "bert.token_types must be at least 1"),
        (lambda: Vit(2, 8, 2, 224, 15), "vit.image_size 224 must be a multiple of vit.patch_size 15"),
        (lambda: Swin((), 32), "swin.layers must give the blocks of 1 … 16 stages, got 0"),
        (lambda: Swin((2, 2), 32, (1,)), "swin.heads must give one number for each of 2 stages"),
        (lambda: Swin((2, 2), 32, (1, 5)), "swin: stage 1 is 64 wide, which 5 heads do not share equally"),
        (lambda: Swin((2, 2), 32, window_size=9), "swin: windows of 9 patches do not tile stage 0, which has 56"),
        (lambda: Swin((2, 2, 2, 2, 2), 32), "do not tile stage 4, which has 3.5 patches"),
        (lambda: T5(2, 8, 3), "t5.hidden_size 8 must be a multiple of t5.heads 3"),
        (lambda: T5(2, 8, 2, decoder_layers=0), "t5.decoder_layers must be 1 …"),
        (lambda: Moe(2, 8, 2, 4, experts=2, experts_per_token=3), "experts_per_token 3 is more than moe.experts 2"),
        (lambda: Moe(2, 8, 2, 4, expert_every=3), "moe.expert_every 3 leaves no expert in moe.layers 2"),
        (lambda: WideResnet(34), "wide_resnet.depth must be one of 50, 101, 152, got 34"),
        (lambda: WideResnet(image_size=100), "wide_resnet.image_size must be a multiple of 32, got 100"),
        (lambda: TransGan(bottom_width=9, layers=(0, 0, 2)), "windows of 16 do not tile stage 2, whose side is 36"),
        (lambda: TransGan(hidden_size=100), "trans_gan.hidden_size 100 leaves no whole heads in stage 4"),
        (
            lambda: Custom("models.resnet", (STEM,), ("stem",)),
            "custom.entrypoint must be written package.module:function",
        ),
        (lambda: Custom("models:resnet", (STEM, STEM), ("stem",)), "custom.kinds gives stem twice"),
        (lambda: Custom("models:resnet", (STEM,), ("stem", "head")), "custom.layers names head, which custom.kinds"),
        (lambda: Custom("models:resnet", (STEM,), ()), "custom.layers must name 1 … 100000 layers, got 0"),
        (
            lambda: Custom("models:resnet", (STEM, HEAD), ("stem",)),
            "custom.kinds gives head, but no layer is of that kind",
        ),
        (lambda: replace(STEM, parameters=-1), "parameters of stem must be 0 … .*, got -1"),
        (lambda: replace(STEM, output_elements_per_row=0), "output_elements_per_row of stem must be 1 …"),
        (lambda: TransGan(layers=()), "trans_gan.layers must give the blocks of 1 … 16 stages, got 0"),
    ],
)
def test_invalid_sizes_are_rejected_with_a_message(make, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def of(family) -> Training:
    return Training(8, **{family.family: family})


@pytest.mark.parametrize("family", EVERY, ids=lambda family: family.family)
def test_models_and_trainings_round_trip_through_documents(family) -> None:
    for attention in Attention:
        model = Model.of(family, Dtype.BFLOAT16, attention)
        assert documents.loads(documents.dumps(model), Model) == model
    training = of(family)
    assert documents.loads(documents.dumps(training), Training) == training
    assert training.family == family


def test_unknown_family_is_rejected() -> None:
    model = documents.dump(Model.of(Bert(2, 8, 2, 4, 10)))
    model["family"]["family"] = "lstm"
    with pytest.raises(documents.DocumentError, match=r"family: .*'lstm'"):
        documents.parse(model, Model)
    training = documents.dump(of(Bert(2, 8, 2, 4, 10)))
    training["bert"]["family"] = "gpt"
    with pytest.raises(documents.DocumentError, match=r"bert\.family"):
        documents.parse(training, Training)


def test_document_has_exactly_one_family() -> None:
    for several in ({}, {"gpt": EVERY[0], "vit": EVERY[3]}):
        names = ", ".join(several) or "none"
        with pytest.raises(ValueError, match=f"give exactly one model family .*, got {names}"):
            Training(8, **several)
    assert set(FAMILIES) <= {field.name for field in fields(Training)}
    assert set(FAMILIES) == {family.family for family in EVERY}


sizes = st.integers(-1, 64) | st.sampled_from([0, 1, 2, 4, 8, 10**6, 10**29, 10**200])
values = sizes | st.lists(sizes, max_size=4) | st.none() | st.booleans() | st.sampled_from(["both", "second", "x"])


@given(data=st.data(), family=st.sampled_from(EVERY))
def test_any_sizes_are_accepted_or_rejected_with_one_sentence(data: st.DataObject, family) -> None:
    document = documents.dump(of(family))
    for name in data.draw(st.sets(st.sampled_from([field.name for field in fields(family)]), min_size=1, max_size=3)):
        document[family.family][name] = data.draw(values)
    try:
        found = documents.parse(json.loads(json.dumps(document)), Training)
    except documents.DocumentError as refusal:
        assert "\n" not in str(refusal)  # noqa: PT017 - either outcome is right
    else:
        assert all(kind.forward_flops_per_row >= 0 for kind in found.in_format(Dtype.FLOAT32).model.kinds)
