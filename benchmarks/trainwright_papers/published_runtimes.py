"""Runtimes of published throughputs: a preset, and what a source ran differently."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from trainwright.layer import Attention
from trainwright.runtime import AttentionLibrary, Kernels, Runtime, SelectiveRecompute
from trainwright.runtime_presets import runtime_preset
from trainwright.strategy import Sharding
from trainwright_papers.published_rows import PublishedRow


@dataclass(frozen=True, slots=True)
class SourceRuntime:
    """Runtime of one source's runs.

    Attributes:
        changes: fields of Runtime in which it differs from the preset.
        attention: STORED before fused attention.
    """

    preset: str
    changes: Mapping[str, Any]
    attention: Attention = Attention.FUSED


SOURCES: Final[Mapping[str, SourceRuntime]] = {
    # FSDP1 in mixed precision PURE, FlashAttention 1 in Triton, flash-attn's cross-entropy: scripts/train/yamls and
    # llmfoundry/models/mpt of https://github.com/mosaicml/llm-foundry.
    "llm-foundry": SourceRuntime(
        "torchtitan",
        {
            "gradient_dtype": None,
            "attention_library": AttentionLibrary.FLASH_ATTENTION_1,
            "fuses_loss": True,
            "selective_recompute": None,
        },
    ),
    # PyTorch's DDP and the repository's fused dropout, normalisation, products and cross-entropy, FlashAttention 1:
    # training/README.md of https://github.com/Dao-AILab/flash-attention, December 2022.
    "flash-attention": SourceRuntime(
        "trainwright", {"attention_library": AttentionLibrary.FLASH_ATTENTION_1, "fuses_loss": True}
    ),
    # Scores were stored, and sequence parallelism came later (Narayanan et al. 2021; NVIDIA DeepLearningExamples, LanguageModeling/BERT).
    "SC21": SourceRuntime("megatron", {"sequence_parallel": False}, Attention.STORED),
    # Megatron-DeepSpeed of 2021 and 2022: train/ of https://github.com/bigscience-workshop/bigscience.
    "BigScience": SourceRuntime("megatron", {"sequence_parallel": False}, Attention.STORED),
    "BERT": SourceRuntime("trainwright", {}, Attention.STORED),
    "torchtitan": SourceRuntime("torchtitan", {"selective_recompute": None}),
}
"""Runtimes by a part of the source's name."""

FRAMEWORKS: Final = {"megatron": "megatron", "nemo": "megatron", "deepspeed": "deepspeed"}
"""Presets by a part of the names of other sources."""

CHUNKS: Final = {"GPT-76B": 3, "GPT-145B": 2, "GPT-310B": 2, "GPT-530B": 3}
"""Chunks of interleaved stages: their 15, 10, 6 and 3 blocks in `--num-layers-per-virtual-pipeline-stage` 5, 5, 3 and 1
(sc21/run_table_1.sh of Megatron-LM)."""


def source_runtime(row: PublishedRow) -> SourceRuntime:
    """Return the runtime of a row's source; of an unknown source a preset by its name or by its plan."""
    for name, found in SOURCES.items():
        if name in row.source:
            return found
    for name, preset in FRAMEWORKS.items():
        if name in row.source.lower():
            return SourceRuntime(preset, {})
    if row.sharding in {Sharding.ZERO2, Sharding.ZERO3}:
        return SourceRuntime("torchtitan", {"selective_recompute": None})
    return SourceRuntime("megatron" if row.tp * row.pp > 1 else "trainwright", {})


def runtime_of(row: PublishedRow) -> Runtime:
    """Return the runtime of a row: its source's, with the kernels, overlap, chunks and recompute that the row states."""
    source = source_runtime(row)
    stated: dict[str, Any] = {"kernels": _kernels(row.compiled)} if row.compiled else {}
    if "asynctp" in row.compiled.lower():
        stated["overlaps_tensor_sync"] = True
    if "interleaved" in row.note:
        stated["virtual_stages"] = CHUNKS.get(row.model, 2)
    if "selective" in row.note:
        is_of_operators = source.preset == "torchtitan"
        stated["selective_recompute"] = (
            SelectiveRecompute.OPERATORS if is_of_operators else SelectiveRecompute.ATTENTION
        )
    return replace(runtime_preset(source.preset).runtime, **{**source.changes, **stated})


def _kernels(words: str) -> Kernels:
    if "compile" in words:
        return Kernels.COMPILED
    return Kernels.FUSED if "fused" in words else Kernels.EAGER
