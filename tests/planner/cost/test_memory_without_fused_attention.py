"""Most rows that GPT-2 trains with on V100 of 32 GB in frameworks without fused attention, beside what was published.

DeepSpeedExamples, training/autotuning/hf, on 16 GPUs with 1,024 tokens: the largest micro-batch that ran.
"""

from __future__ import annotations

import pytest

from trainwright.accelerators import cluster_of, estimate_profiles
from trainwright.cost.context import CostContext
from trainwright.cost.estimate import estimate_with_context
from trainwright.families import Gpt
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.runtime_presets import runtime_preset
from trainwright.strategy import Sharding, Strategy

CLUSTER = cluster_of({"dgx-1": 2})
SIZES = {"medium": (24, 1024, 16), "large": (36, 1280, 20), "xl": (48, 1600, 25)}


def fits(size: str, preset: str, sharding: Sharding, rows: int) -> bool:
    layers, hidden, heads = SIZES[size]
    model = Model.of(Gpt(layers, hidden, heads, 1024, 50257, dropout=True), Dtype.FLOAT16)
    runtime, devices = runtime_preset(preset).runtime, CLUSTER.devices
    run = LayerRun(0, layers + 2, Strategy(1, len(devices), sharding=sharding), (rows,) * len(devices))
    plan = Plan(layers + 2, rows * len(devices), (Pipeline(1, rows * len(devices), (Stage(devices, (run,)),)),))
    (v100,) = CLUSTER.accelerators
    profiles = estimate_profiles(model, [v100.name], tensor_degrees=[1], rows=[rows], runtime=runtime)
    estimate = estimate_with_context(plan, CostContext(model, CLUSTER, profiles, "adam", runtime))
    return estimate.peak_memory_bytes <= v100.memory_bytes * (1 - runtime.fragmented_ratio)


@pytest.mark.parametrize(
    ("size", "preset", "sharding", "published"),
    [
        ("medium", "transformers-2021", Sharding.NONE, 2),
        ("medium", "deepspeed-2021", Sharding.NONE, 5),
        ("medium", "deepspeed-2021", Sharding.ZERO1, 6),
        ("large", "transformers-2021", Sharding.NONE, 1),
        ("large", "deepspeed-2021", Sharding.NONE, 2),
        ("large", "deepspeed-2021", Sharding.ZERO1, 3),
        ("xl", "transformers-2021", Sharding.NONE, 0),
        ("xl", "deepspeed-2021", Sharding.NONE, 0),
        ("xl", "deepspeed-2021", Sharding.ZERO1, 1),
    ],
)
def test_rows_that_fit_are_those_that_ran_within_one(
    size: str, preset: str, sharding: Sharding, published: int
) -> None:
    rows = next(number for number in range(9) if not fits(size, preset, sharding, number + 1))
    assert abs(rows - published) <= 1
    assert (rows == 0) == (published == 0)
