"""Smallest numbers of accelerators: published cases, what decides, and that one machine fewer would not do."""

from __future__ import annotations

from dataclasses import replace

import pytest

import trainwright as tw
from trainwright.accelerators import data_sheet
from trainwright.accelerators.machines import cluster_of
from trainwright.answer import answer_of_plan
from trainwright.answer.lean_plans import Savings, enough_words, first_that, fits
from trainwright.answer.sizing import Decider
from trainwright.families import Gpt, Llama
from trainwright.runtime_presets import runtime_preset
from trainwright.search import NoPlanFits
from trainwright.training import RequestedDtype, Training
from trainwright.trial_selection import fit_probability

LLAMA_7B = Llama(32, 4096, 32, 1024, 32000, intermediate_size=11008)
QWEN_72B = Llama(80, 8192, 64, 2560, 152064, intermediate_size=29568, key_value_heads=8)
QWEN_32B = Llama(64, 5120, 40, 1024, 152064, intermediate_size=27648, key_value_heads=8)
SMALL = Training(32, gpt=Gpt(12, 768, 12, 1024, 50304), dtype=RequestedDtype.FLOAT16)
DEEPSPEED = runtime_preset("deepspeed").runtime


def sized(model: Llama, accelerator: str, *, batch: int = 16, dtype: RequestedDtype = RequestedDtype.AUTO) -> tw.Size:
    training = Training(batch, llama=model, dtype=dtype)
    (size,) = tw.size(training, [accelerator], runtime=DEEPSPEED, budget_seconds=3)
    return size


def test_7b_in_half_precision_needs_four_v100_of_32_gib() -> None:
    """LlamaFactory#2931: two with offloading ran out of memory, four trained under ZeRO-3."""
    size = sized(LLAMA_7B, "V100-32", batch=8, dtype=RequestedDtype.FLOAT16)
    assert (size.devices, size.fewer, size.decider) == (4, 3, Decider.OPTIMIZER)
    assert size.state_bytes == pytest.approx(16 * 6.738e9, rel=0.01)
    training = Training(8, llama=LLAMA_7B, dtype=RequestedDtype.FLOAT16)
    problem = tw.problem(cluster_of({"p3dn.24xlarge": 1}), training, runtime=DEEPSPEED)
    assert not tw.estimate(tw.plan_in_words("dp8 mb1 zero2", problem), problem).feasible


def test_72b_does_not_fit_on_one_machine_of_a100() -> None:
    """Qwen#755, #888: out of memory on 8 A100-80; the state alone takes 1,163 GB."""
    size = sized(QWEN_72B, "A100-80")
    assert size.devices is not None
    assert 16 <= size.devices <= 24
    assert size.state_bytes == pytest.approx(1163e9, rel=0.01)
    problem = tw.problem(cluster_of({"p4de": 1}), Training(16, llama=QWEN_72B), runtime=DEEPSPEED)
    with pytest.raises(NoPlanFits):
        tw.find_plans(problem, budget_seconds=1)
    assert enough_words(problem).startswith("3 of these machines would do, 24 NVIDIA-A100-SXM4-80GB")


def test_32b_on_long_rows_needs_two_machines_of_h100() -> None:
    """s1#13: 8 H100 ran out of memory at one row, 16 ran with 20,000 tokens."""
    size = sized(replace(QWEN_32B, sequence_length=20480), "H100")
    assert (size.devices, size.fewer) == (16, 8)
    assert size.decider is Decider.ACTIVATIONS
    assert size.without_recompute is not None
    assert size.without_recompute > 16


@pytest.mark.parametrize(("devices", "most"), [(7, 0.4), (8, 0.7)])
def test_32b_on_short_rows_is_refused_on_seven_gpus_and_not_sure_on_eight(devices: int, most: float) -> None:
    """LlamaFactory#6999: 7 and 8 A800-80 ran out of memory under ZeRO-3 with 1,024 tokens and one row each."""
    problem = tw.problem(tw.cluster_of(f"lab={devices}xA100-80"), Training(devices, llama=QWEN_32B), runtime=DEEPSPEED)
    answer = answer_of_plan(problem, tw.plan_in_words(f"dp{devices} mb1 zero3 recompute", problem))
    assert fit_probability(answer.best.estimate, answer.problem.cost_context) < most
    assert answer.best.estimate.feasible == (devices == 8)


def test_one_device_is_enough_for_a_small_model() -> None:
    (size,) = tw.size(SMALL, ["A100-80"], budget_seconds=2)
    assert (size.devices, size.decider, size.fewer) == (1, None, 0)
    assert size.best is not None
    assert size.best.estimate.feasible
    assert size.best.price_per_hour == pytest.approx(27.44705)  # the machine is rented whole


def test_a_run_in_time_takes_more_devices() -> None:
    (slow,) = tw.size(SMALL, ["A100-80"], tokens=20e9, budget_seconds=2)
    assert slow.best is not None
    assert slow.answer is not None
    run = slow.answer.problem.limits.run
    assert run is not None
    days = slow.best.run_seconds(run) / 86400
    (fast,) = tw.size(SMALL, ["A100-80"], tokens=20e9, within_days=days / 3, budget_seconds=6)
    assert fast.devices is not None
    assert 3 <= fast.devices <= 8
    assert (fast.decider, fast.fewer) == (Decider.TIME, fast.devices - 1)
    assert fast.best is not None
    assert fast.best.run_seconds(run) <= days / 3 * 86400


def test_no_number_is_enough_says_so() -> None:
    giant = Llama(200, 65536, 64, 2048, 32000)
    (size,) = tw.size(Training(64, llama=giant), ["T4"], budget_seconds=1)
    assert size.answer is None
    assert "up to 4,096" in size.refusal
    (late,) = tw.size(SMALL, ["T4"], tokens=1e15, within_days=1, budget_seconds=2)
    assert late.answer is None
    assert "ends the run within 1 day" in late.refusal


def test_an_accelerator_without_machines_is_counted_in_machines_of_eight() -> None:
    (size,) = tw.size(SMALL, ["RTX 4090"], tokens=1e9, budget_seconds=1)
    assert (size.machine, size.machine_devices) == ("", 8)
    assert size.best is not None
    assert size.best.price_per_hour is None


def test_unknown_accelerator_and_time_without_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no data sheet for accelerator 'H10O'.*NVIDIA-H100"):
        tw.size(SMALL, ["H10O"])
    with pytest.raises(ValueError, match="within_days needs tokens"):
        tw.size(SMALL, ["H100"], within_days=3)


@pytest.mark.parametrize("savings", [Savings(), Savings(recompute=False), Savings(sharding=False)])
def test_a_plan_that_is_said_to_fit_is_found_by_a_search(savings: Savings) -> None:
    problem = tw.problem(cluster_of({"g4dn.12xlarge": 1}), SMALL)
    assert fits(problem, savings)
    assert tw.find_plans(problem, "amp")


def test_fewer_savings_never_need_fewer_devices() -> None:
    (size,) = tw.size(Training(64, llama=replace(LLAMA_7B, sequence_length=4096)), ["A100-40"], budget_seconds=2)
    assert size.devices is not None
    assert size.without_recompute is None or size.without_recompute >= size.devices
    assert size.without_sharding is None or size.without_sharding >= size.devices


@pytest.mark.parametrize("least", range(14))
def test_first_that_is_the_least_one(least: int) -> None:
    assert first_that(lambda number: number >= least, 2, 12) == (max(least, 2) if least < 12 else None)
    assert first_that(lambda number: number >= least, 12, 12) is None


def test_memory_of_the_cluster_counts_what_is_left_free() -> None:
    size = sized(LLAMA_7B, "V100-32", batch=8, dtype=RequestedDtype.FLOAT16)
    assert size.fewer_bytes == 3 * int(data_sheet("V100-32").memory_bytes.value * 0.92)
