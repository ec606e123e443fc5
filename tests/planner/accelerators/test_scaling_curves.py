"""Profiles measured at one row count, extrapolated by the data sheet's curve."""

from __future__ import annotations

import pytest

from trainwright.accelerators import estimate_profiles, extrapolated
from trainwright.families import Gpt
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.profiles import LayerProfile, Profiles
from trainwright.runtime import AttentionLibrary, Kernels, Runtime

MODEL = Model.of(Gpt(4, 1024, 16, 1024, 50304), Dtype.FLOAT16)
ROWS = (1, 2, 4, 8)


def measured(accelerator: str, rows: tuple[int, ...] = (1,)) -> Profiles:
    return Profiles(
        tuple(
            LayerProfile(accelerator, kind.name, 1, count, 0.004 * count, 0.008 * count, 0.001, 1000 * count, 10)
            for kind in MODEL.kinds
            for count in rows
        )
    )


def test_measured_points_stay_and_others_follow_the_data_sheet() -> None:
    grown = extrapolated(measured("Tesla-T4"), MODEL, ROWS)
    sheet = estimate_profiles(MODEL, ["Tesla-T4"], tensor_degrees=[1], rows=ROWS)
    for kind in MODEL.kinds:
        costs = [grown.cost("Tesla-T4", kind.name, 1, rows) for rows in ROWS]
        assert (costs[0].forward_seconds, costs[0].backward_seconds) == (0.004, 0.008)
        assert [cost.activation_bytes for cost in costs] == [1000, 2000, 4000, 8000]
        forwards = [cost.forward_seconds for cost in costs]
        assert forwards == sorted(forwards)
        assert forwards[-1] <= 8 * 0.004 * (1 + 1e-9)
    block = [sheet.cost("Tesla-T4", "block", 1, rows).forward_seconds for rows in ROWS]
    forwards = [grown.cost("Tesla-T4", "block", 1, rows).forward_seconds for rows in ROWS]
    assert forwards[-1] / forwards[-2] == pytest.approx(block[-1] / block[-2], rel=0.2)


@pytest.mark.parametrize(
    "runtime",
    [Runtime(kernels=Kernels.FUSED), Runtime(attention_library=AttentionLibrary.FLASH_ATTENTION_1)],
    ids=["fused kernels", "attention that the accelerator has no kernel for"],
)
def test_rows_grow_as_the_kernels_of_the_runtime(runtime: Runtime) -> None:
    name, rows = "Tesla-T4", (1, 2, 4, 8, 16)
    own = estimate_profiles(MODEL, [name], tensor_degrees=[1], rows=rows, runtime=runtime)
    table = Profiles(tuple(layer for layer in own.layers if layer.rows == 1))
    seconds = {
        used: [extrapolated(table, MODEL, rows, used).cost(name, "block", 1, count).forward_seconds for count in rows]
        for used in (runtime, Runtime())
    }
    expected = [own.cost(name, "block", 1, count).forward_seconds for count in rows]
    assert seconds[runtime] == pytest.approx(expected, rel=1e-6)
    assert seconds[Runtime()] != pytest.approx(expected, rel=2e-3)


def test_rows_that_another_runtime_derived_are_derived_again() -> None:
    fused = Runtime(kernels=Kernels.FUSED)
    stored = extrapolated(measured("Tesla-T4"), MODEL, ROWS)
    assert extrapolated(stored, MODEL, ROWS, fused) == extrapolated(measured("Tesla-T4"), MODEL, ROWS, fused) != stored
    assert extrapolated(stored, MODEL, ROWS) is stored


@pytest.mark.parametrize("seconds", [1e-5, 1e-4, 1e-3])
def test_layer_measured_below_the_assumed_host_grows_to_what_the_device_takes(seconds: float) -> None:
    name, rows = "NVIDIA-H200", (1, 2, 4, 8, 16, 32)
    block = LayerProfile(name, "block", 1, 1, seconds, 2 * seconds, 1e-3, 1000, 10)
    grown = extrapolated(Profiles((block,)), MODEL, rows)
    device = estimate_profiles(
        MODEL, [name], tensor_degrees=[1], rows=rows, runtime=Runtime(host_seconds_per_operator=0.0)
    )
    for count in rows[1:]:
        found, least = grown.cost(name, "block", 1, count), device.cost(name, "block", 1, count)
        slowest = min(seconds / device.cost(name, "block", 1, 1).forward_seconds, 1.0)
        assert found.forward_seconds >= slowest * least.forward_seconds * (1 - 1e-9)
        assert found.backward_seconds >= slowest * least.backward_seconds * (1 - 1e-9)


@pytest.mark.parametrize(
    "profiles",
    [
        measured("Tesla-T4", (1, 2)),
        measured("emulated-T4"),
        estimate_profiles(MODEL, ["T4"], tensor_degrees=[1], rows=[1]),
    ],
    ids=["measured at two", "no data sheet", "estimated"],
)
def test_profiles_stay_when_they_cannot_or_need_not_be_extrapolated(profiles: Profiles) -> None:
    assert extrapolated(profiles, MODEL, ROWS) is profiles
