"""Values of all ranks, exchanged as JSON: what another process sends is parsed and checked, never unpickled."""

from __future__ import annotations

from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist

from trainwright.documents import adapter

T = TypeVar("T")
_MAX_BYTES: Final = 2**28
"""Largest value of a rank; timelines, the largest, are some MB."""


def gather(value: T, kind: Any, device: torch.device, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the values of all ranks of the group (default: all) in their order; every rank calls it.

    `kind`: the type of each value. `device`: where the group's backend takes tensors from. Raises ValueError if a value is
    larger than 256 MiB or none of its type.
    """
    type_adapter = adapter(kind)
    own = torch.frombuffer(bytearray(type_adapter.dump_json(value)), dtype=torch.uint8)
    ranks = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(ranks)]
    dist.all_gather(sizes, torch.tensor([own.numel()], device=device), group)
    lengths = [int(size) for size in sizes]
    if max(lengths) > _MAX_BYTES:
        raise ValueError(f"a rank gathers a value of {max(lengths)} bytes; at most {_MAX_BYTES}")
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: own.numel()] = own.to(device)
    texts = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(texts, padded, group)
    return [
        type_adapter.validate_json(text[:length].cpu().numpy().tobytes())
        for text, length in zip(texts, lengths, strict=True)
    ]
