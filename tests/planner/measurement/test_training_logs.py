"""Logs of trainers: their iterations without the warm-up, their memory, and the sentence for a log that is none."""

from __future__ import annotations

import pytest

from trainwright.measurement.training_logs import FORMATS, Batch, read_log

BATCH = Batch(rows=256, tokens_per_row=2048, devices=16)


def megatron(milliseconds: float, number: int) -> str:
    return (
        f" [2026-11-29 10:00:0{number}] iteration {number:8d}/     100 | consumed samples: {256 * number:12d} | elapsed time per iteration "
        f"(ms): {milliseconds:.1f} | throughput per GPU (TFLOP/s/GPU): 140.3 | learning rate: 1.000E-04 | global batch size:   256 | "
        "lm loss: 1.037E+01 | loss scale: 1.0 | grad norm: 2.001 | number of skipped iterations:   0 |"
    )


def torchtitan(rate: float, number: int) -> str:
    return (
        f"[rank0]:[titan] 2026-11-29 10:00:0{number},123 - root - INFO - \x1b[31mstep: {number:2d}  \x1b[32mloss: 12.2721  \x1b[38;2;180;60;0mgrad_norm: "
        f" 1.2  \x1b[33mmemory: 40.50GiB(51.20%)  \x1b[34mtps: {rate:,.0f}  \x1b[36mtflops: 140.00  \x1b[35mmfu: 44.87%\x1b[39m"
    )


def deepspeed(rate: float, number: int) -> str:
    return (
        f"[2026-11-29 10:00:00,000] [INFO] [timer.py:264:stop] epoch=0/micro_step={4 * number}/global_step={number}, RunningAvgSamplesPerSec=90.1, "
        f"CurrSamplesPerSec={rate}, MemAllocated=3.1GB, MaxMemAllocated=20.25GB"
    )


def bar(step: int, elapsed: str) -> str:
    return f"\r {step}%|█▏        | {step}/100 [{elapsed}<01:45,  2.00s/it]"


LOGS = {
    "megatron": (
        "\n".join([
            "  params_dtype ............................ torch.float32",
            *(megatron(value, number) for number, value in enumerate((9000, 5100, 5000, 5200), 1)),
            "[Rank 0] (after 1 iterations) memory (MB) | allocated: 1000.0 | max allocated: 20000.5 | reserved: 30000.0",
            "[Rank 8] (after 1 iterations) memory (MB) | allocated: 1000.0 | max allocated: 22000.0 | reserved: 30000.0",
        ]),
        (5.1, 5.0, 5.2),
        {0: round(20000.5 * 2**20), 8: 22000 * 2**20},
    ),
    "torchtitan": (
        "\n".join(torchtitan(rate, number) for number, rate in enumerate((1000, 8000, 8192, 8192), 1)),
        (4.096, 4.0, 4.0),
        {0: round(40.5 * 2**30)},
    ),
    "deepspeed": (
        "\n".join(deepspeed(rate, number) for number, rate in enumerate((32.0, 64.0, 128.0), 2)),
        (4.0, 2.0),
        {0: round(20.25 * 2**30)},
    ),
    "accelerate": (
        "Map: 100%|██████████| 10000/10000 [00:09<00:00, 1111.1 examples/s]\n"
        + "".join(bar(step, f"{(10 + 2 * step) // 60:02d}:{(10 + 2 * step) % 60:02d}") for step in range(0, 101, 5)),
        (2.0,),
        {},
    ),
    "fsdp2": (
        "\n".join(f"step {number}: {value} s, loss 10.3, peak 12.50 GiB" for number, value in enumerate((3.0, 1.5, 1.25))),
        (1.5, 1.25),
        {0: round(12.5 * 2**30)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LOGS)
def test_log_is_recognised_and_its_warm_up_dropped(name: str) -> None:
    text, seconds, peaks = LOGS[name]
    run = read_log(text, BATCH)
    assert run.trainer == name
    assert run.iteration_seconds == pytest.approx(seconds)
    assert run.peak_bytes == peaks
    assert read_log(text, BATCH, name) == run
    assert set(LOGS) == set(FORMATS)


def test_number_format_of_the_weights_is_read_where_the_log_states_it() -> None:
    assert read_log(LOGS["megatron"][0], BATCH).dtype == "float32"
    assert read_log(LOGS["deepspeed"][0], BATCH).dtype is None


def test_engine_of_stages_states_the_time_itself() -> None:
    lines = [
        f"steps: {number} loss: 3.2 iter time (s): {1 + number / 10:.3f} samples/sec: 100.1" for number in (1, 2, 3)
    ]
    run = read_log("\n".join(lines), BATCH)
    assert (run.trainer, run.iteration_seconds) == ("deepspeed", (1.2, 1.3))


def test_every_rank_may_log_its_rate() -> None:
    lines = [
        torchtitan(rate, number).replace("rank0", f"rank{rank}")
        for number, rate in enumerate((1000, 8192, 8192), 1)
        for rank in (0, 1)
    ]
    run = read_log("\n".join(lines), BATCH)
    assert run.iteration_seconds == (4.0, 4.0)
    assert sorted(run.peak_bytes) == [0, 1]


@pytest.mark.parametrize("quote", ["", "'"])
def test_whole_run_counts_where_the_bar_is_missing(quote: str) -> None:
    text = f"{{'train_runtime': {quote}200.0{quote}, 'train_steps_per_second': {quote}0.5{quote}, 'epoch': 1.0}}"
    assert read_log(text, BATCH).iteration_seconds == (2.0,)


def described(name: str, step: int, total: int, elapsed: int) -> str:
    return f"\r{name}: {100 * step // total}%|██▌  | {step}/{total} [{clock(elapsed)}<00:14,  7.00s/it]"


def clock(seconds: int) -> str:
    return f"{seconds // 60:02d}:{seconds % 60:02d}"


LOADING = "".join(described("Loading checkpoint shards", step, 4, 7 * step) for step in range(5))


@pytest.mark.parametrize("prefix", ["", "[rank0]: ", "[default0]: "])
def test_bars_with_a_description_are_no_training(prefix: str) -> None:
    steps = "".join(bar(step, clock(step)).replace("\r", f"\r{prefix}") for step in range(21))
    run = read_log(LOADING + steps, BATCH)
    assert (run.trainer, run.iteration_seconds) == ("accelerate", (1.0,))


@pytest.mark.parametrize("name", [None, "accelerate"])
@pytest.mark.parametrize("text", [LOADING, LOADING.replace("%|██▌  |", "% Completed |")])
def test_log_of_bars_with_a_description_alone_is_refused(name: str | None, text: str) -> None:
    with pytest.raises(ValueError, match=r"its progress bars are of `Loading checkpoint shards`, not of a training"):
        read_log(text, BATCH, name)


def test_bars_with_a_description_do_not_hide_the_format_of_the_other_lines() -> None:
    assert read_log(LOADING + "\n" + LOGS["megatron"][0], BATCH).trainer == "megatron"


@pytest.mark.parametrize("evaluation", ["Evaluating", None])
@pytest.mark.parametrize("seconds", [3, 100])
def test_evaluations_and_saving_between_steps_do_not_count(evaluation: str | None, seconds: int) -> None:
    text, elapsed = "", 0
    for step in range(1, 31):
        elapsed += 1
        text += bar(step, clock(elapsed))
        if step % 10 == 0:
            for part in range(1, 51):
                line = described(evaluation or "", part, 50, seconds * part // 50)
                text += line if evaluation else line.replace("\r: ", "\r")
            elapsed += seconds
        elif step == 15:
            elapsed += 60  # a checkpoint, which no bar shows
    assert read_log(text, BATCH).iteration_seconds == (1.0,)


def test_bar_of_fast_steps_is_their_mean() -> None:
    text = "".join(bar(step, clock(step * 2 // 5)) for step in range(1, 101))
    assert read_log(text, BATCH).iteration_seconds == pytest.approx((0.4,), rel=0.03)


@pytest.mark.parametrize("count", [3, 8, 100])
def test_at_most_three_iterations_are_warm_up(count: int) -> None:
    run = read_log("\n".join(megatron(1000 * number, number % 10) for number in range(1, count + 1)), BATCH)
    assert len(run.iteration_seconds) + run.warm_up == count
    assert run.warm_up == {3: 1, 8: 2, 100: 3}[count]


@pytest.mark.parametrize("count", [1, 2])
def test_too_few_iterations_after_the_warm_up_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match=rf"holds {count} iterations? of megatron.*at least 3.*log more iterations"):
        read_log("\n".join(megatron(2810, number) for number in range(1, count + 1)), BATCH)


def test_bar_of_too_few_steps_is_refused() -> None:
    with pytest.raises(ValueError, match=r"holds 2 iterations of accelerate.*at least 3"):
        read_log(bar(1, "00:09") + bar(2, "00:11"), BATCH)


@pytest.mark.parametrize("value", ["nan", "-5100.0", "inf", "0.0"])
def test_iterations_whose_time_is_no_positive_number_are_named_and_left_out(value: str) -> None:
    lines = [megatron(number, 1) for number in (9000, 5000, 5000, 5000)]
    lines.insert(2, lines[2].replace("5000.0", value))
    run = read_log("\n".join(lines), BATCH)
    assert run.iteration_seconds == (5.0, 5.0, 5.0)
    assert run.skipped == (3,)


def test_rates_that_are_no_positive_number_are_named_and_left_out() -> None:
    run = read_log("\n".join(deepspeed(rate, 1) for rate in (32.0, 64.0, float("nan"), 0.0, -3.0, 128.0)), BATCH)
    assert (run.iteration_seconds, run.skipped) == ((4.0, 2.0), (3, 4, 5))


@pytest.mark.parametrize(
    ("text", "name", "sentence"),
    [
        (
            "Traceback (most recent call last):\nOutOfMemoryError",
            None,
            "log every step",
        ),
        ("", "deepspeed", "holds no iteration of deepspeed: no line has `CurrSamplesPerSec="),
        (LOGS["megatron"][0], "torchtitan", "holds no iteration of torchtitan: no line has `step: … tps: …`"),
        (
            LOGS["megatron"][0],
            "nemo",
            "format must be one of megatron, torchtitan, deepspeed, accelerate, fsdp2, got 'nemo'",
        ),
    ],
)
def test_log_without_iterations_is_refused_in_one_sentence(text: str, name: str | None, sentence: str) -> None:
    with pytest.raises(ValueError, match=r"\w") as refusal:
        read_log(text, BATCH, name)
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_rates_by_tokens_need_a_model_with_tokens() -> None:
    with pytest.raises(ValueError, match="has tokens a second, but rows of the model have none"):
        read_log(LOGS["torchtitan"][0], Batch(256, None, 16))
