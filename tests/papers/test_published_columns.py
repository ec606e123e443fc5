"""Columns of published rows, facts of their sources, and sizes of their models."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from trainwright.cli import app
from trainwright.families.blocks import HEAD
from trainwright.runtime import AttentionLibrary, Kernels, SelectiveRecompute
from trainwright.runtime_presets import runtime_preset, runtime_presets
from trainwright_papers.published_models import PROJECT_NAMES, read_models
from trainwright_papers.published_rows import RUNTIME_COLUMNS, Head, PublishedRow, read_table
from trainwright_papers.published_runtimes import drops_of, framework_of, runtime_of
from trainwright_papers.published_scores import score
from trainwright_papers.published_sources import ASSUMED, row_sources

Cells = dict[str, Any]
READ = {each.name for each in fields(PublishedRow)} | RUNTIME_COLUMNS

CELLS: Cells = {
    "source": "someone",
    "model": "GPT3-1.3B",
    "gpu": "a100_80gb",
    "gpus": 16,
    "machine": "dgx-a100",
    "tp": 2,
    "pp": 2,
    "dp": 4,
    "sharding": "none",
    "micro_batch": 2,
    "global_batch": 64,
    "sequence": 1024,
    "dtype": "bfloat16",
    "recompute": 0,
    "measured_tokens_per_second_per_gpu": 9000,
}


@pytest.fixture
def table(tmp_path: Path) -> Callable[..., Path]:
    def write(**changes: Any) -> Path:
        cells = CELLS | changes
        path = tmp_path / "table.csv"
        path.write_text(f"{','.join(cells)}\n{','.join(map(str, cells.values()))}\n")
        return path

    return write


@pytest.fixture
def row(table: Callable[..., Path]) -> Callable[..., PublishedRow]:
    def read(**changes: Any) -> PublishedRow:
        (single,) = read_table(table(**changes)).rows
        assert isinstance(single, PublishedRow), single
        return single

    return read


Row = Callable[..., PublishedRow]
ANY = PROJECT_NAMES


def test_columns_say_attention_dropout_and_head(row: Row) -> None:
    plain = row(model="BERT-base", sequence=512, tp=1, pp=1, dp=16)
    named = ANY.model(plain.model, plain.source)
    assert drops_of(plain, "bert")
    stated = row(model="BERT-base", sequence=512, tp=1, pp=1, dp=16, attention="stored", dropout="false", head="masked")
    assert stated.head is Head.MASKED
    assert runtime_of(stated).attention_library is AttentionLibrary.STORED
    assert not drops_of(stated, "bert")
    heads = [
        each.model_of(named, drops=False).kind(HEAD)
        for each in (plain, stated, row(model="BERT-base", sequence=512, tp=1, pp=1, dp=16, head="none"))
    ]
    flops = [head.forward_flops_per_row for head in heads]
    assert flops[0] > 5 * flops[1] > 25 * flops[2]


def test_columns_say_the_nodes_and_their_network(row: Row) -> None:
    cluster = row(gpus_per_node=4, network_gbit_per_second=100).cluster()
    assert [node.devices for node in cluster.nodes] == [4] * 4
    assert cluster.nodes[0].network is not None
    assert cluster.nodes[0].network.bandwidth_bytes_per_second == pytest.approx(12.5e9)
    assert [node.devices for node in row().cluster().nodes] == [8, 8]


def test_columns_named_like_fields_of_a_runtime_state_them(row: Row) -> None:
    runtime = runtime_of(
        row(
            preset="megatron",
            gradient_dtype="none",
            overlaps_gradients="true",
            overlaps_tensor_sync="true",
            virtual_stages=2,
            selective_recompute="attention",
        )
    )
    assert runtime.gradient_dtype is None
    assert runtime.overlaps_gradients
    assert runtime.overlaps_tensor_sync
    assert runtime.virtual_stages == 2
    assert runtime.selective_recompute is SelectiveRecompute.ATTENTION
    assert runtime.trainer == "megatron"
    assert runtime_of(row(preset="megatron")) == runtime_preset("megatron").runtime


def test_a_cell_that_a_runtime_refuses_leaves_its_row_out(table: Callable[..., Path]) -> None:
    (sentence,) = read_table(table(virtual_stages=0)).rows
    assert isinstance(sentence, str)
    assert "line 2" in sentence
    assert "virtual_stages" in sentence


def test_images_are_rows_of_a_model_without_sequence(table: Callable[..., Path], tmp_path: Path) -> None:
    models = tmp_path / "models.yaml"
    models.write_text(
        "sources: {}\nmodels: {ViT-Base: {source: own, vit: {layers: 12, hidden_size: 768, heads: 12}}}\n"
    )
    path = table(
        model="ViT-Base", tp=1, pp=1, dp=16, sequence="", measured_tokens_per_second_per_gpu="",
        measured_images_per_second_per_gpu=900,
    )  # fmt: skip
    (single,) = read_table(path).rows
    assert isinstance(single, PublishedRow)
    scored = score(single, read_models(models))
    assert scored.published == 900
    assert 10 < scored.estimated < 10_000
    assert "published_images_per_second_per_gpu" in scored.record()


def test_a_row_has_tokens_or_images(table: Callable[..., Path]) -> None:
    (sentence,) = read_table(table(measured_images_per_second_per_gpu=1)).rows
    assert "give one of measured_tokens" in str(sentence)


def test_facts_are_of_the_source_with_the_exact_name(row: Row) -> None:
    stated = runtime_of(row(source="Megatron-SC21"))
    assert stated.attention_library is AttentionLibrary.STORED
    assert not stated.sequence_parallel
    other = runtime_of(row(source="Megatron-SC21 of others"))
    assert other.attention_library is not AttentionLibrary.STORED
    assert other.sequence_parallel


def test_a_note_says_nothing_to_the_runtime(row: Row) -> None:
    assert runtime_of(row(note="interleaved; selective recompute")) == runtime_of(row())


def test_facts_of_a_part_are_of_the_rows_whose_columns_say_so(row: Row) -> None:
    chunks = {
        name: runtime_of(row(source="Megatron-SC21", model=name)).virtual_stages
        for name in ("GPT-39B", "GPT-76B", "GPT-145B")
    }
    assert chunks == {"GPT-39B": 1, "GPT-76B": 3, "GPT-145B": 2}


def test_columns_go_before_facts(row: Row) -> None:
    changed = row(source="Megatron-SC21", attention="fused", sequence_parallel="true", dropout="false")
    assert runtime_of(changed).attention_library is AttentionLibrary.PYTORCH
    assert runtime_of(changed).sequence_parallel
    assert changed.dropout is False


@pytest.mark.parametrize(
    ("words", "kernels"),
    [
        ("eager", Kernels.EAGER),
        ("fused kernels (apex)", Kernels.FUSED),
        ("compile+asyncTP", Kernels.COMPILED),
        ("compile (XLA)", Kernels.EAGER),
    ],
)
def test_kernels_are_in_the_words_of_a_source_unless_a_column_names_them(
    row: Row, words: str, kernels: Kernels
) -> None:
    runtime = runtime_of(row(compiled=words))
    assert runtime.kernels is kernels
    assert runtime.overlaps_tensor_sync == ("async" in words)
    assert runtime_of(row(compiled=words, kernels="fused")).kernels is Kernels.FUSED


def test_framework_is_the_trainer_of_the_stated_preset(row: Row) -> None:
    assert framework_of(row()) is None
    assert framework_of(row(preset="deepspeed")) == "deepspeed"
    assert framework_of(row(preset="trainwright")) is None


@pytest.mark.parametrize("source", row_sources())
def test_facts_of_a_source_name_columns_and_pages(source: str) -> None:
    stated = row_sources()[source]
    parts = [stated.facts, *(part.facts for part in stated.parts)]
    columns = {name for facts in parts for name in facts}
    assert columns <= READ
    assert {column for part in stated.parts for column in part.when} <= READ
    pages = [fact.page or stated.page for facts in parts for fact in facts.values()]
    assert all(page == ASSUMED or page.startswith("https://") for page in pages)
    presets = [facts["preset"].value for facts in parts if "preset" in facts]
    assert presets
    assert set(presets) <= set(runtime_presets())


def test_models_whose_names_differ_by_a_point_are_kept_apart() -> None:
    assert ANY.model("GPT3-1.3B", "someone").sizes["layers"] == 24
    assert ANY.model("GPT3-13B", "someone").sizes["layers"] == 40


def test_sizes_that_a_source_means_in_its_own_sense_are_not_those_of_another(tmp_path: Path) -> None:
    assert ANY.model("GPT-1.7B", "Megatron-SC21").sizes["hidden_size"] == 2304
    with pytest.raises(ValueError, match=r"by 'GPT-1\.7B' rows of Megatron-SC21 mean"):
        ANY.model("GPT-1.7B", "someone")
    path = tmp_path / "models.yaml"
    path.write_text(
        "sources: {}\n"
        "models:\n"
        "  GPT-1.7B: {source: own, gpt: {layers: 20, hidden_size: 2560, heads: 32, vocabulary_size: 51200}}\n"
        "  narrow: {source: own, aliases: [GPT-1.7B], rows_of: [other], gpt: {layers: 40, hidden_size: 1792, heads: 14, vocabulary_size: 51200}}\n"
    )
    names = read_models(path)
    assert names.model("GPT-1.7B", "someone").sizes["hidden_size"] == 2560
    assert names.model("gpt 1.7b", "other").sizes["hidden_size"] == 1792
    assert names.model("GPT3-1.3B", "other") == ANY.model("GPT3-1.3B", "other")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("models: {A: {source: own}}\nsources: {}", "exactly one family"),
        ("models: {A: {source: own, gpt: {layers: 2}}}\nsources: {}", "models.A"),
        ("models: {A: {source: own, gbt: {}}}\nsources: {}", "models.A.gbt"),
        ("models: [", "is not YAML"),
    ],
)
def test_a_file_of_models_is_refused_in_one_sentence(
    table: Callable[..., Path], tmp_path: Path, text: str, words: str
) -> None:
    path = tmp_path / "models.yaml"
    path.write_text(text)
    result = CliRunner().invoke(app, ["bench", "published", "--table", str(table()), "--models", str(path)])
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_command_names_sources_without_facts_and_models_by_another_name(table: Callable[..., Path]) -> None:
    path = table(model="GPT-1.3B")
    answer = json.loads(
        CliRunner().invoke(app, ["bench", "published", "--table", str(path), "--output", "json"]).stdout
    )
    assert (
        "No facts of the source someone: 1 rows, taken as the preset megatron with what their columns say."
        in answer["notes"]
    )
    assert "Models by another name: GPT-1.3B as GPT3-1.3B." in answer["notes"]
