"""Buffers of user models: trained as in one process, with and without recompute, and kept by checkpoints."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import two_device_plans
from gang_answers import answers_of
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from trainwright import documents
from trainwright.model import Model
from trainwright.strategy import Sharding
from trainwright.training import Training
from trainwright_worker.checkpoint_conversion import to_torch
from trainwright_worker.executor.checkpoint import STATE_FILE, load, save
from trainwright_worker.executor.checkpoint_chunks import resident_tiles
from trainwright_worker.layers.custom import custom_layers
from trainwright_worker.model_description.description import describe

pytestmark = [
    pytest.mark.torch_processes,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]

ORACLES = Path(__file__).with_name("oracles")
EQUIVALENCE, CHECKPOINT = (Path(__file__).with_name(f"{name}_gang.py") for name in ("equivalence", "checkpoint"))
MODELS = "batch_norm", "moving_codes", "spectral"
ROWS, MICRO_BATCHES, LAYERS = 6, 3, 5
stages = partial(two_device_plans.stages, LAYERS, 2, ROWS, MICRO_BATCHES)
replicas = partial(two_device_plans.replicas, LAYERS, (2, 4), MICRO_BATCHES)
PLANS = {
    "stages": stages(),
    "recompute": stages(recompute=True),
    "replicas": replicas(),
    "sharded, recompute": replicas(recompute=True, sharding=Sharding.ZERO3),
}


def model(name: str) -> dict:
    return {
        "custom": documents.dump(
            Training(1, custom=describe(f"buffered_models:{name}", check_seconds=0, dtypes=[torch.float32]))
        )["custom"]
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    cases = [
        {"name": f"{name}, {plan}", "model": model(name), "plan": documents.dump(PLANS[plan]), "steps": 3, "by_piece": True}
        for name in MODELS
        for plan in PLANS
    ]  # fmt: skip
    return answers_of(EQUIVALENCE, tmp_path_factory.mktemp("trained"), cases, processes=2)


@pytest.mark.parametrize("plan", ["stages", "recompute"])
@pytest.mark.parametrize("name", MODELS)
def test_one_replica_trains_weights_and_buffers_as_one_process_does(trained: dict, name: str, plan: str) -> None:
    answer = trained[f"{name}, {plan}"]
    assert answer["missing"] == []
    assert answer["loss_error"] < 1e-5
    assert answer["gradient_error"] < 1e-5
    assert answer["weight_error"] < 1e-4
    assert answer["buffer_error"] < 1e-5


@pytest.mark.parametrize("plan", ["replicas", "sharded, recompute"])
def test_replicas_normalise_their_own_rows_with_and_without_recompute(trained: dict, plan: str) -> None:
    answer = trained[f"batch_norm, {plan}"]
    assert answer["loss_error"] < 1e-5
    assert answer["gradient_error"] < 1e-5


CHANGES = {
    **{f"{name}, stages": ("stages", "recompute") for name in MODELS},
    "batch_norm, replicas": ("replicas", "sharded, recompute"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def saved(folder: Path) -> dict[str, dict]:
    cases = [
        {
            "name": name, "model": model(name.split(",")[0]), "folder": str(folder / name), "by_piece": True,
            "first": documents.dump(PLANS[first]), "second": documents.dump(PLANS[second]), "chunk_values": 20,
        }
        for name, (first, second) in CHANGES.items()
    ]  # fmt: skip
    return answers_of(CHECKPOINT, folder, cases, processes=2)


@pytest.mark.parametrize("name", [name for name in CHANGES if "stages" in name])
def test_training_continues_from_a_checkpoint_with_its_buffers(saved: dict, name: str) -> None:
    answer = saved[name]
    assert answer["missing"] == []
    assert answer["difference"] == 0.0
    assert answer["loss_error"] < 1e-5
    assert set(answer["errors"]) == {"weights", "momentum", "buffers"}
    assert max(answer["errors"].values()) < 1e-4


def test_buffers_of_the_first_replica_are_saved_and_every_replica_loads_them(saved: dict) -> None:
    answer = saved["batch_norm, replicas"]
    assert min(answer["own_difference"]) == 0.0 < max(answer["own_difference"])
    assert answer["difference"] == 0.0


def test_changing_a_buffer_only_later_is_refused_under_recompute(executor) -> None:
    one = executor(
        Model.of(describe("buffered_models:late_counter", check_seconds=0, dtypes=[torch.float32])), recompute=True
    )
    with pytest.raises(RuntimeError, match=r"layer 1 changes its buffer seen now, .* plan without recompute"):
        one.run_iteration(one.make_batch(0))


def convert(*arguments: object, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the command in a folder, from which alone it can import the user's module."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PYTHONPATH"] = os.pathsep.join(one for one in sys.path if Path(one) != ORACLES)
    command = [sys.executable, "-m", "trainwright", "checkpoint", "convert", *map(str, arguments)]
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd=folder, env=environment)


def test_the_command_converts_from_the_folder_of_the_model(saved: dict, folder: Path, tmp_path: Path) -> None:
    worker, there, back = folder / "batch_norm, stages", tmp_path / "there", tmp_path / "back"
    done = convert(worker, there, folder=ORACLES)
    assert (done.returncode, done.stderr) == (0, "")
    dcp_to_torch_save(there, tmp_path / "state.pt")
    weights = torch.load(tmp_path / "state.pt")["model"]
    modules = torch.nn.ModuleList(make() for make in custom_layers("buffered_models:batch_norm").model.layers)
    modules.load_state_dict({name.removeprefix("layers."): value for name, value in weights.items()})
    assert modules[1].inner.num_batches_tracked == 3 * MICRO_BATCHES
    model_file = tmp_path / "model.json"
    model_file.write_text(json.dumps({**model("batch_norm"), "optimizer": "sgd"}), encoding="utf-8")
    done = convert(there, back, "--model", model_file, "--iteration", 3, folder=ORACLES)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads((back / STATE_FILE).read_text())["iteration"] == 3
    dcp_to_torch_save(worker, tmp_path / "worker.pt")
    dcp_to_torch_save(back, tmp_path / "back.pt")
    before, behind = torch.load(tmp_path / "worker.pt"), torch.load(tmp_path / "back.pt")
    assert before.keys() == behind.keys()
    assert all(torch.equal(value, behind[name]) and value.dtype == behind[name].dtype for name, value in before.items())


def test_the_command_says_in_one_sentence_that_it_does_not_find_the_model(
    saved: dict, folder: Path, tmp_path: Path
) -> None:
    done = convert(folder / "batch_norm, stages", tmp_path / "there", folder=tmp_path)
    assert done.returncode == 2
    assert "this worker has no module buffered_models" in done.stderr
    assert done.stderr.count("\n") == 1


def make_former(folder: Path) -> None:
    """Rewrite a checkpoint's index as version 0.2.0 did: without buffers, and with `module.` in names."""
    index = FileSystemReader(folder).read_metadata()

    def former(name: str) -> str:
        kind, layer, parameter = name.replace("/", ".").split(".", 2)
        return f"{kind}/{layer}.module.{parameter}"

    tensors = {former(name): one for name, one in index.state_dict_metadata.items() if "buffers/" not in name}
    chunks = {
        replace(key, fqn=former(key.fqn)): one for key, one in index.storage_data.items() if "buffers/" not in key.fqn
    }
    rewritten = replace(index, state_dict_metadata=tensors, storage_data=chunks)
    (folder / ".metadata").write_bytes(pickle.dumps(rewritten))


def test_a_checkpoint_of_version_0_2_0_loads_without_its_buffers(executor, tmp_path: Path) -> None:
    built = Model.of(describe("buffered_models:batch_norm", check_seconds=0, dtypes=[torch.float32]))
    one = executor(built)
    one.run_iteration(one.make_batch(0))
    save(one, tmp_path / "former", 1)
    make_former(tmp_path / "former")
    other, untrained = executor(built), executor(built)
    with pytest.warns(UserWarning, match=r"buffers/1.inner.running_mean and all others keep their initial values"):
        assert load(other, tmp_path / "former") == 1
    wanted = {tile.name: tile.values for tile in resident_tiles(one)}
    initial = {tile.name: tile.values for tile in resident_tiles(untrained)}
    for tile in resident_tiles(other):
        assert torch.equal(tile.values, (initial if "buffers/" in tile.name else wanted)[tile.name]), tile.name


def test_a_checkpoint_of_version_0_2_0_converts_where_the_model_has_no_buffers(executor, tmp_path: Path) -> None:
    one = executor(Model.of(describe("buffered_models:plain", check_seconds=0, dtypes=[torch.float32])))
    save(one, tmp_path / "former", 1)
    make_former(tmp_path / "former")
    to_torch(tmp_path / "former", tmp_path / "there")
    assert "model.layers.1.inner.weight" in FileSystemReader(tmp_path / "there").read_metadata().state_dict_metadata
