"""Profiles and clusters meet by data sheet, where they name an accelerator differently."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainwright.accelerators import names_of_same_sheet, with_names
from trainwright.profiles import LayerProfile, LayerTooLarge, Profiles

LAYER = LayerProfile("T4", "block", 1, 1, 0.1, 0.2, 0.01, 10, 20)


@pytest.mark.parametrize(
    ("profiled", "named", "found"),
    [
        (["T4"], ["Tesla-T4"], ["T4", "Tesla-T4"]),
        (["Tesla-T4"], ["T4"], ["Tesla-T4", "T4"]),
        (["T4"], ["tesla t4", "Tesla-T4"], ["T4", "tesla t4", "Tesla-T4"]),
        (["T4"], ["T4", "V100"], ["T4"]),  # of another data sheet
        (["T4", "Tesla-T4"], ["tesla t4"], ["T4", "Tesla-T4"]),  # whose figures may differ: neither is taken
        (["rack-a"], ["rack-b"], ["rack-a"]),  # without data sheets
        (["A100"], ["NVIDIA-A100-SXM4-40GB-MIG-1g.5gb"], ["A100"]),  # a part of the GPU
    ],
)
def test_accelerators_without_profiles_take_those_of_their_data_sheet(
    profiled: list[str], named: list[str], found: list[str]
) -> None:
    given = Profiles(
        tuple(replace(LAYER, accelerator=name) for name in profiled),
        too_large=tuple(LayerTooLarge(name, "block", 1, 8) for name in profiled),
    )
    answer = with_names(given, names_of_same_sheet(given, named))
    assert [layer.accelerator for layer in answer.layers] == [one.accelerator for one in answer.too_large] == found
    assert {replace(layer, accelerator="") for layer in answer.layers} == {replace(LAYER, accelerator="")}
