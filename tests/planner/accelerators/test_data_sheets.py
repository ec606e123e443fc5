"""Data sheets: complete, consistent, sourced, and found by the names that people and nodes use."""

from __future__ import annotations

from dataclasses import fields

import pytest

from trainwright.accelerators import data_sheet, data_sheets, has_data_sheet
from trainwright.accelerators.data_sheets import DataSheet, Figure, plain, sheet_file
from trainwright.layer import Dtype

SHEETS = [pytest.param(sheet, id=sheet.name) for sheet in data_sheets()]


def _figures(sheet: DataSheet) -> dict[str, Figure]:
    values = {field.name: getattr(sheet, field.name) for field in fields(sheet)}
    return {name: value for name, value in values.items() if isinstance(value, Figure)}


@pytest.mark.parametrize("sheet", SHEETS)
def test_every_figure_is_positive_and_has_a_source_with_an_address_or_was_compared(sheet):
    sources = sheet_file().sources
    for figure in _figures(sheet).values():
        assert figure.value > 0
        url = sources[figure.source].url
        assert figure.checked if url is None else url.startswith("https://")


@pytest.mark.parametrize("sheet", SHEETS)
def test_peaks_memory_and_prices_were_checked(sheet):
    figures = _figures(sheet)
    peaks = {name for name in figures if name.endswith("flops_per_second")}
    wanted = (
        peaks | {"multiprocessors", "memory_bytes", "memory_bytes_per_second"} | figures.keys() & {"price_per_hour"}
    )
    assert not {name for name in wanted if figures[name].checked is None}


def test_every_source_is_used():
    used = {figure.source for sheet in data_sheets() for figure in _figures(sheet).values()}
    for sheet in sheet_file().generations.values():
        used |= {sheet.formats.source, sheet.attention_kernels.source, sheet.pcie_bytes_per_second.source}
    assert used == set(sheet_file().sources)


@pytest.mark.parametrize("sheet", SHEETS)
def test_prices_have_a_date(sheet):
    if sheet.price_per_hour is not None:
        assert sheet_file().sources[sheet.price_per_hour.source].as_of


@pytest.mark.parametrize("sheet", SHEETS)
def test_fewer_bits_are_never_slower(sheet):
    full = sheet.flops_per_second(Dtype.FLOAT32)
    tensor = sheet.flops_per_second(Dtype.FLOAT32, tensor_float32=True)
    half = sheet.flops_per_second(Dtype.FLOAT16)
    assert full <= tensor <= half
    assert sheet.flops_per_second(Dtype.BFLOAT16) in {full, half}


@pytest.mark.parametrize("sheet", SHEETS)
def test_bfloat16_is_native_exactly_where_its_rate_is_given(sheet):
    formats = sheet.generation_sheet.formats.values
    assert {Dtype.FLOAT32, Dtype.FLOAT16} <= set(formats)
    assert (Dtype.BFLOAT16 in formats) == (sheet.bfloat16_flops_per_second is not None)


@pytest.mark.parametrize(
    ("name", "flash", "bfloat16"),
    [("V100", False, False), ("T4", False, False), ("A100", True, True), ("H200", True, True)],
)
def test_flash_attention_and_bfloat16_begin_with_ampere(name, flash, bfloat16):
    found = data_sheet(name).generation_sheet
    assert ("flash" in found.attention_kernels.values) == flash
    assert (Dtype.BFLOAT16 in found.formats.values) == bfloat16


@pytest.mark.parametrize("sheet", SHEETS)
def test_figures_have_plausible_units(sheet):
    assert 5e12 < sheet.float32_flops_per_second.value < 2e14
    assert 1e13 < sheet.float16_flops_per_second.value < 5e15
    assert 7 * 2**30 < sheet.memory_bytes.value < 300 * 2**30
    assert 2e11 < sheet.memory_bytes_per_second.value < 1e13
    assert 1e10 < sheet.link_bytes_per_second.value < 1e12
    assert sheet.link_bytes_per_second.value < sheet.memory_bytes_per_second.value


@pytest.mark.parametrize(
    ("name", "float32", "tensor_float32", "half", "bandwidth"),
    [
        ("V100-16", 15.7e12, 15.7e12, 125e12, 900e9),
        ("T4", 8.1e12, 8.1e12, 65e12, 320e9),
        ("P100", 10.6e12, 10.6e12, 21.2e12, 732e9),
        ("A100-40", 19.5e12, 156e12, 312e12, 1555e9),
        ("A10G", 35e12, 35e12, 70e12, 600e9),
        ("A10", 31.2e12, 62.5e12, 125e12, 600e9),
        ("A30", 10.3e12, 82e12, 165e12, 933e9),
        ("A40", 37.4e12, 74.8e12, 149.7e12, 696e9),
        ("A6000", 38.7e12, 77.4e12, 154.8e12, 768e9),
        ("L20", 59.8e12, 59.8e12, 119.5e12, 864e9),
        ("L40S", 91.6e12, 183e12, 362.05e12, 864e9),
        ("RTX 5090", 104.8e12, 104.8e12, 209.5e12, 1792e9),
        ("H20", 39.5e12, 74e12, 148e12, 4000e9),
        ("H100-NVL", 60e12, 417.5e12, 835.5e12, 3900e9),
        ("GB200", 80e12, 1250e12, 2500e12, 8000e9),
        ("B300", 75e12, 1125e12, 2250e12, 7750e9),
        ("RTX 2080 Ti", 13.4e12, 13.4e12, 53.8e12, 616e9),
        ("RTX 4090", 82.6e12, 82.6e12, 165.2e12, 1008e9),
        ("H100", 66.9e12, 494.7e12, 989.4e12, 3350e9),
        ("B200", 75e12, 1100e12, 2250e12, 7700e9),
        ("MI300X", 163.4e12, 653.7e12, 1307.4e12, 5300e9),
    ],
)
def test_peaks_are_dense(name, float32, tensor_float32, half, bandwidth):
    sheet = data_sheet(name)
    assert sheet.flops_per_second(Dtype.FLOAT32) == float32
    assert sheet.flops_per_second(Dtype.FLOAT32, tensor_float32=True) == tensor_float32
    assert sheet.flops_per_second(Dtype.FLOAT16) == half
    assert sheet.memory_bytes_per_second.value == bandwidth


@pytest.mark.parametrize(
    ("name", "operations_per_cycle", "boost_hertz"),
    [
        ("P100", 2 * 64, 1.480e9),
        ("V100", 2 * 64, 1.530e9),
        ("T4", 2 * 64, 1.590e9),
        ("RTX 2080", 2 * 64, 1.710e9),
        ("RTX 2080 Ti", 2 * 64, 1.545e9),
        ("TITAN RTX", 2 * 64, 1.770e9),
        ("A10G", 2 * 128, 1.710e9),
        ("RTX 3090", 2 * 128, 1.695e9),
        ("A10", 2 * 128, 1.695e9),
        ("A40", 2 * 128, 1.740e9),
        ("A6000", 2 * 128, 1.800e9),
        ("A30", 2 * 64, 1.440e9),
        ("RTX 5090", 2 * 128, 2.407e9),
        ("RTX 6000 Ada", 2 * 128, 2.505e9),
        ("L20", 2 * 128, 2.540e9),
        ("H20", 2 * 128, 1.980e9),
        ("H100-NVL", 2 * 128, 1.785e9),
        ("B300", 2 * 128, 1.980e9),
        ("A100", 2 * 64, 1.410e9),
        ("L4", 2 * 128, 2.040e9),
        ("L40S", 2 * 128, 2.520e9),
        ("RTX 4090", 2 * 128, 2.520e9),
        ("H100", 2 * 128, 1.980e9),
        ("H100-PCIE", 2 * 128, 1.755e9),
        ("B200", 2 * 128, 1.980e9),
        ("MI250X", 2 * 128, 1.700e9),
        ("MI300X", 2 * 128, 2.100e9),
    ],
)
def test_float32_peaks_follow_from_units_and_clock(name, operations_per_cycle, boost_hertz):
    sheet = data_sheet(name)
    peak = sheet.multiprocessors.value * operations_per_cycle * boost_hertz
    assert sheet.float32_flops_per_second.value == pytest.approx(peak, rel=0.006)


@pytest.mark.parametrize(
    ("name", "lanes", "lane_bytes_per_second"),
    [
        ("P100", 4, 20e9),
        ("V100", 6, 25e9),
        ("A100", 12, 25e9),
        ("H100", 18, 25e9),
        ("H20", 18, 25e9),
        ("B200", 18, 50e9),
        ("B300", 18, 50e9),
        ("GB200", 18, 50e9),
        ("MI300X", 7, 64e9),
    ],
)
def test_links_match_their_generation(name, lanes, lane_bytes_per_second):
    sheet = data_sheet(name)
    assert sheet.link_bytes_per_second.value == lanes * lane_bytes_per_second
    if sheet.link == "NVLink":
        assert sheet.generation_sheet.nvlink_bytes_per_second.value == lane_bytes_per_second


@pytest.mark.parametrize(("name", "lanes"), [("A40", 4), ("A6000", 4), ("RTX 3090", 4), ("A30", 4), ("A100-PCIE", 12)])
def test_bridges_are_of_whole_links(name, lanes):
    sheet = data_sheet(name)
    assert sheet.link == "PCIe"
    assert sheet.bridge_bytes_per_second.value == lanes * sheet.generation_sheet.nvlink_bytes_per_second.value


@pytest.mark.parametrize(
    ("name", "half"), [("RTX 2080", 40.3e12), ("TITAN RTX", 130.5e12), ("RTX 3090", 71e12), ("RTX 4090", 165.2e12)]
)
def test_half_precision_accumulates_in_float32(name, half):
    assert data_sheet(name).flops_per_second(Dtype.FLOAT16) == half


def test_names_and_aliases_are_unique_per_accelerator():
    names = [plain(name) for sheet in data_sheets() for name in (sheet.name, *sheet.aliases)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("Tesla-T4", "Tesla-T4"),
        ("t4", "Tesla-T4"),
        ("v100-16", "Tesla-V100-SXM2-16GB"),
        ("tesla v100 sxm2 16gb", "Tesla-V100-SXM2-16GB"),
        ("NVIDIA-A100-SXM4-40GB", "NVIDIA-A100-SXM4-40GB"),
        ("a100_80gb", "NVIDIA-A100-SXM4-80GB"),
        ("rtx2080ti", "NVIDIA-GeForce-RTX-2080-Ti"),
        ("GH200", "NVIDIA-GH200-480GB"),
        ("A100-40-PCIe", "NVIDIA-A100-PCIE-40GB"),
        ("A6000", "NVIDIA-RTX-A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "NVIDIA-RTX-6000-Ada-Generation"),
        ("rtx 5090", "NVIDIA-GeForce-RTX-5090"),
        ("NVIDIA B300 SXM6 AC", "NVIDIA-B300-SXM6-AC"),
    ],
)
def test_lookup_ignores_case_and_separators(asked, found):
    assert data_sheet(asked).name == found


def test_unknown_accelerator_is_refused_with_the_nearest():
    with pytest.raises(
        ValueError, match=r"no data sheet for accelerator 'A100-60'; choose one that has one, such as NVIDIA-A100"
    ):
        data_sheet("A100-60")


def test_accelerator_name_like_no_other_is_refused_with_all():
    with pytest.raises(ValueError, match=r"'~'.*AMD-Instinct-MI250X.*Tesla-V100-SXM2-32GB"):
        data_sheet("~")


def test_mig_instance_is_not_taken_for_a_whole_device() -> None:
    name = "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb"
    assert not has_data_sheet(name)
    with pytest.raises(ValueError, match="it is a MIG instance, a part of a GPU's multiprocessors and memory"):
        data_sheet(name)
