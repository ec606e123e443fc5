"""Training by Hugging Face's own models, where transformers is at hand: what the executor's seconds are read beside."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import torch

from gpu_checks.findings import Finding, skipped
from gpu_checks.hardware import NO_GPU_SECONDS, Hardware
from trainwright.families import Gpt, Llama


def find(subject: str, hardware: Hardware, family: Gpt | Llama, batch: tuple[int, int]) -> Iterator[Finding]:
    """Yield the seconds of an iteration with these rows and micro-batches, for comparison."""
    if importlib.util.find_spec("transformers") is None:
        yield skipped(subject, "there is no module transformers")
        return
    model = _model(hardware, family)
    # The fused optimizer, but in the model's format: the executor keeps float32 weights besides.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    rows, micro_batches = batch
    shape = (rows, family.sequence_length)
    tokens = torch.randint(0, family.vocabulary_size, shape, device=hardware.device)

    def iterate() -> None:
        for _ in range(micro_batches):
            (model(input_ids=tokens, labels=tokens, use_cache=False).loss / micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()

    (seconds,) = hardware.seconds_of(iterate, least_seconds=0.0)
    reason = "it is for comparison with the executor" if hardware.is_gpu else NO_GPU_SECONDS
    yield skipped(subject, reason, f"{seconds:.4g} s an iteration")


def _model(hardware: Hardware, family: Gpt | Llama) -> Any:
    """Return the model with fused attention and without dropout, made on the device."""
    import transformers  # noqa: PLC0415 (it may be missing, and takes seconds to load)

    config: Any
    if isinstance(family, Gpt):
        config = transformers.GPT2Config(
            vocab_size=family.vocabulary_size, n_positions=family.sequence_length, n_embd=family.hidden_size,
            n_layer=family.layers, n_head=family.heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
    else:
        config = transformers.LlamaConfig(
            vocab_size=family.vocabulary_size, max_position_embeddings=family.sequence_length,
            hidden_size=family.hidden_size, intermediate_size=family.feed_forward_size,
            num_hidden_layers=family.layers, num_attention_heads=family.heads,
            num_key_value_heads=family.key_value_heads or family.heads,
        )  # fmt: skip
    with torch.device(hardware.device):
        model: Any = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")  # type: ignore[no-untyped-call]
    return model.to(hardware.torch_half).train()
