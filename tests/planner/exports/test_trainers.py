"""Exports read back by the trainers' own classes, each in an environment of its own (nightly: it installs them)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from exported_shapes import started
from source_files import ROOT

from trainwright.cluster import Device
from trainwright.exports import TARGETS, ExportOrder, UniformShape, nearest_plan, shape_of
from trainwright.exports.launch import launch_script
from trainwright.families import Llama
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.plan import Schedule, Sharding

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
PACKAGES = {
    "megatron": "megatron-core==0.16.1",
    "torchtitan": "torchtitan==0.3.0",
    "accelerate": "accelerate==1.15.0",
    "deepspeed": "deepspeed==0.19.8",
}
MODEL = Model.of(Llama(layers=10, hidden_size=64, heads=4, sequence_length=32, key_value_heads=2), Dtype.BFLOAT16)
SHAPES = [
    UniformShape(
        ends=ends,
        tensor=tensor,
        data=data,
        rows=2,
        micro_batches=4,
        sharding=sharding,
        recomputed_blocks=recomputed,
        schedule=Schedule.ONE_FORWARD_ONE_BACKWARD,
        devices=tuple(Device("a", slot) for slot in range(len(ends) * tensor * data)),
        sequence_parallel=tensor > 1,
    )
    for ends, tensor, data, sharding, recomputed in [
        ((12,), 1, 1, Sharding.NONE, 0),
        ((12,), 2, 2, Sharding.ZERO3, 10),
        ((12,), 1, 4, Sharding.ZERO2, 0),
        ((1, 7, 12), 1, 2, Sharding.NONE, 0),
        ((5, 11, 12), 2, 2, Sharding.ZERO1, 2),
        ((4, 8, 12), 1, 1, Sharding.NONE, 4),
    ]
]


@pytest.fixture(scope="module")
def interpreters() -> dict[str, str]:
    """Return the interpreter of each package that could be installed."""
    done = subprocess.run(
        [ROOT / "deploy" / "development" / "trainer_venvs.sh", *PACKAGES.values()],
        capture_output=True,
        text=True,
        check=False,
    )
    return dict(line.split() for line in done.stdout.splitlines())


@pytest.mark.parametrize("name", PACKAGES)
def test_trainer_reads_what_was_written(name: str, interpreters: dict[str, str], tmp_path: Path) -> None:
    if PACKAGES[name] not in interpreters:
        pytest.skip(f"{PACKAGES[name]} cannot be installed here; see deploy/development/trainer_venvs.sh")
    target = TARGETS[name]
    cases, expected = [], []
    for number, shape in enumerate(SHAPES):
        plan = nearest_plan(shape.plan(), target.capabilities)
        near = shape_of(plan)
        assert near is not None
        folder = tmp_path / str(number)
        folder.mkdir()
        files = {file.name: file.text for file in target.files(ExportOrder(plan, MODEL))}
        for file, text in files.items():
            (folder / file).write_text(text)
        cases.append(_case(near, folder, started(files["launch.sh"], "a", folder)[0]))
        expected.append([*near.blocks])
    found = _read(name, interpreters[PACKAGES[name]], cases)
    assert [one["blocks"] for one in found] == expected
    assert {one["parameters"] for one in found if "parameters" in one} <= {MODEL.parameters}


def _case(shape: UniformShape, folder: Path, arguments: list[str]) -> dict[str, Any]:
    return {
        "folder": str(folder),
        "arguments": arguments,
        "ranks": len(shape.devices),
        "replicas": shape.data,
        "layers": shape.layers,
        "blocks": [*shape.blocks],
        "batch": shape.global_batch_size,
    }


def _read(name: str, interpreter: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    reader = Path(__file__).with_name("read_by_trainers.py")
    done = subprocess.run(
        [interpreter, reader, name], input=json.dumps(cases), capture_output=True, text=True, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(lines[-1].removeprefix("FOUND "))
    return found


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
