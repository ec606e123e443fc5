"""Table of repeated runs of `tune`, and the pairs of which the truth is known."""

from __future__ import annotations

import pytest

from trainwright.families import Gpt
from trainwright.layer import Dtype
from trainwright.model import Model
from tune_runs import TuneRun, as_markdown, data_parallel

MODEL = Model.of(Gpt(2, 32, 2, 16, 64), Dtype.FLOAT32)


@pytest.mark.parametrize("devices", [1, 2])
def test_plans_of_a_pair_train_the_same_rows_on_one_device_and_on_two(devices: int) -> None:
    plan = data_parallel(MODEL, 16, devices)
    assert (plan.global_batch_size, len(plan.devices)) == (16, devices)


def test_table_counts_errors_and_false_speedups() -> None:
    good = TuneRun(60.0, (("a", 1.0, 1.1), ("b", 1.0, 1.0)), 1.3, False, True, "")
    bad = TuneRun(90.0, (("a", 1.0, 2.0),), None, True, False, "")
    text = as_markdown([good, bad], is_busy=False)
    assert "| 1 | 60 | -5% | -9% | 1.30 | no | yes |" in text
    assert "| 2 | 90 | -50% | -50% | none | yes | no |" in text
    assert "2 of 3 predictions within 20 %; 1 false speed-ups of 2 pairs" in text
    assert "one device told from two in 1 of 2; 90 s at most" in text
