"""Data sheets of accelerators with the source of every figure, found by any of their names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Final, Literal, TypeVar

import yaml

from trainwright.documents import adapter
from trainwright.layer import Attention, Dtype
from trainwright.runtime import AttentionLibrary

T = TypeVar("T")

MAX_NAMES_SHOWN = 3
MIG_PART: Final = "-MIG-"
"""Part of a product label that names a MIG instance, as in `NVIDIA-A100-SXM4-40GB-MIG-1g.5gb`."""


def plain(name: str) -> str:
    """Drop case and separators of a name: `Tesla T4`, `tesla-t4` and `Tesla_T4` become equal."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


def find(name: str, entries: Mapping[str, T], what: str) -> T:
    """Look up an item by name; keys are normalised names.

    Raises ValueError with the nearest names if there is none.
    """
    entry = entries.get(plain(name))
    if entry is None:
        near = get_close_matches(plain(name), entries, n=len(entries), cutoff=0.4)
        labels = dict.fromkeys(str(entries[alias]) for alias in near)
        shown = list(labels)[:MAX_NAMES_SHOWN] or sorted({str(item) for item in entries.values()})
        raise ValueError(f"no data sheet for {what} {name!r}; choose one that has one, such as {', '.join(shown)}")
    return entry


Checked = Literal["copy", "quoted", "computed"]
"""Evidence for a figure: a copy of its source, others that quote it, or figures that it follows from."""


@dataclass(frozen=True, slots=True)
class Source:
    """Publication of a figure.

    Attributes:
        url: None for an assumption, and where several public logs agree and none is better than the others.
        as_of: month or year for which a changing figure (a price) holds.
    """

    title: str
    url: str | None = None
    as_of: str | None = None


@dataclass(frozen=True, slots=True)
class Figure:
    """Figure and the key of its source.

    Attributes:
        checked: None if it comes from general knowledge and was compared with nothing.
        note: its derivation, if the source does not state it as such.
    """

    value: float
    source: str
    checked: Checked | None = None
    note: str | None = None


AttentionKernel = Literal["cudnn", "flash", "memory_efficient", "math"]
"""Kernels of PyTorch's fused attention; `math` stores the scores, the others never do."""


@dataclass(frozen=True, slots=True)
class NativeFormats:
    """Number formats that units compute without a conversion to float32, and the key of their source."""

    values: tuple[Dtype, ...]
    source: str
    checked: Checked | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class AttentionKernels:
    """Kernels that run, the fastest first, and the key of their source."""

    values: tuple[AttentionKernel, ...]
    source: str
    checked: Checked | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of data-sheet rates that one generation reaches. Each is an assumption about its hardware and libraries.

    They follow public experience with large matrix products (cuBLAS reaches 70-90 % of the dense peak, rocBLAS less). None is
    fitted to one device.

    Attributes:
        general: of the float32 peak in large matrix products on the general (CUDA) units.
        matrix: of the peak of the tensor (matrix) units in large matrix products. On A100 a product of 8192³ normally
            distributed values reaches 257 of 312 TFLOP/s (https://www.thonking.ai/p/strangely-matrix-multiplications).
        attention: of the rate of large matrix products in PyTorch's fused attention, forward and backward. Where that is
            FlashAttention-2, it follows its plots for A100 (160 to 200 of 312 TFLOP/s) and H100 (260 to 340 of 989) at 2,048
            to 16,384 tokens (Dao 2023, figures 4 and 7, https://arxiv.org/abs/2307.08691).
        general_flops_per_joule, matrix_flops_per_joule: rate that the power limit sustains. It binds on small GPUs (T4, L4,
            H100 PCIe), whose clock falls far below boost under sustained products; larger GPUs of the generation reach their
            ratio within their limit.
        attention_of: `attention` of other libraries, where it differs from PyTorch's. FlashAttention reaches 30 to 50 % of
            A100's peak forward and 25 to 35 % backward (Dao 2023, section 1), about 0.6 of FlashAttention-2. On H100 cuDNN
            reaches 400 to 600 TFLOP/s where FlashAttention-2 reaches 320 to 370 (Shah et al. 2024, figure 5,
            https://arxiv.org/abs/2407.08608).
    """

    general: float
    matrix: float
    attention: float
    general_flops_per_joule: float
    matrix_flops_per_joule: float
    attention_of: dict[AttentionLibrary, float] = field(default_factory=dict)

    def attention_ratio(self, library: AttentionLibrary) -> float:
        """Return the share that a library's attention reaches of the rate of large matrix products."""
        return self.attention_of.get(library, self.attention)


@dataclass(frozen=True, slots=True)
class GenerationSheet:
    """Properties that all accelerators of a generation share.

    Attributes:
        pcie_bytes_per_second: of PCIe with 16 lanes, in one direction.
        nvlink_bytes_per_second: of one NVLink, in one direction; None without NVLink.
        matrix_units: whether matrix products of half formats run on tensor (matrix) cores.
    """

    formats: NativeFormats
    attention_kernels: AttentionKernels
    efficiency: Efficiency
    pcie_bytes_per_second: Figure
    nvlink_bytes_per_second: Figure | None = None
    matrix_units: bool = True


@dataclass(frozen=True)
class DataSheet:
    """Accelerator as its vendor describes it; rates are of dense operations at boost clock.

    Attributes:
        name: as a node reports it (the `nvidia.com/gpu.product` label).
        generation: key of its architecture in the file; Ampere's consumer chips (GA10x) differ from its data-centre chip (GA100).
        multiprocessors: streaming multiprocessors, or compute units.
        float32_flops_per_second: of matrix products in full float32, not TF32.
        tensor_float32_flops_per_second: of matrix products of float32 tensors in TF32; None if unsupported.
        float16_flops_per_second: of matrix products accumulated in float32, as PyTorch does.
        bfloat16_flops_per_second: None if unsupported; such products run at the float32 rate.
        memory_bytes: total that the runtime reports, which error correction may reduce below the nominal size.
        link: interconnect between the devices of one machine.
        link_bytes_per_second: in one direction, for each device.
        bridge_bytes_per_second: of the NVLink bridge between two cards whose link is PCIe, in one direction; None without one.
        price_per_hour: US dollars for one device, on demand; None if no price was found to compare with.
    """

    name: str
    aliases: tuple[str, ...]
    generation: str
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
    bridge_bytes_per_second: Figure | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def generation_sheet(self) -> GenerationSheet:
        return sheet_file().generations[self.generation]

    def flops_per_second(self, dtype: Dtype, *, tensor_float32: bool = False) -> float:
        """Return the peak of dense matrix products in a number format."""
        in_format = {
            Dtype.FLOAT32: self.tensor_float32_flops_per_second if tensor_float32 else None,
            Dtype.FLOAT16: self.float16_flops_per_second,
            Dtype.BFLOAT16: self.bfloat16_flops_per_second,
        }[dtype]
        return (in_format or self.float32_flops_per_second).value

    def limited_to(self, watts: float | None) -> DataSheet:
        """Return the sheet with another power limit; None: its own."""
        return self if watts is None else replace(self, power_watts=replace(self.power_watts, value=watts))

    def attention(self, library: AttentionLibrary, dtype: Dtype) -> Attention:
        """Return the attention that a library has for a number format, of those that the device computes natively.

        PyTorch's fused kernels take all of them. FlashAttention's and cuDNN's take half formats, from Ampere on; without them
        Transformer Engine writes the scores to memory.
        """
        if library is AttentionLibrary.STORED:
            return Attention.STORED
        is_native = dtype in self.generation_sheet.formats.values
        if library is AttentionLibrary.PYTORCH:
            return Attention.FUSED if is_native else Attention.MATH
        is_fused = (
            is_native and dtype is not Dtype.FLOAT32 and "flash" in self.generation_sheet.attention_kernels.values
        )
        return Attention.FUSED if is_fused else Attention.STORED

    def uses_matrix_units(self, dtype: Dtype, *, tensor_float32: bool = False) -> bool:
        """Return True if matrix products run on tensor (matrix) cores, not on the general units."""
        return (
            self.generation_sheet.matrix_units
            and self.flops_per_second(dtype, tensor_float32=tensor_float32) > self.float32_flops_per_second.value
        )


@dataclass(frozen=True, slots=True)
class SheetFile:
    """Content of `data_sheets.yaml`."""

    sources: dict[str, Source]
    generations: dict[str, GenerationSheet]
    accelerators: tuple[DataSheet, ...]

    def __post_init__(self) -> None:
        for sheet in self.accelerators:
            if sheet.generation not in self.generations:
                raise ValueError(
                    f"{sheet.name}: generation {sheet.generation!r} is not among those of the file; add it there"
                )


@cache
def sheet_file() -> SheetFile:
    """Load all data sheets and their sources."""
    text = files("trainwright.accelerators").joinpath("data_sheets.yaml").read_text(encoding="utf-8")
    file: SheetFile = adapter(SheetFile).validate_python(yaml.safe_load(text))
    return file


@cache
def _by_name() -> dict[str, DataSheet]:
    return {plain(name): sheet for sheet in sheet_file().accelerators for name in (sheet.name, *sheet.aliases)}


def data_sheets() -> tuple[DataSheet, ...]:
    return sheet_file().accelerators


def has_data_sheet(accelerator: str) -> bool:
    return plain(accelerator) in _by_name()


def data_sheet(accelerator: str) -> DataSheet:
    """Return an accelerator's data sheet by name or alias, regardless of case and separators.

    Raises ValueError with the nearest known names.
    """
    if MIG_PART in accelerator.upper():
        raise ValueError(
            f"no data sheet for accelerator {accelerator!r}: it is a MIG instance, a part of a GPU's multiprocessors and "
            "memory; data sheets describe whole GPUs"
        )
    return find(accelerator, _by_name(), "accelerator")
