"""Tables of other tools as profiles, and refusals in one sentence."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.cluster import Port
from trainwright.families import Gpt
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.profile_imports import FORMATS, ImportOptions
from trainwright.profile_imports.bandwidth_curves import BandwidthCurve
from trainwright.profile_imports.subtract_all_reduces import ring_seconds

MODEL = Model.of(Gpt(layers=4, hidden_size=64, heads=4, sequence_length=32, vocabulary_size=500), Dtype.FLOAT32)
BLOCK = MODEL.kind("block")


def _sailor_table(model=MODEL, rows=(1, 2, 4), degrees=(1, 2)):
    layers = len(model.layers)
    return {
        str(r): {
            str(t): {str(i): [0.001 * r / t * (1 + 0.1 * (i == 2)), 0.002 * r / t, 0.0005 / t] for i in range(layers)}
            for t in degrees
        }
        for r in rows
    }


def _write(folder: Path, data, name="profile.json") -> Path:
    path = folder / name
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def _import(table_format, paths, model=MODEL, accelerator="some-device", **options):
    return FORMATS[table_format](paths, model=model, accelerator=accelerator, options=ImportOptions(**options))


def test_layers_of_one_kind_become_their_mean_with_its_spread(tmp_path):
    profiles = _import("sailor", [_write(tmp_path, _sailor_table(degrees=(1,)))])

    cost = profiles.cost("some-device", "block", 1, 2)
    assert profiles.origin == "measured"
    assert cost.forward_seconds == pytest.approx(0.00205)
    assert cost.backward_seconds == pytest.approx(0.004)
    (block,) = [layer for layer in profiles.layers if layer.kind == "block" and layer.rows == 2]
    assert block.relative_spread == pytest.approx(0.7 * 0.0002 / 0.006)  # the 90th of four lies 0.7 above the third
    assert block.samples == 4
    assert {layer.rows for layer in profiles.layers} == {1, 2, 4}


def test_sailor_shares_one_optimizer_step_among_layers_by_their_values(tmp_path):
    profiles = _import("sailor", [_write(tmp_path, _sailor_table(rows=(1,), degrees=(1,)))])

    updates = {layer.kind: layer.update_seconds for layer in profiles.layers}
    assert updates["head"] / updates["block"] == pytest.approx(MODEL.kind("head").parameters / BLOCK.parameters)
    tied = MODEL.kind("head").shared_parameters * updates["head"] / MODEL.kind("head").parameters
    whole = updates["embedding"] + 4 * updates["block"] + updates["head"] - tied
    assert whole == pytest.approx(len(MODEL.layers) * 0.0005)


def test_bytes_come_from_the_memory_table_or_else_from_the_model(tmp_path):
    table = _write(tmp_path, _sailor_table(rows=(1, 4)))
    bytes_of = {"act_mem_bytes": 1000, "params_bytes": 77}
    memory = {"1": {str(i): bytes_of for i in range(len(MODEL.layers))}}
    given_bytes = _import("sailor", [table], memory_table=_write(tmp_path, memory, "layers.json"))
    from_model = _import("sailor", [table])

    cost = given_bytes.cost("some-device", "block", 1, 4)
    assert (cost.activation_bytes, cost.parameter_bytes) == (4000, 77)
    for profiles, degree in ((from_model, 1), (from_model, 2), (given_bytes, 2)):
        cost = profiles.cost("some-device", "block", degree, 4)
        assert cost.activation_bytes == pytest.approx(4 * BLOCK.saved_bytes_per_row(Dtype.FLOAT32, degree), abs=1)
        assert cost.parameter_bytes == 4 * BLOCK.parameters_at(degree)


def test_all_reduces_are_subtracted_once(tmp_path):
    port = Port(1e-6, 1e9)
    table = _sailor_table()
    message = 4 * 32 * 64 * 4
    rings = 2 * ring_seconds(2, message, port)
    for layer in range(1, 5):
        forward, backward, update = table["4"]["2"][str(layer)]
        table["4"]["2"][str(layer)] = [forward + rings, backward + rings, update]
    profiles = _import("sailor", [_write(tmp_path, table)], inside=port)

    cost = profiles.cost("some-device", "block", 2, 4)
    assert cost.forward_seconds == pytest.approx(0.00205)
    assert cost.backward_seconds == pytest.approx(0.004)
    assert profiles.cost("some-device", "head", 2, 4).forward_seconds == pytest.approx(0.002)  # it has none


def test_subtraction_leaves_an_even_share_when_the_port_is_slow(tmp_path):
    path = _write(tmp_path, _sailor_table())

    slow = _import("sailor", [path], inside=Port(1.0, 1.0)).cost("some-device", "block", 2, 4)
    assert slow.forward_seconds == pytest.approx(0.00205)
    unknown = _import("sailor", [path]).cost("some-device", "block", 2, 4)
    assert unknown.forward_seconds == pytest.approx(0.00205)
    known = _import("sailor", [path], accelerator="Tesla-V100-SXM2-16GB").cost("Tesla-V100-SXM2-16GB", "block", 2, 4)
    assert known.forward_seconds <= unknown.forward_seconds


def test_several_files_give_several_tables(tmp_path):
    paths = [
        _write(tmp_path, _sailor_table(rows=(1,)), "one.json"),
        _write(tmp_path, _sailor_table(rows=(2, 4)), "more.json"),
    ]
    assert {layer.rows for layer in _import("sailor", paths).layers} == {1, 2, 4}
    with pytest.raises(ValueError, match=r"one\.json: tensor degree 1 at 1 rows is in .*one\.json too; keep one"):
        _import("sailor", [paths[0], paths[0]])


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("nonsense", "not JSON"),
        ("[1, 2]", "expected a mapping"),
        ({}, "an empty dict"),
        ({"zero": {}}, "zero: expected a mapping"),
        ({"0": {}}, "whole number of at least 1"),
        ({"1": {"1": {"0": [1, 2, 3]}}}, "there are 1 layers, but the model has 6"),
        ({"1": {"1": {str(i): [1, 2] for i in range(6)}}}, r"1\.1\.0: expected \[forward, backward, update\]"),
        ({"1": {"1": {str(i): [1, -2, 3] for i in range(6)}}}, r"1\.1\.0\[1\]: expected a number from 0"),
        ({"1": {"1": {str(i + 1): [1, 2, 3] for i in range(6)}}}, "counted from 0 without a gap, got the key '6'"),
        ({"1": {"3": {str(i): [1, 2, 3] for i in range(6)}}}, "tensor degree 3 does not divide"),
        ({"1": {"2": {str(i): [1, 2, 3] for i in range(6)}}}, "tensor degree 1 is missing"),
        ('{"1": {"1": {"0": [1' + "0" * 400 + ', 2, 3], "1": 1, "2": 1, "3": 1, "4": 1, "5": 1}}}', "far larger"),
        ("[" * 100_000, "not JSON"),
        ('{"1": NaN}', "expected a mapping"),
    ],
)
def test_a_sailor_table_that_cannot_be_used_is_refused_in_one_sentence(tmp_path, data, said):
    path = _write(tmp_path, data)
    with pytest.raises(ValueError, match=said) as refusal:
        _import("sailor", [path])
    assert str(path) in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 400


def test_missing_files_and_options_of_other_formats_are_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        _import("sailor", [tmp_path / "none.json"])
    with pytest.raises(ValueError, match="the format sailor has no use for blocks"):
        _import("sailor", [], blocks=((0, 1),))
    for table_format in FORMATS:
        with pytest.raises(ValueError, match="give at least one file"):
            _import(table_format, [], accelerator="Tesla-T4")


# Metis


def _metis_table(both=30.0, memory=None, layers=6, **times):
    table = {
        "model": {"num_layers": layers},
        "execution_time": {"optimizer_time_ms": 12.0, "layer_compute_total_ms": [both] * layers, **times},
    }
    if memory is not None:
        table["execution_memory"] = {"layer_memory_total_mb": memory}
    return table


def test_metis_splits_compute_one_to_two_and_gives_the_rest_to_the_head(tmp_path):
    table = _metis_table(forward_backward_time_ms=6 * 30.0 + 15.0)
    profiles = _import("metis", [_write(tmp_path, table, "DeviceType.A100_tp1_bs2.json")])

    block = profiles.cost("some-device", "block", 1, 2)
    assert (block.forward_seconds, block.backward_seconds) == (pytest.approx(0.010), pytest.approx(0.020))
    head = profiles.cost("some-device", "head", 1, 2)
    assert head.forward_seconds == pytest.approx(0.015)
    tied = MODEL.kind("head").shared_parameters / MODEL.parameters * 0.012
    updates = {layer.kind: layer.update_seconds for layer in profiles.layers}
    assert updates["embedding"] + 4 * updates["block"] + updates["head"] - tied == pytest.approx(0.012)


def test_metis_activations_are_memory_that_grows_with_the_batch(tmp_path):
    paths = [
        _write(tmp_path, _metis_table(memory=[500 + 7 * rows] * 6), f"DeviceType.A100_tp1_bs{rows}.json")
        for rows in (1, 2, 4)
    ]
    profiles = _import("metis", paths)
    for rows in (1, 2, 4):
        assert profiles.cost("some-device", "block", 1, rows).activation_bytes == pytest.approx(
            7 * rows * 2**20, rel=1e-6
        )


def test_metis_activations_are_memory_without_states_when_there_is_one_batch(tmp_path):
    states = 16 * BLOCK.parameters / 2**20
    name = "DeviceType.A100_tp1_bs1.json"
    left = _import("metis", [_write(tmp_path, _metis_table(memory=[states + 3] * 6), name)])
    none_left = _import("metis", [_write(tmp_path, _metis_table(memory=[states / 2] * 6), name)])

    assert left.cost("some-device", "block", 1, 1).activation_bytes == pytest.approx(3 * 2**20, abs=1)
    own = round(BLOCK.saved_bytes_per_row(Dtype.FLOAT32))
    assert none_left.cost("some-device", "block", 1, 1).activation_bytes == own


@pytest.mark.parametrize(
    ("name", "table", "said"),
    [
        ("A100.json", _metis_table(), "the name must tell device type"),
        ("DeviceType.A100_tp1_bs1.json", {"model": {}}, "the key execution_time is missing"),
        ("DeviceType.A100_tp1_bs1.json", {"execution_time": {}}, "execution_time: expected a mapping with at least"),
        ("DeviceType.A100_tp1_bs1.json", _metis_table(layers=9), "there are 9 layers, but the model has 6"),
        ("DeviceType.A100_tp1_bs1.json", _metis_table(memory=[1.0] * 5), "layer_memory_total_mb: there are 5 layers"),
        ("DeviceType.A100_tp1_bs1.json", _metis_table(both="30"), r"layer_compute_total_ms\[0\]: expected a number"),
    ],
)
def test_a_metis_table_that_cannot_be_used_is_refused_in_one_sentence(tmp_path, name, table, said):
    with pytest.raises(ValueError, match=said):
        _import("metis", [_write(tmp_path, table, name)])


def test_metis_files_of_two_device_types_are_refused(tmp_path):
    paths = [_write(tmp_path, _metis_table(), f"DeviceType.{device}_tp1_bs1.json") for device in ("A100", "V100")]
    with pytest.raises(ValueError, match=r"several device types \(A100, V100\)"):
        _import("metis", paths)


# Junk

_ATOMS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
_KEYS = st.sampled_from(
    ["1", "2", "0", "5", "-1", "x", "execution_time", "layer_compute_total_ms", "optimizer_time_ms", "execution_memory"]
)
_JUNK = st.recursive(
    _ATOMS, lambda inner: st.lists(inner, max_size=6) | st.dictionaries(_KEYS, inner, max_size=6), max_leaves=30
)


def _only_one_sentence(table_format, path, **options):
    try:
        profiles = _import(table_format, [path], **options)
        said = "profiles" if profiles.layers else ""
    except ValueError as refusal:
        said = str(refusal)
    assert said
    assert "\n" not in said


@given(junk=_JUNK, as_memory=st.booleans())
def test_any_json_gives_profiles_or_one_sentence(junk, as_memory):
    with tempfile.TemporaryDirectory() as folder:
        path = _write(Path(folder), json.dumps(junk), "DeviceType.A_tp1_bs1.json")
        table = _write(Path(folder), _sailor_table(rows=(1,), degrees=(1,)), "good.json")
        if as_memory:
            _only_one_sentence("sailor", table, memory_table=path)
        else:
            _only_one_sentence("sailor", path)
            _only_one_sentence("metis", path)


def test_all_reduces_that_cannot_be_subtracted_are_told(tmp_path):
    path, told = _write(tmp_path, _sailor_table(degrees=(1, 2))), []
    _import("sailor", [path], accelerator="made-up-card", tell=told.append)
    assert len(told) == 1
    assert "degrees 2 include their all-reduces, which estimates count again" in told[0]
    assert "no data sheet of made-up-card; give" in told[0]
    for known in ({"accelerator": "Tesla-T4"}, {"inside": Port(1e-5, 1e10)}):
        _import("sailor", [path], tell=told.append, **known)
    assert len(told) == 1


def test_merged_file_is_read_by_the_names_of_its_tables(tmp_path):
    slow = {
        rows: {
            degree: {layer: [2 * one for one in times] for layer, times in layers.items()}
            for degree, layers in table.items()
        }
        for rows, table in _sailor_table().items()
    }
    merged = _write(tmp_path, {"OPT-350": {"card": _sailor_table(), "other": slow}}, "merged.json")
    whole = _import("sailor", [_write(tmp_path, _sailor_table())], accelerator="card")
    assert _import("sailor", [merged], accelerator="card") == whole
    assert _import("sailor", [merged], accelerator="renamed", entry=("OPT-350", "card")).cost(
        "renamed", "block", 1, 1
    ) == (whole.cost("card", "block", 1, 1))
    with pytest.raises(ValueError, match=r"OPT-350: there are tables of card, other; name the one .* --entry card"):
        _import("sailor", [merged], accelerator="renamed")


def test_curves_give_each_message_the_bandwidth_of_its_size(tmp_path):
    table = _write(tmp_path, _sailor_table(rows=(1,), degrees=(1, 4)))
    curves = _write(tmp_path, {"card": {"2": [[0.0, 0.0, 9.0], 9e9], "4": [[0.0, 0.0, 2.0], 2e9]}}, "curves.json")
    flat, by_size = (
        _import("sailor", [table], accelerator="card", **inside).cost("card", "block", 4, 1)
        for inside in ({"inside": Port(0.0, 2e9)}, {"inside_curves": curves})
    )
    assert by_size == flat
    with pytest.raises(ValueError, match="give one of them"):
        _import("sailor", [table], inside=Port(0.0, 2e9), inside_curves=curves)
    for bad in ([1.0], [[0.0, 0.0, 0.0], 1.0], "curve"):
        _write(tmp_path, {"card": {"4": bad}}, "curves.json")
        with pytest.raises(ValueError, match=r"curves.json: card: 4: "):
            _import("sailor", [table], accelerator="card", inside_curves=curves)


def test_curve_grows_with_the_message():
    curve = BandwidthCurve((0.8, 16.0, 33.0))
    assert curve.seconds(2e6) == pytest.approx(2e-3 / 49.8)
    assert curve.seconds(1e3) == pytest.approx(1e-6 / 33)
    assert all(curve.seconds(size) < curve.seconds(2 * size) for size in (1e5, 1e6, 1e7))


def test_refusal_of_a_layer_count_names_the_number_to_write(tmp_path):
    table = _write(tmp_path, _sailor_table(model=Model.of(Gpt(7, 64, 4, 32, 500))))
    with pytest.raises(ValueError, match=r"there are 9 layers, but the model has 6 .* with layers: 7"):
        _import("sailor", [table])
