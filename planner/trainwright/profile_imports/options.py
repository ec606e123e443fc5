"""What an import can be told beside its files; each format says which of it it reads."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from trainwright.cluster import Port


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """Every field may be left out.

    Attributes:
        inside: the port between the devices on which tensor degrees above 1 were measured. Those times hold the
            layers' all-reduces, which the cost model adds by itself; with the port they are taken off exactly.
        memory_table: sailor's `layers.json`, with activation and parameter bytes.
        blocks: amp: half-open ranges of entries that are the model's tensor-parallel layers, in order.
        tensor_degrees: amp: the tensor degree of every file, in order, where the file names do not end with it.
    """

    inside: Port | None = None
    memory_table: Path | None = None
    blocks: tuple[tuple[int, int], ...] = ()
    tensor_degrees: tuple[int, ...] = ()

    def check(self, table_format: str, *known: str) -> None:
        """Raises ValueError for an option that is given although the format does not read it."""
        for field in fields(self):
            if field.name not in {"inside", *known} and getattr(self, field.name) != field.default:
                raise ValueError(f"the format {table_format} has no use for {field.name}; leave it out")
