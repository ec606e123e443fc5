"""Exports read back by the trainers' own classes, each in an environment of its own (nightly: it installs them)."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from exported_shapes import started
from source_files import ROOT

from trainwright.cluster import Device
from trainwright.exports import TARGETS, ExportRequest, UniformShape, nearest_plan, shape_of
from trainwright.exports.launch import launch_script
from trainwright.families import Gpt, Llama, Moe
from trainwright.families.fields import NORM_EPSILON, ROTARY_BASE, RotaryScaling
from trainwright.layer import Dtype
from trainwright.measurement.training_logs import Batch, read_log
from trainwright.model import Model
from trainwright.plan import Schedule
from trainwright.strategy import Sharding, Strategy
from trainwright_worker.layers.transformer_parts import rotary_angles

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
PACKAGES = {
    "megatron": "megatron-core==0.16.1",
    "torchtitan": "torchtitan==0.3.0",
    "accelerate": "accelerate==1.15.0",
    "transformers": "accelerate==1.15.0",
    "deepspeed": "deepspeed==0.19.8",
}
NO_INDEX = 3
"""Exit status of trainer_venvs.sh where no package index is reachable."""
LLAMA = Model.of(
    Llama(
        layers=10, hidden_size=64, heads=4, sequence_length=32, key_value_heads=2, rotary_base=5e5, norm_epsilon=2e-5,
        rotary_scaling=RotaryScaling("llama3", 8.0),
    ),
    Dtype.BFLOAT16,
)  # fmt: skip
GPT = Model.of(Gpt(layers=10, hidden_size=64, heads=4, sequence_length=32, vocabulary_size=100), Dtype.FLOAT16)
MOE = Model.of(
    Moe(layers=10, hidden_size=64, heads=4, sequence_length=32, experts=4, expert_every=2, balance_loss_weight=0.02),
    Dtype.BFLOAT16,
)
ZERO = (*Sharding,)
CASES = [
    (
        UniformShape(
            ends=ends,
            strategy=Strategy(tensor, data, sharding=sharding, sequence_parallel=tensor > 1 and model is not MOE),
            rows=2,
            micro_batches=4,
            recomputed_blocks=recomputed,
            schedule=schedule,
            devices=tuple(Device("a", slot) for slot in range(len(ends) * tensor * data)),
        ),
        model,
    )
    for ends, tensor, data, sharding, recomputed, schedule, model in [
        ((12,), 1, 1, Sharding.NONE, 0, Schedule.ONE_FORWARD_ONE_BACKWARD, LLAMA),
        ((12,), 2, 2, Sharding.ZERO3, 10, Schedule.ONE_FORWARD_ONE_BACKWARD, LLAMA),
        ((12,), 1, 4, Sharding.ZERO2, 0, Schedule.ONE_FORWARD_ONE_BACKWARD, GPT),
        ((12,), 1, 2, Sharding.ZERO3, 0, Schedule.ONE_FORWARD_ONE_BACKWARD, LLAMA),
        ((12,), 2, 2, Sharding.NONE, 0, Schedule.ONE_FORWARD_ONE_BACKWARD, MOE),
        ((1, 7, 12), 1, 2, Sharding.NONE, 0, Schedule.GPIPE, GPT),
        ((5, 11, 12), 2, 2, Sharding.ZERO1, 2, Schedule.ONE_FORWARD_ONE_BACKWARD, MOE),
        ((4, 8, 12), 1, 1, Sharding.NONE, 4, Schedule.ONE_FORWARD_ONE_BACKWARD, LLAMA),
    ]
]
LEAST = {"tensor", "data", "rows", "micro_batches", "global_batch_size", "sharding", "dtype", "clip_norm"}
"""Facts that every trainer states of every export."""
MORE = {
    "megatron": {"stages", "blocks", "recomputed_blocks", "sequence_parallel", "parameters"},
    "torchtitan": {"stages", "blocks", "recomputed_blocks", "sequence_parallel", "parameters", "schedule"},
    "accelerate": set(),
    "transformers": set(),
    "deepspeed": {"stages"},
}
"""Facts beside those that a trainer states of every export."""


@pytest.fixture(scope="module")
def interpreters() -> dict[str, str]:
    """Return the interpreter of each package; fail with the reason if one cannot be installed although there is an index."""
    done = subprocess.run(
        [ROOT / "deploy" / "development" / "trainer_venvs.sh", *dict.fromkeys(PACKAGES.values())],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == NO_INDEX:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(line.split() for line in done.stdout.splitlines())


@pytest.mark.parametrize("name", PACKAGES)
def test_trainer_reads_what_was_written(name: str, interpreters: dict[str, str], tmp_path: Path) -> None:
    target = TARGETS[name]
    cases, expected = [], []
    parameters: Counter[Model] = Counter()
    for number, (shape, own) in enumerate(CASES):
        model = LLAMA if name == "torchtitan" else own  # its recipe leaves other models to the user
        plan = nearest_plan(shape.plan(), target.capabilities)
        near = shape_of(plan)
        assert near is not None
        parameters[model] += model.parameters
        folder = tmp_path / str(number)
        folder.mkdir()
        files = {file.name: file.text for file in target.files(ExportRequest(plan, model))}
        for file, text in files.items():
            (folder / file).write_text(text)
        (arguments,) = started(files["launch.sh"], "a", folder, HF_ASSETS="tokenizer")
        case = {"folder": str(folder), "arguments": arguments, "ranks": len(near.devices), "layers": near.layers}
        for stage in range(len(near.ends)):
            cases.append(case | {"rank": stage * near.strategy.width})
            expected.append((model, _facts(near, stage, model, name)))
    found = _read(name, interpreters[PACKAGES[name]], cases)
    for told, (model, wanted) in zip(found, expected, strict=True):
        assert told.keys() >= LEAST | MORE[name]
        parameters[model] -= told.pop("parameters", 0)
        assert told == {fact: wanted[fact] for fact in told}
    if "parameters" in MORE[name]:
        assert not any(parameters.values())


def _facts(shape: UniformShape, stage: int, model: Model, trainer: str) -> dict[str, Any]:
    """Return what a trainer has to state of a rank of a stage."""
    blocks = shape.blocks[stage]
    always = trainer == "megatron" and model is MOE  # which it does not train without
    return {
        "stages": len(shape.ends),
        "tensor": shape.strategy.tensor,
        "data": shape.strategy.data,
        "rows": shape.rows,
        "micro_batches": shape.micro_batches,
        "global_batch_size": shape.global_batch_size,
        "sharding": ZERO.index(shape.strategy.sharding),
        "blocks": blocks,
        "recomputed_blocks": min(shape.recomputed_blocks, blocks),
        "recomputes": shape.recomputed_blocks > 0,
        "sequence_parallel": shape.strategy.tensor > 1 and (always or shape.strategy.sequence_parallel),
        "dtype": str(model.dtype),
        "clip_norm": 1.0,
        **_values(model),
        "schedule": str(shape.schedule),
    }


def _values(model: Model) -> dict[str, Any]:
    """Return the values of a model that change its results alone: of a slow frequency, and of norms and experts."""
    family = model.family
    if not isinstance(family, Llama | Moe):
        return {}
    frequencies = rotary_angles(
        2, family.hidden_size // family.heads, family.rotary_base or ROTARY_BASE, family.rotary_scaling
    )
    values = {"slow_frequency": pytest.approx(float(frequencies[1, 0, -1]), rel=1e-5)}
    values["norm_epsilon"] = NORM_EPSILON if family.norm_epsilon is None else family.norm_epsilon
    if isinstance(family, Moe):
        values |= {"balance_loss_weight": family.balance_loss_weight, "dispatcher": "alltoall", "grouped": True}
    return values


def _read(name: str, interpreter: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    reader = Path(__file__).with_name("read_by_trainers.py")
    done = subprocess.run(
        [interpreter, reader, name], input=json.dumps(cases), capture_output=True, text=True, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(lines[-1].removeprefix("FOUND "))
    return found


@pytest.mark.torch_processes
def test_script_of_torch_alone_trains_alike_however_it_shards(tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 10,
              "num_attention_heads": 4, "intermediate_size": 256, "vocab_size": 32000, "tie_word_embeddings": True}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    runs = [
        _losses(tmp_path, str(tmp_path), *plan)
        for plan in ((Sharding.NONE, 0), (Sharding.ZERO2, 0), (Sharding.ZERO3, 10))
    ]
    assert all(10 < loss < 11 for loss in runs[0])  # log(32000) is 10.4
    assert runs[1] == pytest.approx(runs[0], rel=2e-3)
    assert runs[2] == pytest.approx(runs[0], rel=2e-3)


@pytest.mark.torch_processes
def test_script_of_torch_alone_trains_a_model_of_your_own(tmp_path: Path) -> None:
    (tmp_path / "own_model.py").write_text(OWN_MODEL)
    assert len(_losses(tmp_path, "own_model:make", Sharding.ZERO3, 0)) == 3


def _losses(folder: Path, model: str, sharding: Sharding, recomputed: int) -> list[float]:
    """Return the losses of three steps on two processes."""
    shape = replace(CASES[2][0].with_strategy(data=2, sharding=sharding), recomputed_blocks=recomputed)
    shape = replace(shape, devices=(Device("a", 0), Device("a", 1)))
    for file in TARGETS["fsdp2"].files(ExportRequest(shape.plan(), LLAMA)):
        (folder / file.name).write_text(file.text)
    printed = _torchrun(folder, MODEL=model, TRAINWRIGHT_ITERATIONS="3", NODE="a", PYTHONPATH=str(folder))
    run = read_log(printed, Batch(16, 32, 2))
    assert (run.trainer, len(run.iteration_seconds) + run.warm_up) == ("fsdp2", 3)
    return [float(loss) for loss in re.findall(r"^step .* loss ([\d.]+),", printed, re.MULTILINE)]


OWN_MODEL = """
import torch
from torch import nn
class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(32000, 16), nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 32000)
    def forward(self, input_ids, labels):
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = hidden + torch.relu(block(hidden))
        return {"loss": nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())}
def make():
    model = Own()
    return model, [*model.blocks]
"""


def _torchrun(folder: Path, **own: str) -> str:
    """Run the launch script of a folder on this machine's CPU, and return what it printed."""
    torchrun = folder / "torchrun"
    torchrun.write_text(f'#!/bin/bash\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    torchrun.chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", **own}
    environment["PATH"] = f"{folder}:{environment['PATH']}"
    done = subprocess.run(
        ["bash", "launch.sh"], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


SCRIPT = """
import os
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
own = os.environ["CUDA_VISIBLE_DEVICES"].split(",")[int(os.environ["LOCAL_RANK"])]
print("FOUND", dist.get_rank(), os.environ["NODE"], own, int(total))
"""


@pytest.mark.torch_processes
def test_torchrun_gives_every_rank_its_device_when_nodes_have_several_runs_of_ranks(tmp_path: Path) -> None:
    devices = (Device("b", 1), Device("a", 2), Device("a", 0), Device("b", 0))
    (tmp_path / "launch.sh").write_text(launch_script(devices, "script.py", []))
    (tmp_path / "script.py").write_text(SCRIPT)
    torchrun = tmp_path / "torchrun"
    torchrun.write_text(f'#!/bin/bash\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    torchrun.chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    found["PATH"] = f"{tmp_path}:{found['PATH']}"
    nodes = [
        subprocess.Popen(
            ["bash", "launch.sh"], cwd=tmp_path, env={**found, "NODE": node}, stdout=subprocess.PIPE, text=True
        )
        for node in "ab"
    ]
    lines = [line.split()[1:] for node in nodes for line in node.communicate()[0].splitlines() if "FOUND" in line]
    assert sorted(lines) == [[str(rank), one.node, str(one.slot), "4"] for rank, one in enumerate(devices)]
