"""Profiles by which an accelerator would compute faster than its peak."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from trainwright.answer.question import estimate_from_data_sheets
from trainwright.cli.inputs.plausibility import check_rates, rate_warning
from trainwright.documents import DocumentError
from trainwright.families import Llama
from trainwright.layer import Dtype
from trainwright.profiles import Profiles
from trainwright.training import Training

NAME = "NVIDIA-A100-SXM4-40GB"


def llama(dtype: Dtype, *, length: int = 2048) -> Training:
    family = Llama(
        layers=4, hidden_size=1024, heads=16, sequence_length=length, vocabulary_size=32000, intermediate_size=2816
    )
    return Training(8, family).in_format(dtype)


def profiles(training: Training, factor: float = 1.0, name: str = NAME) -> Profiles:
    found = estimate_from_data_sheets(training, (NAME,), devices=8)
    return Profiles(
        tuple(
            replace(
                layer,
                accelerator=name,
                forward_seconds=layer.forward_seconds * factor,
                backward_seconds=layer.backward_seconds * factor,
            )
            for layer in found.layers
        )
    )


def told(training: Training, factor: float, name: str = NAME) -> str | None:
    return rate_warning(profiles(training, factor, name), training.model)


@pytest.mark.parametrize("dtype", [Dtype.FLOAT16, Dtype.FLOAT32])
def test_times_that_are_too_short_name_the_accelerator(dtype: Dtype) -> None:
    sentence = told(llama(dtype), 1 / 12)
    assert sentence is not None
    assert sentence.startswith(f"by the profiles' forward_seconds and backward_seconds, {NAME} computes at ")
    assert f"% of its peak in {dtype}, which cannot be; check that they are seconds" in sentence


def test_only_a_rate_that_no_number_format_explains_is_refused() -> None:
    file, training = Path("profiles.json"), llama(Dtype.FLOAT16)
    check_rates(profiles(training, 1 / 12), training.model, file)
    with pytest.raises(
        DocumentError, match=r"^profiles\.json: .* computes at .* which cannot be; give the profiles of"
    ):
        check_rates(profiles(training, 1 / 40), training.model, file)


def test_plausible_times_are_taken() -> None:
    """Long causal sequences skip half of their FLOPs, and products of float32 may run in TF32, 8 times as fast."""
    assert told(llama(Dtype.FLOAT16), 1.0) is None
    assert told(llama(Dtype.FLOAT16, length=262144), 0.7) is None
    assert told(llama(Dtype.FLOAT32), 1 / 6) is None


def test_accelerators_without_a_peak_are_taken() -> None:
    for name in ("emulated-a100", "own-chip"):
        assert told(llama(Dtype.FLOAT16), 1e-3, name) is None
