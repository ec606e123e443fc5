"""Data sheets of accelerators: what the vendors state, figure by figure with its source."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

import yaml

from trainwright.accelerators.names import find, plain
from trainwright.documents import adapter
from trainwright.layer import Dtype

Generation = Literal[
    "pascal", "volta", "turing", "ampere", "ampere_rtx", "ada", "hopper", "blackwell", "cdna2", "cdna3"
]
"""Architectures that share efficiencies; Ampere's consumer chips (GA10x) differ from its data-centre chip (GA100)."""


Checked = Literal["copy", "quoted", "computed"]
"""What a figure was compared with: a copy of its source; others that quote it; other figures that it follows from."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a figure was published.

    Attributes:
        url: None for an assumption, and where several public logs agree and none is better than the others.
        as_of: the month (or year) it holds for, where it changes (prices).
    """

    title: str
    url: str | None = None
    as_of: str | None = None


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure and the key of its source.

    Attributes:
        checked: None where it was compared with nothing and comes from general knowledge.
        note: how it follows where the source does not state it as such.
    """

    value: float
    source: str
    checked: Checked | None = None
    note: str | None = None


@dataclass(frozen=True)
class DataSheet:
    """One accelerator as its vendor describes it. Rates are of dense operations (no sparsity), at boost clock.

    Attributes:
        name: as a node reports it (the `nvidia.com/gpu.product` label).
        aliases: other names for it.
        multiprocessors: streaming multiprocessors, or compute units.
        float32_flops_per_second: of matrix products in full float32, not TF32.
        tensor_float32_flops_per_second: of matrix products of float32 values in TF32; None where there is no TF32.
        float16_flops_per_second: of matrix products accumulated in float32, as PyTorch does.
        bfloat16_flops_per_second: None where the hardware has none; such products run at the float32 rate.
        memory_bytes: what the runtime reports as its total, less than the name says where error correction takes some.
        link: what connects the devices of one machine.
        link_bytes_per_second: that link in one direction, for each device.
        price_per_hour: US dollars for one device, on demand; None where no price was found to compare with.
    """

    name: str
    aliases: tuple[str, ...]
    generation: Generation
    multiprocessors: Figure
    float32_flops_per_second: Figure
    tensor_float32_flops_per_second: Figure | None
    float16_flops_per_second: Figure
    bfloat16_flops_per_second: Figure | None
    memory_bytes: Figure
    memory_bytes_per_second: Figure
    power_watts: Figure
    link: str
    link_bytes_per_second: Figure
    price_per_hour: Figure | None

    def __str__(self) -> str:
        return self.name

    def flops_per_second(self, dtype: Dtype, *, tensor_float32: bool = False) -> float:
        """Peak of dense matrix products in that number format."""
        in_format = {
            Dtype.FLOAT32: self.tensor_float32_flops_per_second if tensor_float32 else None,
            Dtype.FLOAT16: self.float16_flops_per_second,
            Dtype.BFLOAT16: self.bfloat16_flops_per_second,
        }[dtype]
        return (in_format or self.float32_flops_per_second).value

    def uses_matrix_units(self, dtype: Dtype, *, tensor_float32: bool = False) -> bool:
        """Whether such products run on tensor (matrix) cores rather than on the general units."""
        if self.generation == "pascal":
            return False
        return self.flops_per_second(dtype, tensor_float32=tensor_float32) > self.float32_flops_per_second.value


@dataclass(frozen=True, slots=True)
class SheetFile:
    """The file `sheet.yaml`."""

    sources: dict[str, Source]
    accelerators: tuple[DataSheet, ...]


@cache
def sheet_file() -> SheetFile:
    """All data sheets and their sources."""
    text = files("trainwright.accelerators").joinpath("sheet.yaml").read_text(encoding="utf-8")
    found: SheetFile = adapter(SheetFile).validate_python(yaml.safe_load(text))
    return found


@cache
def _by_name() -> dict[str, DataSheet]:
    return {plain(name): sheet for sheet in sheet_file().accelerators for name in (sheet.name, *sheet.aliases)}


def data_sheets() -> tuple[DataSheet, ...]:
    """Every accelerator that has a data sheet."""
    return sheet_file().accelerators


def has_data_sheet(accelerator: str) -> bool:
    """Whether `data_sheet` knows the accelerator."""
    return plain(accelerator) in _by_name()


def data_sheet(accelerator: str) -> DataSheet:
    """The data sheet of an accelerator by its name or an alias, whatever their case and separators.

    Raises ValueError with the nearest known names.
    """
    return find(accelerator, _by_name(), "accelerator")
