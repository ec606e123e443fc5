"""Data sheets of accelerators and machines as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Final

from rich.console import Group

from trainwright.accelerators import DataSheet, Machine
from trainwright.accelerators.data_sheets import AttentionKernels, Checked, Figure, NativeFormats, Source, sheet_file
from trainwright.accelerators.machines import MachinePort, NetworkKind, machine_file
from trainwright.report.tables import add_row, new_table, titled

CHECKED_WORDS: Final[dict[Checked | None, str]] = {
    "copy": "compared with a copy of the source",
    "quoted": "compared with others that quote the source",
    "computed": "computed from figures that were compared",
    None: "not compared with anything",
}


def accelerator_table(sheets: Sequence[DataSheet]) -> Group:
    """Return peak TFLOP/s, memory, prices and the number of checked figures by accelerator."""
    table = new_table(
        [
            ("accelerator", "whole"),
            ("fp32", "right"),
            ("fp16", "right"),
            ("bf16", "right"),
            ("GiB", "right"),
            ("GB/s", "right"),
            ("$/h", "right"),
            ("checked", "right"),
        ]
    )
    for sheet in sheets:
        bfloat16 = sheet.bfloat16_flops_per_second
        price = sheet.price_per_hour
        add_row(
            table,
            sheet.name,
            _tera(sheet.float32_flops_per_second.value),
            _tera(sheet.float16_flops_per_second.value),
            "–" if bfloat16 is None else _tera(bfloat16.value),
            f"{sheet.memory_bytes.value / 2**30:.1f}",
            f"{sheet.memory_bytes_per_second.value / 1e9:.4g}",
            "–" if price is None else f"{price.value:.2f}",
            _checked(sheet),
        )
    return titled(
        "Accelerators, by their data sheets",
        table,
        "fp32, fp16, bf16: peak TFLOP/s of dense matrix products; GiB and GB/s: the memory; "
        "$/h: of one device on demand, typical of its month; "
        "checked: figures compared with a copy of their source or with others that quote it; a name shows each",
    )


def machine_table(machines: Sequence[Machine]) -> Group:
    """Return devices, bandwidths inside and between machines, and prices by machine."""
    table = new_table(
        [
            ("machine", "whole"),
            ("devices", "right"),
            ("accelerator", "whole"),
            ("inside", "right"),
            ("network", "right"),
            ("$/h", "right"),
        ]
    )
    for machine in machines:
        inside, price = machine.inside, machine.price_per_hour
        add_row(
            table,
            machine.name,
            str(machine.devices),
            machine.accelerator,
            "–" if inside is None else f"{inside.bandwidth_bytes_per_second / 1e9:.4g}",
            f"{machine.network.bandwidth_bytes_per_second / 1e9:.4g}",
            "–" if price is None else f"{price.value:.2f}",
        )
    return titled(
        "Machines, by their data sheets",
        table,
        "inside, network: GB/s in one direction; $/h of the whole machine on demand, typical of its month; "
        "a name shows each figure's source, and what it was compared with",
    )


def sheet_lines(sheet: DataSheet | Machine) -> str:
    """Return every figure of one data sheet with its source."""
    sources = sheet_file().sources if isinstance(sheet, DataSheet) else machine_file().sources
    lines = [f"{sheet.name}" + (f" (also {', '.join(sheet.aliases)})" if sheet.aliases else ""), ""]
    for field in fields(sheet):
        value = getattr(sheet, field.name)
        if isinstance(value, Figure):
            lines += [f"{field.name}: {value.value:g}", *_origin(value, sources)]
        elif isinstance(value, MachinePort):
            rate = f"{value.bandwidth_bytes_per_second:g} bytes/s"
            rate += f" over {value.nics} NICs" if value.nics > 1 else ""
            lines += [f"{field.name}: {rate}, latency {value.latency_seconds:g} s", *_origin(value, sources)]
            if value.kind is not None:
                kind = machine_file().networks[value.kind]
                lines += [
                    f"    reached: {kind.reached_ratio:g} of it, assumed by the kind of network",
                    *_origin(kind, sources),
                ]
        elif field.name not in {"name", "aliases"} and value is not None:
            lines.append(f"{field.name}: {value}")
    if isinstance(sheet, DataSheet):
        for name, shared in (
            ("formats", sheet.generation_sheet.formats),
            ("attention_kernels", sheet.generation_sheet.attention_kernels),
        ):
            lines += [f"{name}: {', '.join(shared.values)}", *_origin(shared, sources)]
        generation = sheet.generation_sheet
        for name, figure in (
            ("pcie_bytes_per_second", generation.pcie_bytes_per_second),
            ("nvlink_bytes_per_second", generation.nvlink_bytes_per_second),
        ):
            lines += [f"{name}: {figure.value:g}", *_origin(figure, sources)] if figure is not None else []
    return "\n".join(lines)


def _origin(
    figure: Figure | MachinePort | NetworkKind | NativeFormats | AttentionKernels, sources: Mapping[str, Source]
) -> list[str]:
    source = sources[figure.source]
    as_of = f" ({source.as_of})" if source.as_of else ""
    further = [source.url, figure.note, CHECKED_WORDS[figure.checked]]
    return [f"    {source.title}{as_of}", *(f"    {line}" for line in further if line)]


def _checked(sheet: DataSheet) -> str:
    """Return checked over all figures: `3/7`."""
    figures = [value for field in fields(sheet) if isinstance(value := getattr(sheet, field.name), Figure)]
    return f"{sum(figure.checked is not None for figure in figures)}/{len(figures)}"


def _tera(flops_per_second: float) -> str:
    return f"{flops_per_second / 1e12:.4g}"
