"""Checkpoints that go from the worker to torch's own trainers and back: training continues unchanged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gang_answers import answers_of
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from typer.testing import CliRunner

from trainwright import documents
from trainwright.cli import app
from trainwright.training import Training
from trainwright_worker.checkpoint_conversion import named_tensors, to_torch, to_worker
from trainwright_worker.executor.checkpoint import STATE_FILE
from trainwright_worker.executor.checkpoint_chunks import CheckpointError

pytestmark = [
    pytest.mark.torch_processes,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]

runner = CliRunner()
GANG = Path(__file__).with_name("conversion_gang.py")
SIZES = {"layers": 4, "hidden_size": 32, "heads": 4, "sequence_length": 8, "vocabulary_size": 38}
CASES = {
    "tied, adam": {"model": {"gpt": SIZES}, "optimizer": "adam", "learning_rate": 1e-3},
    "untied, sgd": {"model": {"llama": {**SIZES, "key_value_heads": 2}}, "optimizer": "sgd", "learning_rate": 0.05},
}
EMBEDDING, HEAD = "layers.0.tokens", "layers.5.tokens"


def training(name: str, **changes) -> Training:
    case = CASES[name]
    ((family, sizes),) = case["model"].items()
    document = {"dtype": "float32", family: {**sizes, **changes}, "optimizer": case["optimizer"]}
    return documents.parse({**document, "global_batch_size": 8}, Training)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("conversions")


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[str, dict]:
    asked = [{"name": name, "folder": str(folder / name), **case} for name, case in CASES.items()]
    return answers_of(GANG, folder, asked, processes=2)


@pytest.mark.parametrize("name", CASES)
def test_weights_and_state_are_the_same_bit_by_bit_there_and_back(answers: dict, name: str) -> None:
    assert answers[name]["is_same"]


@pytest.mark.parametrize("name", CASES)
def test_training_continues_in_torch_and_then_under_another_plan(answers: dict, name: str) -> None:
    assert answers[name]["loss_error"] < 1e-6


def test_updates_are_counted_on_from_torchs_adam(answers: dict) -> None:
    assert answers["tied, adam"]["updates"] == 6


def test_one_file_of_torch_has_nested_names_and_tied_weights_twice(answers: dict, folder: Path) -> None:
    dcp_to_torch_save(folder / "tied, adam" / "torch", folder / "state.pt")
    state = torch.load(folder / "state.pt")
    weights = named_tensors(training("tied, adam").model)
    assert set(state["model"]) == {name for weight in weights for name in weight.torch_names}
    assert torch.equal(state["model"][EMBEDDING], state["model"][HEAD])
    assert set(state["optim"]["state"][HEAD]) == {"exp_avg", "exp_avg_sq", "step"}
    assert state["optim"]["state"][HEAD]["step"] == 2


def test_weights_alone_in_half_precision_get_the_state_of_a_new_optimizer(answers: dict, folder: Path) -> None:
    dcp_to_torch_save(folder / "tied, adam" / "torch", folder / "whole.pt")
    halves = {name: values.bfloat16() for name, values in torch.load(folder / "whole.pt")["model"].items()}
    torch.save({"model": halves}, folder / "weights.pt")
    torch_save_to_dcp(folder / "weights.pt", folder / "weights")
    state = to_worker(folder / "weights", folder / "new", training("tied, adam"))
    assert (state.iteration, state.updates) == (0, 0)
    dcp_to_torch_save(folder / "new", folder / "new.pt")
    stored = torch.load(folder / "new.pt")
    assert {values.dtype for values in stored.values()} == {torch.float32}
    assert torch.equal(stored["weights/token_embedding"], halves[EMBEDDING].float())
    assert not stored["mean/token_embedding"].any()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"layers": 5}, "model.layers.5.first_norm_weight is not in the checkpoint, but the model has it"),
        ({"layers": 3}, "model.layers.4.norm_weight is not in the checkpoint, but the model has it"),
        ({"vocabulary_size": 40}, "layers.0.tokens has shape (38, 32) in the checkpoint, but (40, 32) in the model"),
    ],
)
def test_checkpoint_of_another_model_is_refused(answers: dict, folder: Path, changes: dict, told: str) -> None:
    with pytest.raises(CheckpointError, match=r"^[^\n]*$") as refusal:
        to_worker(folder / "tied, adam" / "torch", folder / "refused", training("tied, adam", **changes))
    assert told in str(refusal.value)
    assert not (folder / "refused").exists()


def test_state_of_another_optimizer_is_refused(answers: dict, folder: Path) -> None:
    document = {"dtype": "float32", **CASES["untied, sgd"]["model"], "optimizer": "adam", "global_batch_size": 8}
    with pytest.raises(CheckpointError, match=r"optim.state.layers.0.tokens.exp_avg is not in the checkpoint"):
        to_worker(folder / "untied, sgd" / "torch", folder / "refused", documents.parse(document, Training))


def test_tensor_that_the_model_lacks_is_refused(answers: dict, folder: Path) -> None:
    dcp_to_torch_save(folder / "tied, adam" / "torch", folder / "lacking.pt")
    weights = torch.load(folder / "lacking.pt")["model"]
    torch.save({"model": {**weights, "layers.1.adapter": torch.ones(2)}}, folder / "more.pt")
    torch_save_to_dcp(folder / "more.pt", folder / "more")
    with pytest.raises(CheckpointError, match=r"model.layers.1.adapter is in the checkpoint, but not in the model"):
        to_worker(folder / "more", folder / "refused", training("tied, adam"))


def test_existing_and_missing_folders_are_refused_in_one_sentence(answers: dict, folder: Path) -> None:
    source = folder / "tied, adam" / "worker"
    with pytest.raises(CheckpointError, match="already exists; save each checkpoint to a folder of its own"):
        to_torch(source, folder / "tied, adam" / "torch")
    with pytest.raises(CheckpointError, match=r"not a checkpoint of torch.distributed.checkpoint: .*No such file"):
        to_worker(folder / "nowhere", folder / "refused", training("tied, adam"))


def test_command_converts_there_and_back(answers: dict, folder: Path) -> None:
    model, worker = folder / "model.yaml", folder / "tied, adam" / "worker"
    model.write_text(json.dumps(CASES["tied, adam"]["model"]), encoding="utf-8")
    there, back = folder / "by-command", folder / "back-by-command"
    told = runner.invoke(app, ["checkpoint", "convert", str(worker), str(there)])
    assert (told.exit_code, told.stdout) == (0, f"{there}: gpt after 2 iterations, for torch's trainers\n")
    told = runner.invoke(app, ["checkpoint", "convert", str(there), str(back), f"--model={model}"])
    assert (told.exit_code, told.stdout) == (0, f"{back}: gpt after 2 iterations, for the worker\n")
    assert (back / STATE_FILE).read_text(encoding="utf-8") == (worker / STATE_FILE).read_text(encoding="utf-8")
    for arguments, sentence in (
        ([there, folder / "other"], "not a checkpoint of the worker; if it is of torch's trainers, give --model"),
        ([worker, folder / "other", f"--model={model}"], "says what it trains; leave out --model and --iteration"),
        ([worker, there], "already exists; save each checkpoint to a folder of its own"),
    ):
        told = runner.invoke(app, ["checkpoint", "convert", *map(str, arguments)])
        assert (told.exit_code, told.stderr.count("\n")) == (2, 1)
        assert sentence in told.stderr
