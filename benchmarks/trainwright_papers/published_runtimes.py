"""Runtimes of published throughputs: a preset, and what the row and its source state otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trainwright.runtime import AttentionLibrary, Kernels, Runtime
from trainwright.runtime_presets import runtime_preset
from trainwright.strategy import Sharding
from trainwright_papers.published_rows import PublishedRow


def preset_of(row: PublishedRow) -> str:
    """Return the preset of a row; without one by the plan: PyTorch's FSDP, Megatron, or plain data parallelism."""
    if row.preset is not None:
        return row.preset
    if row.sharding in {Sharding.ZERO2, Sharding.ZERO3}:
        return "torchtitan"
    return "megatron" if row.tp * row.pp > 1 else "trainwright"


def runtime_of(row: PublishedRow) -> Runtime:
    """Return the runtime of a row. Raises ValueError for an unknown preset."""
    words = row.compiled.lower()
    stated: dict[str, Any] = {"kernels": _kernels(words)} if words else {}
    if "asynctp" in words:
        stated["overlaps_tensor_sync"] = True
    if row.preset is None and preset_of(row) == "torchtitan":
        stated["selective_recompute"] = None  # the column `recompute` says what is computed again
    preset = runtime_preset(preset_of(row)).runtime
    if row.attention == "stored":
        stated["attention_library"] = AttentionLibrary.STORED
    elif row.attention == "fused" and preset.attention_library is AttentionLibrary.STORED:
        stated["attention_library"] = AttentionLibrary.PYTORCH
    return replace(preset, **{**stated, **row.runtime})


def framework_of(row: PublishedRow) -> str | None:
    """Return the trainer whose runtime a row states; None where it states none, or a framework that is no trainer of ours."""
    return None if row.preset is None else runtime_preset(row.preset).trainer


def drops_of(row: PublishedRow, family: str) -> bool:
    """Return whether a row trains with dropout; without a word as BERT's paper and Megatron's GPT do (0.1 by default in both)."""
    if row.dropout is not None:
        return row.dropout
    return family == "bert" or (family == "gpt" and preset_of(row).startswith("megatron"))


def _kernels(words: str) -> Kernels:
    """Return the kernels in a source's words; XLA's fusions reach about what eager kernels do (assumed, as the preset tensorflow)."""
    if "compile" in words and "xla" not in words:
        return Kernels.COMPILED
    return Kernels.FUSED if "fused" in words else Kernels.EAGER
