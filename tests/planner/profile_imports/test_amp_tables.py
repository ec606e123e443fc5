"""AMP's lists of forward seconds as profiles: entries matched to layers, and derived figures."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.accelerators import extrapolated
from trainwright.families import Gpt, TransGan
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.profile_imports import FORMATS, ImportOptions
from trainwright.runtime import Kernels, Runtime

GPT2 = Model.of(Gpt(layers=24, hidden_size=1024, heads=16, sequence_length=1024, vocabulary_size=50304), Dtype.FLOAT16)
BLOCK_OF_GPT2 = GPT2.kind("block")


def _amp_list(model=GPT2, block=0.006, seed=0, spread=0.05):
    """Return a list like AMP's: functions, embedding, blocks 3 … 26, a function, final normalisation, projection."""
    draw = np.random.default_rng(seed)
    entries = [1e-5, 4e-4, 2e-5, *[block] * (len(model.layers) - 2), 1e-5, 1e-4, 0.009]
    return np.array(entries) * draw.lognormal(0, spread, len(entries))


def _save(folder: Path, name: str, array) -> Path:
    path = folder / name
    np.save(path, array)
    return path


def _import_amp(paths, model=GPT2, accelerator="Tesla-T4", **options):
    return FORMATS["amp"](paths, model=model, accelerator=accelerator, options=ImportOptions(**options))


def _profile(profiles, kind, degree, rows):
    (found,) = [
        layer for layer in profiles.layers if (layer.kind, layer.tensor_degree, layer.rows) == (kind, degree, rows)
    ]
    return found


def test_amp_blocks_are_found_and_other_entries_join_embedding_and_head(tmp_path):
    seconds = _amp_list()
    profiles = _import_amp([_save(tmp_path, "gpt2_T4_1.npy", seconds)])

    block = _profile(profiles, "block", 1, 1)
    assert block.forward_seconds == pytest.approx(np.mean(seconds[3:27]))
    assert block.backward_seconds == pytest.approx(2 * block.forward_seconds)
    assert block.relative_spread > 0
    assert _profile(profiles, "embedding", 1, 1).forward_seconds == pytest.approx(seconds[:3].sum())
    assert _profile(profiles, "head", 1, 1).forward_seconds == pytest.approx(seconds[27:].sum())
    assert profiles.origin == "measured"


def test_amp_rows_above_one_are_left_to_the_estimate_of_each_runtime(tmp_path):
    profiles = _import_amp([_save(tmp_path, "gpt2_T4_1.npy", _amp_list(block=0.0035, spread=0))])
    assert {layer.rows for layer in profiles.layers} == {1}

    eager, fused = (
        extrapolated(profiles, GPT2, (1, 2, 4, 8, 16, 32), Runtime(kernels=kernels))
        for kernels in (Kernels.EAGER, Kernels.FUSED)
    )
    blocks = [_profile(eager, "block", 1, rows) for rows in (1, 2, 4, 8, 16, 32)]
    assert [block.samples for block in blocks] == [24, 0, 0, 0, 0, 0]
    times = [block.forward_seconds for block in blocks]
    assert times == sorted(times)
    assert 8 * times[0] < times[-1] <= 32 * 1.001 * times[0]
    held = BLOCK_OF_GPT2.saved_bytes_per_row(Dtype.FLOAT16)
    assert [block.activation_bytes for block in blocks] == [round(rows * held) for rows in (1, 2, 4, 8, 16, 32)]
    assert all(block.update_seconds > 0 for block in blocks)
    assert _profile(fused, "block", 1, 32).forward_seconds != times[-1]


def test_amp_degrees_come_from_the_names_or_from_the_caller(tmp_path):
    paths = [_save(tmp_path, f"gpt2_T4_{degree}.npy", _amp_list(block=0.006 / degree)) for degree in (1, 2, 4)]
    named = _import_amp(paths)
    assert named.tensor_degrees("Tesla-T4", "block") == (1, 2, 4)
    other_names = [_save(tmp_path, f"{name}.npy", np.load(path)) for name, path in zip("abc", paths, strict=True)]
    assert _import_amp(other_names, tensor_degrees=(1, 2, 4)) == named
    with pytest.raises(ValueError, match=r"a\.npy: the name must end with the tensor degree"):
        _import_amp(other_names)
    with pytest.raises(ValueError, match="names 2 degrees for 3 files"):
        _import_amp(other_names, tensor_degrees=(1, 2))
    with pytest.raises(ValueError, match="the tensor degree 0 does not divide"):
        _import_amp(other_names, tensor_degrees=(1, 2, 0))


def test_amp_blocks_can_be_given(tmp_path):
    path = _save(tmp_path, "gpt2_1.npy", np.r_[_amp_list(), 0.006])
    given = _import_amp([path], blocks=((3, 10), (10, 27)))
    assert given == _import_amp([path])
    for blocks in (((3, 26),), ((10, 27), (3, 10)), ((-1, 23),), ((10, 34),), ((-(10**12), 10**12),)):
        with pytest.raises(ValueError, match="ranges of blocks name"):
            _import_amp([path], blocks=blocks)


def test_amp_list_of_two_kinds_of_blocks_is_read(tmp_path):
    draw = np.random.default_rng(2)
    seconds = draw.lognormal(np.log(2e-5), 0.5, 56)
    seconds[4:16] = 0.004 * draw.lognormal(0, 0.05, 12)
    seconds[42:54] = 0.0015 * draw.lognormal(0, 0.05, 12)
    model = Model.of(TransGan(), Dtype.FLOAT16)
    profiles = _import_amp([_save(tmp_path, "transgan_P3_1.npy", seconds)], model)

    assert _profile(profiles, "block_0", 1, 1).forward_seconds == pytest.approx(np.mean(seconds[4:16]))
    assert _profile(profiles, "block_5", 1, 1).forward_seconds == pytest.approx(np.mean(seconds[42:54]))
    grows = sum(_profile(profiles, f"grow_{stage}", 1, 1).forward_seconds for stage in range(1, 6))
    assert grows == pytest.approx(seconds[16:42].sum())


def test_amp_blocks_have_the_same_entries_at_every_degree(tmp_path):
    blurred = _amp_list(block=0.0088, spread=0)  # at degree 2 the projection looks like a block
    paths = [_save(tmp_path, "gpt2_1.npy", _amp_list()), _save(tmp_path, "gpt2_2.npy", blurred)]
    profiles = _import_amp(paths)
    # Degree 2 divides the vocabulary: its embedding ends with an all-reduce, and half of degree 1's time is left at least.
    whole, divided = (_profile(profiles, "embedding", degree, 1) for degree in (1, 2))
    assert whole.forward_seconds / 2 <= divided.forward_seconds < blurred[:3].sum()
    assert divided.backward_seconds == pytest.approx(2 * divided.forward_seconds)


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.ones((2, 30)), "one row of 1 to"),
        (np.ones(30, dtype=np.int64), "one row of 1 to"),
        (np.ones(0), "not a NumPy array|one row"),
        (np.array([object()] * 30), "not a NumPy array that can be read"),
        (np.full(30, np.nan), "entry 0 is nan"),
        (-np.ones(30), "entry 0 is -1"),
        (np.zeros(30), "all entries are 0"),
        (np.ones(5), "there are 5 entries, but the model has 24 blocks"),
    ],
)
def test_an_amp_table_that_cannot_be_used_is_refused_in_one_sentence(tmp_path, array, said):
    path = tmp_path / "gpt2_1.npy"
    np.save(path, array, allow_pickle=True)
    with pytest.raises(ValueError, match=said) as refusal:
        _import_amp([path])
    assert str(path) in str(refusal.value)


def test_an_amp_table_needs_the_data_sheet_of_its_accelerator(tmp_path):
    with pytest.raises(ValueError, match="no data sheet for accelerator 'Abacus'"):
        _import_amp([_save(tmp_path, "gpt2_1.npy", _amp_list())], accelerator="Abacus")


def test_amp_header_with_a_false_size_allocates_nothing(tmp_path):
    path = _save(tmp_path, "gpt2_1.npy", _amp_list())
    path.write_bytes(path.read_bytes().replace(b"(30,), ", b"(9999999999999,), ".ljust(7), 1))
    with pytest.raises(ValueError, match="not a NumPy array that can be read"):
        _import_amp([path])


@given(seed=st.integers(0, 10_000), changes=st.integers(1, 12), length=st.integers(0, 400))
def test_any_bytes_give_profiles_or_one_sentence(seed, changes, length):
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        path = _save(Path(folder), "gpt2_1.npy", _amp_list())
        content = bytearray(path.read_bytes())
        for _ in range(changes):
            content[draw.randrange(6 if changes > 2 else 0, min(len(content), 128))] = draw.randrange(256)
        path.write_bytes(bytes(content[: len(content) - length if length < 100 else None]))
        try:
            said = "profiles" if _import_amp([path]).layers else ""
        except ValueError as refusal:
            said = str(refusal)
    assert said
    assert "\n" not in said


def test_entries_that_were_taken_as_blocks_are_told(tmp_path):
    seconds, told = np.full(30, 1e-5), []
    seconds[3:27] = 0.004
    path = _save(tmp_path, "gpt2_T4_1.npy", seconds)
    _import_amp([path], Model.of(Gpt(24, 1024, 16, 1024, 50304), Dtype.FLOAT16), tell=told.append)
    assert len(told) == 1
    assert "of 30 entries, those from 3 to 26 for layers 1 to 24 were taken as blocks" in told[0]
    _import_amp([path], Model.of(Gpt(12, 1024, 16, 1024, 50304), Dtype.FLOAT16), tell=told.append)
    assert "takes as long as the blocks beside it; if the table is of a model with more layers than 12" in told[2]
