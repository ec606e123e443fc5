"""Step times and memory in logs of other trainers, and in logs that are anything."""

from __future__ import annotations

import json
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.bounds import LONGEST_SECONDS, SHORTEST_SECONDS
from trainwright.cluster import Device
from trainwright.families import Gpt, Vit
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.outside.plain_text import plain_text
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.strategy import Strategy
from trainwright.worker_api import Gang, GangNode, TrialTask
from trainwright_operator.api.frameworks import FrameworkSpec
from trainwright_operator.flow.gangs.framework_log import StepLog, check_framework, states_out_of_memory

DEVICES = (Device("a", 1), Device("a", 0), Device("b", 3))
RUN = LayerRun(0, 4, Strategy(1, 3), (1, 1, 1))
PLAN = Plan(4, 3, (Pipeline(1, 3, (Stage(DEVICES, (RUN,)),)),))
MODEL = Model.of(Gpt(layers=2, hidden_size=8, heads=2, sequence_length=100, vocabulary_size=64), Dtype.FLOAT32)


def task(warmup: int = 2, iterations: int = 3) -> TrialTask:
    gang = Gang((GangNode("a", (0, 1), "x"), GangNode("b", (3,), "x")))
    return TrialTask(gang, MODEL, PLAN, warmup_iterations=warmup, iterations=iterations)


def framework(**fields: object) -> FrameworkSpec:
    return FrameworkSpec.model_validate({"image": "i", "command": ["c"], **fields})


MEGATRON = framework(
    stepTimeRegex=r"elapsed time per iteration \(ms\):",
    stepTimeUnit="Milliseconds",
    memoryRegex=r"max allocated:",
    memoryUnit="MiB",
)
LINE = (
    " [2026-01-01 00:00:00] iteration {n:8d}/     100 | consumed samples: {n:12d} | elapsed time per iteration (ms): {t:.1f} | "
    "throughput per GPU (TFLOP/s/GPU): 95.1 | learning rate: 1.000000E-04 | global batch size:    16 |"
)


def test_megatrons_last_rank_is_read_in_milliseconds() -> None:
    first = "[Rank 0] (after 1 iterations) memory (MB) | allocated: 12.5 | max allocated: 2048.5 | reserved: 9000.0\n"
    last = "\n".join(LINE.format(n=number, t=1000.0 if number < 3 else 250.0) for number in range(1, 6))
    found = StepLog.of(MEGATRON, task(), {"a": first, "b": last}).report(is_over=False)
    assert found is not None
    assert found.iteration_seconds == (0.25, 0.25, 0.25)
    assert [(one.node, one.slot, one.peak_bytes) for one in found.memory] == [("a", 1, int(2048.5 * 2**20))]


def test_torchtitans_tokens_per_second_become_seconds() -> None:
    asked = framework(
        stepTimeRegex=r"tps:", stepTimeUnit="TokensPerSecondPerDevice", memoryRegex="memory:", memoryUnit="GiB"
    )
    line = "\x1b[31mstep: {n}  \x1b[32mloss: 4.0  \x1b[33mmemory:  1.50GiB(1.58%)  \x1b[34mtps: 2,000  \x1b[36mtflops: 9.1\n"
    log = plain_text("".join(line.format(n=number) for number in range(5)))
    found = StepLog.of(asked, task(), {"a": log, "b": log}).report(is_over=False)
    assert found is not None
    assert found.iteration_seconds == pytest.approx([100 * 3 / 3 / 2000] * 3)
    assert [one.peak_bytes for one in found.memory] == [int(1.5 * 2**30)] * 2


def test_lines_of_json_are_read_by_path() -> None:
    asked = framework(stepTimeJsonPath=".step.seconds", memoryJsonPath=".bytes")
    lines = [{"step": {"seconds": 0.5}, "bytes": 7}, {"step": 3}, [1], {"step": {"seconds": True}}]
    log = "no json\n{broken\n" + "\n".join(map(json.dumps, lines * 5))
    found = StepLog.of(asked, task(), {"a": log}).report(is_over=False)
    assert found is not None
    assert found.iteration_seconds == (0.5, 0.5, 0.5)
    assert found.memory[0].peak_bytes == 7


def test_job_that_trains_on_is_measured_once_enough_steps_are_stated() -> None:
    asked = framework(stepTimeRegex="took")
    four, five = (StepLog.of(asked, task(), {"a": "took 1 s\n" * number}) for number in (4, 5))
    assert four.report(is_over=False) is None
    assert (four.progress.done, four.progress.total) == (4, 5)
    assert five.report(is_over=False) is not None


def test_shorter_job_counts_with_what_it_has_after_the_warm_up() -> None:
    asked = framework(stepTimeRegex="took")
    found = StepLog.of(asked, task(), {"a": "took 9\ntook 9\ntook 1\n"}).report(is_over=True)
    assert found is not None
    assert found.iteration_seconds == (1.0,)
    nothing = StepLog.of(asked, task(), {"a": "took 9\ntook 9\n"})
    assert nothing.report(is_over=True) is None
    assert "after 2 step times" in nothing.shortcoming


@given(
    st.lists(st.floats(SHORTEST_SECONDS, 1e6), min_size=3, max_size=8),
    st.text(st.characters(exclude_categories=["Nd", "Cs"], exclude_characters="\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029")),
    st.integers(0, 2),
)
def test_median_is_that_of_the_steps_after_the_warm_up(seconds: list[float], noise: str, warmup: int) -> None:
    log = "".join(f"{noise}\nstep 3: {one!r} s, 17 rows\n" for one in seconds)
    asked = framework(stepTimeRegex=r"step [0-9]+:")
    found = StepLog.of(asked, task(warmup, 100), {"a": log}).report(is_over=True)
    assert found is not None
    assert statistics.median(found.iteration_seconds) == pytest.approx(statistics.median(seconds[warmup:]))


@given(
    st.lists(
        st.one_of(
            st.text(max_size=60),
            st.sampled_from(["took 1e999", "took 0", "took -1", "took 1e-30", "took " + "9" * 400, "took ,", "took 1,2,", "[" * 3000]),
            st.recursive(st.none() | st.booleans() | st.floats() | st.integers(), lambda part: st.dictionaries(st.sampled_from("at"), part)).map(json.dumps),
        ),
        max_size=12,
    ).map("\n".join),
    st.sampled_from([{"stepTimeRegex": "took"}, {"stepTimeRegex": "(a*)*b|took"}, {"stepTimeJsonPath": ".a.t"}]),
    st.sampled_from(["Seconds", "Milliseconds", "TokensPerSecondPerDevice"]),
)  # fmt: skip
def test_logs_from_outside_never_break_and_stay_within_bounds(log: str, by: dict[str, str], unit: str) -> None:
    asked = framework(**by, stepTimeUnit=unit, memoryJsonPath=".t")
    found = StepLog.of(asked, task(0, 50), {"a": log, "b": log}).report(is_over=True)
    assert found is None or all(SHORTEST_SECONDS <= one <= LONGEST_SECONDS for one in found.iteration_seconds)


def test_expression_that_takes_others_for_ever_is_matched_at_once() -> None:
    asked = framework(stepTimeRegex="(a+)+(b|c|d)")
    assert StepLog.of(asked, task(), {"a": ("a" * 1500 + " 1 2 3 4\n") * 50}).seconds == ()


def test_expression_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"trials.framework.stepTimeRegex: '\(' is no regular expression; mend it"):
        check_framework(framework(stepTimeRegex="("), MODEL.family)
    check_framework(MEGATRON, MODEL.family)


def test_tokens_of_a_model_that_has_none_are_refused() -> None:
    asked = framework(stepTimeRegex="tps:", stepTimeUnit="TokensPerSecondPerDevice")
    check_framework(asked, MODEL.family)
    with pytest.raises(ValueError, match="this model has no tokens; log the seconds of a step"):
        check_framework(asked, Vit(layers=2, hidden_size=8, heads=2, image_size=8, patch_size=4))


def test_out_of_memory_is_told_by_torchs_words() -> None:
    assert states_out_of_memory("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB")
    assert not states_out_of_memory("RuntimeError: shapes do not match")
