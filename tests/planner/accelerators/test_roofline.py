"""Estimated profiles: never faster than a data sheet allows, and shaped like measured ones."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.accelerators import curve_from, data_sheet, data_sheets, estimate_profiles
from trainwright.accelerators.data_sheets import Figure
from trainwright.accelerators.efficiency import INNER_OVERHEAD, TILES
from trainwright.accelerators.roofline import Roof, layer_seconds
from trainwright.accelerators.scaling_curves import SLOWEST_RATIO
from trainwright.documents import dumps, loads
from trainwright.families import T5, Bert, Gpt, Llama, Moe, Swin, TransGan, Vit, WideResnet
from trainwright.layer import Attention, Dtype
from trainwright.model import Model
from trainwright.profiles import Profiles
from trainwright.runtime import Runtime

ROWS = (1, 2, 3, 4, 6, 8, 16)
DEGREES = (1, 2, 4, 8)
NAMES = st.sampled_from([sheet.name for sheet in data_sheets()])
DTYPES = st.sampled_from(list(Dtype))
MODELS = st.builds(
    Model.of,
    st.builds(
        lambda heads, width, tokens, words: Gpt(2, heads * width, heads, tokens, words),
        st.sampled_from([8, 16, 32]),
        st.sampled_from([16, 64, 128]),
        st.sampled_from([16, 128, 1000, 2048]),
        st.sampled_from([1000, 50304]),
    ),
    DTYPES,
    st.sampled_from(list(Attention)),
)
GPT = Model.of(Gpt(24, 1024, 16, 1024, 50304), Dtype.FLOAT16)


def _seconds(model, name, kind, tensor=1, rows=1, **options):
    roof = Roof.of(data_sheet(name), model.dtype, **{"tensor_float32": False, **options})
    times = layer_seconds(model.kind(kind), roof, [tensor], [rows])
    return float(times.forward[0, 0]), float(times.backward[0, 0])


@given(MODELS, NAMES, st.booleans())
def test_no_layer_is_faster_than_either_roof(model, name, tensor_float32):
    profiles = estimate_profiles(model, [name], tensor_degrees=DEGREES, rows=ROWS, tensor_float32=tensor_float32)
    sheet = data_sheet(name)
    peak = sheet.flops_per_second(model.dtype, tensor_float32=tensor_float32)
    for profile in profiles.layers:
        kind = model.kind(profile.kind)
        flops = kind.forward_flops_per_row * profile.rows / profile.tensor_degree
        written = kind.output_elements_per_row * profile.rows * model.dtype.num_bytes
        roof = max(flops / peak, written / sheet.memory_bytes_per_second.value)
        assert profile.forward_seconds >= roof
        assert profile.backward_seconds >= 2 * flops / peak


@given(MODELS, NAMES)
def test_more_rows_take_longer_but_at_most_proportionally(model, name):
    profiles = estimate_profiles(model, [name], tensor_degrees=DEGREES, rows=ROWS)
    for kind in model.kinds:
        for tensor in profiles.tensor_degrees(name, kind.name):
            for few, many in ((1, 2), (2, 4), (1, 16), (4, 16)):
                low, high = (profiles.cost(name, kind.name, tensor, rows) for rows in (few, many))
                for field in ("forward_seconds", "backward_seconds", "activation_bytes"):
                    before, after = getattr(low, field), getattr(high, field)
                    assert before <= after <= before * many / few * (1 + 1e-9) + 1


@given(MODELS, NAMES, st.sampled_from(ROWS))
def test_tensor_degree_helps_at_most_proportionally(model, name, rows):
    profiles = estimate_profiles(model, [name], tensor_degrees=DEGREES, rows=[rows])
    for few, many in ((1, 2), (2, 4), (4, 8)):
        low, high = (profiles.cost(name, "block", tensor, rows) for tensor in (few, many))
        for field in ("forward_seconds", "backward_seconds"):
            assert getattr(high, field) <= getattr(low, field) * (1 + 1e-9)
            assert getattr(high, field) >= getattr(low, field) * few / many * (1 - 1e-9)


@given(MODELS, NAMES, st.floats(1.1, 4.0))
def test_a_device_of_a_faster_sheet_is_never_slower(model, name, factor):
    sheet = data_sheet(name)

    def faster(figure: Figure | None) -> Figure | None:
        return figure and replace(figure, value=figure.value * factor)

    better = replace(
        sheet,
        float32_flops_per_second=faster(sheet.float32_flops_per_second),
        float16_flops_per_second=faster(sheet.float16_flops_per_second),
        bfloat16_flops_per_second=faster(sheet.bfloat16_flops_per_second),
        memory_bytes_per_second=faster(sheet.memory_bytes_per_second),
        power_watts=faster(sheet.power_watts),
    )
    for kind in model.kinds:
        slow, fast = (
            layer_seconds(kind, Roof.of(each, model.dtype, tensor_float32=False), [1, 4], [1, 8])
            for each in (sheet, better)
        )
        for before, after in ((slow.forward, fast.forward), (slow.backward, fast.backward)):
            assert np.all(after <= before)
            assert np.all(after >= before / factor * (1 - 1e-9))


@given(NAMES, DTYPES, *[st.integers(1, 9000)] * 3)
def test_products_agree_with_tiles_counted_one_by_one(name, dtype, rows, columns, inner):
    sheet = data_sheet(name)
    roof = Roof.of(sheet, dtype, tensor_float32=False)
    times = []
    for tile in TILES:
        tiles = -(-rows // tile.rows) * -(-columns // tile.columns) * tile.splits
        waves = math.ceil(tiles / sheet.multiprocessors.value)
        steps = math.ceil(inner / tile.splits) + INNER_OVERHEAD
        flops = 2 * tile.rows * tile.columns * steps * waves * sheet.multiprocessors.value
        times.append(flops / (tile.ratio * roof.flops_per_second))
    found = roof.product_seconds(*(np.array([float(size)]) for size in (rows, columns, inner)))
    assert found[0] == pytest.approx(min(times))
    assert found[0] >= 2 * rows * columns * inner / roof.flops_per_second


def test_large_products_reach_the_stated_share_of_the_peak_and_small_ones_less():
    sheet = data_sheet("A100-40")
    roof = Roof.of(sheet, Dtype.FLOAT16, tensor_float32=False)
    shares = [
        2.0 * size**3 / float(roof.product_seconds(*[np.array([float(size)])] * 3)[0]) / 312e12
        for size in (256, 1024, 8192)
    ]
    assert shares[0] < shares[1] / 2
    assert shares[1] < shares[2]
    assert shares[2] == pytest.approx(sheet.generation_sheet.efficiency.matrix, rel=0.1)


def test_small_cards_are_limited_by_their_power():
    t4, v100 = (Roof.of(data_sheet(name), Dtype.FLOAT16, tensor_float32=False) for name in ("T4", "V100-16"))
    assert t4.flops_per_second < 0.5 * 65e12
    assert v100.flops_per_second == pytest.approx(0.8 * 125e12)


def test_tensor_float32_is_used_only_when_enabled_and_present():
    model = Model.of(Gpt(2, 2048, 16, 2048, 50304))
    plain, tensor = (
        estimate_profiles(model, ["A100-40", "V100-16"], tensor_degrees=[1], rows=[4], tensor_float32=asked)
        for asked in (False, True)
    )
    assert tensor.cost("A100-40", "block", 1, 4).forward_seconds < (
        plain.cost("A100-40", "block", 1, 4).forward_seconds / 3
    )
    assert tensor.cost("V100-16", "block", 1, 4) == plain.cost("V100-16", "block", 1, 4)


def test_half_precision_gains_little_without_tensor_cores():
    def speedup(name):
        full, half = (
            sum(_seconds(Model.of(GPT.family, dtype), name, "block", rows=8))
            for dtype in (Dtype.FLOAT32, Dtype.FLOAT16)
        )
        return full / half

    assert 1.5 < speedup("P100") < 2.1
    assert speedup("V100-16") > 4


def test_bfloat16_runs_at_the_float32_rate_when_hardware_lacks_it():
    model = Model.of(Gpt(2, 4096, 32, 2048, 1000), Dtype.BFLOAT16)
    full = Model.of(model.family, Dtype.FLOAT32)
    assert _seconds(model, "V100-16", "block")[0] == pytest.approx(_seconds(full, "V100-16", "block")[0], rel=0.1)


@pytest.mark.parametrize(
    ("optimizer", "dtype", "moved"),
    [("adam", "float32", 28), ("adam", "bfloat16", 34), ("adam", "float16", 42), ("sgd", "float16", 34)],
)
def test_the_optimizer_is_limited_by_memory_and_float16_reads_and_writes_gradients_once_more(optimizer, dtype, moved):
    model = Model.of(GPT.family, Dtype(dtype))
    profiles = estimate_profiles(model, ["A100-40"], tensor_degrees=[1, 2], rows=[1], optimizer=optimizer)
    for tensor in (1, 2):
        cost = profiles.cost("A100-40", "block", tensor, 1)
        least = moved * GPT.kind("block").parameters_at(tensor) / 1555e9
        assert least < cost.update_seconds < 1.5 * least


def test_bytes_come_from_the_layer():
    profiles = estimate_profiles(GPT, ["T4"], tensor_degrees=[1, 4], rows=[3])
    kind = GPT.kind("block")
    for tensor in (1, 4):
        cost = profiles.cost("T4", "block", tensor, 3)
        assert cost.parameter_bytes == 2 * kind.parameters_at(tensor)
        assert cost.activation_bytes == pytest.approx(3 * kind.saved_bytes_per_row(Dtype.FLOAT16, tensor), abs=1)


def test_bytes_have_the_scores_where_no_fused_kernel_takes_the_format():
    family = Gpt(2, 64, 4, 128, 100)
    scores = {}
    for dtype in Dtype:
        fused = Model.of(family, dtype)
        for name in ("T4", "A100"):
            found = estimate_profiles(fused, [name], tensor_degrees=[1, 2], rows=[3])
            scores[name, dtype] = [
                found.cost(name, "block", tensor, 3).activation_bytes
                - 3 * fused.kind("block").saved_bytes_per_row(dtype, tensor)
                for tensor in (1, 2)
            ]
    (of_one, of_two) = scores.pop(("T4", Dtype.BFLOAT16))
    assert of_one == 2 * of_two > 3 * 4 * 128**2 * 4
    assert all(more == [0, 0] for more in scores.values())


def test_bytes_have_the_biases_of_scores_once_per_micro_batch():
    model = Model.of(T5(1, 64, 4, 128, 100, decoder_sequence_length=32), Dtype.FLOAT16)
    profiles = estimate_profiles(model, ["T4"], tensor_degrees=[1, 2], rows=[1, 8])
    for name, tokens in (("encoder", 128), ("decoder", 32)):
        for tensor in (1, 2):
            for rows in (1, 5, 8):
                per_row = model.kind(name).saved_bytes_per_row(Dtype.FLOAT16, tensor)
                kept = profiles.cost("T4", name, tensor, rows).activation_bytes
                assert kept == pytest.approx(rows * per_row + 2 * 4 * tokens**2 / tensor, abs=1)


def test_estimated_profiles_are_marked_and_round_trip():
    profiles = estimate_profiles(GPT, ["T4", "V100-16", "T4"], tensor_degrees=[2, 1, 2], rows=[4, 1, 4])
    assert profiles.origin == "estimated"
    assert {profile.accelerator for profile in profiles.layers} == {"T4", "V100-16"}
    assert profiles.tensor_degrees("T4", "block") == (1, 2)
    assert profiles.tensor_degrees("T4", "head") == (1, 2)
    vit = estimate_profiles(Model.of(Vit(2, 192, 4)), ["T4"], tensor_degrees=[1, 2], rows=[1])
    assert vit.tensor_degrees("T4", "head") == (1,)
    assert loads(dumps(profiles), Profiles) == profiles


@pytest.mark.parametrize(
    "family",
    [
        Bert(2, 256, 4, 128, 1000),
        Llama(2, 256, 8, 128, 1000, key_value_heads=2),
        Moe(2, 256, 8, 128, 1000),
        Swin((2, 2), 96),
        TransGan(),
        Vit(2, 192, 3),
        WideResnet(),
    ],
    ids=lambda family: family.family,
)
@pytest.mark.parametrize("attention", list(Attention))
def test_every_family_has_estimates(family, attention):
    model = Model.of(family, Dtype.FLOAT16, attention)
    profiles = estimate_profiles(model, ["A100-40"], tensor_degrees=[1], rows=[1, 8])
    assert {profile.kind for profile in profiles.layers} == {kind.name for kind in model.kinds}
    for profile in profiles.layers:
        assert 0 < profile.forward_seconds < 1
        assert 0 < profile.backward_seconds < 1


def test_what_cannot_be_estimated_is_refused():
    with pytest.raises(ValueError, match="no data sheet for accelerator 'V1000'"):
        estimate_profiles(GPT, ["V1000"], tensor_degrees=[1], rows=[1])
    with pytest.raises(ValueError, match="tensor degree 3 does not divide 16"):
        estimate_profiles(GPT, ["T4"], tensor_degrees=[3], rows=[1])
    with pytest.raises(ValueError, match="at least 1 row, got 0"):
        estimate_profiles(GPT, ["T4"], tensor_degrees=[1], rows=[4, 0])


FAST_HOST = Runtime(host_seconds_per_operator=30e-6)
"""Runtime whose host bounds no block here, so that one row is slow for the device alone."""
CURVE = {"kind": GPT.kind("block"), "accelerator": "V100-16", "dtype": Dtype.FLOAT16, "runtime": FAST_HOST}


ESTIMATED = [_seconds(GPT, "V100-16", "block", rows=rows, runtime=FAST_HOST)[0] for rows in ROWS]


@given(st.floats(1e-5, 1.0), st.sampled_from(ROWS), st.sampled_from(DEGREES))
def test_curve_passes_through_the_measurement_and_never_falls(measured, at_rows, tensor):
    curve = curve_from(measured, at_rows, **CURVE, rows=ROWS, tensor_degree=tensor, backward_ratio=2.0)
    where = ROWS.index(at_rows)
    assert curve.forward_seconds[where] == measured
    assert curve.backward_seconds[where] == 2 * measured
    for seconds in (curve.forward_seconds, curve.backward_seconds):
        assert all(few <= many * (1 + 1e-12) for few, many in pairwise(seconds))


@given(st.floats(0.1, SLOWEST_RATIO))
def test_a_curve_near_the_estimate_has_its_shape(ratio):
    curve = curve_from(ratio * ESTIMATED[0], 1, **CURVE, rows=ROWS)
    assert curve.forward_seconds == pytest.approx([ratio * seconds for seconds in ESTIMATED])


def test_rows_add_their_own_time_to_one_far_above_the_estimate():
    measured = 5 * ESTIMATED[0]
    curve = curve_from(measured, 1, **CURVE, rows=ROWS)
    grown = [measured + SLOWEST_RATIO * (seconds - ESTIMATED[0]) for seconds in ESTIMATED]
    assert curve.forward_seconds == pytest.approx(grown)


@pytest.mark.parametrize(("measured", "at_rows"), [(0.0, 1), (-1.0, 1), (1.0, 0)])
def test_curve_refuses_times_and_rows_of_zero(measured, at_rows):
    with pytest.raises(ValueError, match="above 0 seconds and of at least 1 row"):
        curve_from(measured, at_rows, **CURVE, rows=ROWS)
