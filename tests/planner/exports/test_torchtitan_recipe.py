"""Files for torchtitan: what its recipe and its launch script say of a plan."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from exported_shapes import LLAMA, SHAPE, started

from trainwright.cluster import Device
from trainwright.exports import TARGETS, ExportRequest, UniformShape
from trainwright.families import Gpt, Moe
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.runtime import Runtime
from trainwright.strategy import Sharding

ONE_STAGE = replace(SHAPE, ends=(6,), devices=(Device("a", 0), Device("a", 1)))


def written(shape: UniformShape, model: Model | None = LLAMA, runtime: Runtime | None = None) -> dict[str, str]:
    files = TARGETS["torchtitan"].files(ExportRequest(shape.plan(), model, runtime=runtime))
    return {file.name: file.text for file in files}


def test_launch_script_asks_for_the_tokenizer(tmp_path: Path) -> None:
    script = written(ONE_STAGE)["launch.sh"]
    with pytest.raises(subprocess.CalledProcessError) as refusal:
        started(script, "a", tmp_path)
    assert "HF_ASSETS: must be the folder of the tokenizer" in refusal.value.stderr
    (call,) = started(script, "a", tmp_path, HF_ASSETS="/assets/llama")
    assert call[-4:] == ["--module", "trainwright_recipe", "--config", "trainwright"]


@pytest.mark.parametrize(
    ("ends", "sharding", "words"),
    [
        ((6,), Sharding.ZERO3, ('reshard_after_forward="always"', "weights are gathered for each pass")),
        ((6,), Sharding.ZERO2, ('reshard_after_forward="never"', "weights stay whole until the backward")),
        (
            (3, 6),
            Sharding.ZERO1,
            ('reshard_after_forward="never"', "whole weights and gradients until the last micro-batch"),
        ),
    ],
)
def test_recipe_shards_as_far_as_stages_do(ends: tuple[int, ...], sharding: Sharding, words: tuple[str, ...]) -> None:
    devices = tuple(Device("a", slot) for slot in range(2 * len(ends)))
    recipe = written(replace(ONE_STAGE.with_strategy(sharding=sharding), ends=ends, devices=devices))[
        "trainwright_recipe.py"
    ]
    assert all(word in recipe for word in (*words, "data_parallel_shard_degree=2", f"{sharding} (FSDP2)"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "reduces gradients in each of 4 micro-batches. zero2 communicates as much"),
        ({"strategy": ONE_STAGE.strategy.replace(sharding=Sharding.ZERO2)}, None),
        ({"strategy": ONE_STAGE.strategy.replace(sharding=Sharding.ZERO3)}, None),
        ({"micro_batches": 1}, None),
        ({"ends": (3, 6), "strategy": ONE_STAGE.strategy.replace(data=1)}, None),
        ({"ends": (2, 6), "devices": tuple(Device("a", slot) for slot in range(4))}, "after the last backward; the"),
    ],
)
def test_export_says_what_replicas_communicate_beyond_need_or_price(changes: dict[str, Any], words: str | None) -> None:
    script = written(replace(ONE_STAGE, **changes), runtime=Runtime())["launch.sh"]
    told = " ".join(script.replace("\n#", "").split())
    assert words is None or words in told
    assert ("torchtitan reduces" in told or "the prediction is of" in told) == (words is not None)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (None, "# add mixed_precision_param, your model's number format"),
        (LLAMA, 'mixed_precision_param="bfloat16",'),
    ],
    ids=["no model", "llama"],
)
def test_recipe_states_the_number_format_or_leaves_it_to_the_user(model: Model | None, words: str) -> None:
    recipe = written(ONE_STAGE, model)["trainwright_recipe.py"]
    assert words in recipe
    assert ("# add mixed_precision_param" in recipe) == (model is None)
    assert ("# yours: the model was not given (--model)" in recipe) == (model is None)


@pytest.mark.parametrize(
    ("family", "words"),
    [
        (Gpt(layers=4, hidden_size=64, heads=4, sequence_length=32, vocabulary_size=100), "has no gpt."),
        (Moe(layers=4, hidden_size=64, heads=4, sequence_length=32, experts=4), "has no MoE of these sizes."),
    ],
)
def test_recipe_says_which_model_torchtitan_lacks(family: Gpt | Moe, words: str) -> None:
    assert f"torchtitan 0.3.0 {words}" in written(ONE_STAGE, Model.of(family, Dtype.BFLOAT16))["trainwright_recipe.py"]
