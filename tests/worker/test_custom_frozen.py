"""Weights of user models that are not trained: no gradients, no state, and training equal to that of one process."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import two_device_plans
from gang_answers import answers_of
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from trainwright import documents
from trainwright.families import Custom
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.strategy import Sharding
from trainwright.training import Training
from trainwright.worker_api import FailureReason, ProfilingTask
from trainwright_worker.checkpoint_conversion import to_torch, to_worker
from trainwright_worker.executor.checkpoint import load, save
from trainwright_worker.executor.checkpoint_chunks import CheckpointError, resident_tiles
from trainwright_worker.gang.errors import WorkerError
from trainwright_worker.layers.custom import custom_layers
from trainwright_worker.layers.registry import make_family_layers
from trainwright_worker.layers.tensor_parallel import TensorShard
from trainwright_worker.model_description.description import describe

pytestmark = [
    pytest.mark.torch_processes,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]

EQUIVALENCE, CHECKPOINT = (Path(__file__).with_name(f"{program}_gang.py") for program in ("equivalence", "checkpoint"))
MODELS = "middle", "encoder", "low_rank", "scaled", "tied"
LAYERS, ROWS, MICRO_BATCHES = 6, 4, 3
replicas = partial(two_device_plans.replicas, LAYERS, (1, 3), MICRO_BATCHES)
stages = partial(two_device_plans.stages, LAYERS, rows=ROWS, micro_batches=MICRO_BATCHES)
PLANS = {
    "replicas": replicas(),
    "zero1": replicas(sharding=Sharding.ZERO1),
    "zero2, recompute": replicas(sharding=Sharding.ZERO2, recompute=True),
    "zero3": replicas(sharding=Sharding.ZERO3),
    "zero3, kept": replicas(sharding=Sharding.ZERO3, keep_gathered_weights=True, recompute=True),
    "stages of 2 and 4": stages(2, recompute=True),
    "stages of 4 and 2": stages(4),
    "pipelines": two_device_plans.pipelines(LAYERS, ROWS, (2, 1)),
}


def described(name: str) -> Custom:
    return describe(f"frozen_models:{name}", check_seconds=0)


def document(name: str, **fields) -> dict:
    return {"custom": documents.dump(Training(1, custom=described(name)))["custom"], **fields}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    models = {name: document(name) for name in MODELS}
    cases = [
        {"name": f"{name}, {plan}", "model": model, "plan": documents.dump(made), "steps": 3}
        for name, model in models.items()
        for plan, made in PLANS.items()
    ]
    cases += [
        {
            "name": f"low_rank in bfloat16, {plan}", "model": {**models["low_rank"], "dtype": "bfloat16"},
            "plan": documents.dump(PLANS[plan]), "optimizer": "adam", "learning_rate": 1e-3, "steps": 3,
        }
        for plan in ("zero1", "zero3")
    ]  # fmt: skip
    cases.append(
        {"name": "clipped", "model": models["low_rank"], "plan": documents.dump(PLANS["zero3"]), "clip_norm": 0.1}
    )
    return answers_of(EQUIVALENCE, tmp_path_factory.mktemp("trained"), cases, processes=2)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", MODELS)
def test_every_plan_trains_what_is_trained_and_leaves_the_rest(trained: dict, name: str, plan: str) -> None:
    answer = trained[f"{name}, {plan}"]
    assert answer["missing"] == []
    assert answer["frozen_error"] == 0.0
    assert answer["loss_error"] < 1e-6
    assert answer["gradient_error"] < 1e-5
    assert answer["weight_error"] < 1e-5
    assert answer["state_error"] < 1e-5


def test_the_norm_by_which_gradients_are_clipped_is_of_trained_weights(trained: dict) -> None:
    assert trained["clipped"]["weight_error"] < 1e-5


@pytest.mark.parametrize("plan", ["zero1", "zero3"])
def test_half_formats_keep_frozen_weights_in_that_format_alone(trained: dict, plan: str) -> None:
    answer = trained[f"low_rank in bfloat16, {plan}"]
    assert answer["frozen_error"] == 0.0
    assert answer["loss_error"] < 2e-2


def test_frozen_layers_before_trained_ones_store_nothing_for_a_backward(executor) -> None:
    made = executor(Model.of(described("encoder")))
    batch = made.make_batch(0)
    made.passes.forward(0, (), [run[0] for run in batch.rows])
    stored = made.passes._in_flight[0]
    assert [one.output is None for one in stored] == [True] * 3 + [False] * 3
    assert all(tensor.untyped_storage().nbytes() == 4 for one in stored[:3] for tensor in one.inputs)
    assert not any(tensor.requires_grad for tensor in stored[3].inputs)


def test_the_description_carries_what_is_not_trained() -> None:
    block, head, low_rank = 2 * 12 * 24 + 24 + 12, 12 * 5 + 5, 2 * 12 * 2
    encoder = Model.of(described("encoder"))
    assert [encoder.kind_of(layer).frozen_parameters for layer in range(LAYERS)] == [block] * 3 + [0] * 3
    assert [encoder.kind_of(layer).without_backward for layer in range(LAYERS)] == [True] * 3 + [False] * 3
    assert {encoder.kind_of(layer).backward_kernels > 0 for layer in range(3)} == {False}
    assert encoder.kind_of(0).saved_bytes_per_row(Dtype.FLOAT32) == 0.0
    adapted = Model.of(described("low_rank"))
    assert adapted.kind_of(0).frozen_parameters == block
    assert sum(adapted.kind(name).trained_parameters for name in adapted.layers) == 5 * low_rank + head
    assert not any(kind.without_backward for kind in adapted.kinds)


def test_describe_checks_the_values_of_frozen_layers() -> None:
    for name in ("encoder", "low_rank"):
        checks = describe(f"frozen_models:{name}").checks
        assert checks is not None
        assert (checks.left_out, checks.remarks) == ((), ())


def test_a_model_without_a_weight_to_train_is_refused() -> None:
    with pytest.raises(ValueError, match="no layer has a weight to train"):
        described("nothing")


def test_a_shared_weight_is_frozen_in_all_of_its_layers_or_in_none() -> None:
    with pytest.raises(
        ValueError, match=r"layer 0 does not train the weight 0.weight that it shares with layer 5, which"
    ):
        described("half_tied")
    layers = make_family_layers(Model.of(described("tied")))
    first, last = (layers.make(layer, seed=7, shard=TensorShard(), shared={}) for layer in (0, 5))
    assert torch.equal(first.get_parameter("module.weight"), last.get_parameter("module.table"))
    assert not last.shared_weights


def test_a_model_that_trains_other_weights_than_described_is_refused() -> None:
    found = described("low_rank")
    other = replace(found, kinds=(replace(found.kinds[0], frozen_parameters=0), *found.kinds[1:]))
    with pytest.raises(WorkerError, match=r"layer 0 \(LowRank\) holds 612 values that are not trained, not 0") as error:
        make_family_layers(Model.of(other))
    assert error.value.reason is FailureReason.ORDER_INVALID


def test_layers_are_profiled_as_they_train(worker, make) -> None:
    task = ProfilingTask(make.gang(1), Model.of(described("scaled")), 1, (2, 4), iterations=3)
    (report,) = worker.local(task).reports
    by_kind = {layer.kind: layer for layer in report.layers if layer.rows == 4}
    names = Model.of(described("scaled")).layers
    assert [by_kind[name].activation_bytes > 0 for name in names] == [False, False, True, True, True, True]
    assert by_kind[names[1]].parameter_bytes == by_kind[names[3]].parameter_bytes > 0


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("saved")
    changes = {
        "low_rank": ("zero3", "replicas", "float32", "float32"),
        "encoder": ("replicas", "zero3", "bfloat16", "bfloat16"),
        "middle": ("zero1", "stages of 2 and 4", "float32", "float32"),
    }
    cases = [
        {
            "name": name, "model": document(name), "folder": str(folder / name), "chunk_values": 50,
            "first": documents.dump(PLANS[first]), "second": documents.dump(PLANS[second]), "dtypes": dtypes,
        }
        for name, (first, second, *dtypes) in changes.items()
    ]  # fmt: skip
    return folder, answers_of(CHECKPOINT, folder, cases, processes=2)


@pytest.mark.parametrize("name", ["low_rank", "encoder", "middle"])
def test_a_checkpoint_holds_frozen_weights_without_a_state(saved: tuple[Path, dict], name: str) -> None:
    answer = saved[1][name]
    assert answer["missing"] == []
    assert answer["difference"] == 0.0
    assert answer["loss_error"] < (1e-5 if name != "encoder" else 2e-2)


CHANGES = {
    "whole, then low_rank": ("zero3", "stages of 2 and 4", "adam"),
    "low_rank, then whole": ("stages of 2 and 4", "zero3", "sgd"),
    "low_rank, then bases": ("replicas", "stages of 4 and 2", "adam"),
    "tied_trained, then tied": ("stages of 2 and 4", "zero3", "sgd"),
    "tied, then tied_trained": ("replicas", "stages of 4 and 2", "sgd"),
}


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("changed")
    cases = []
    for name, (first, second, optimizer) in CHANGES.items():
        before, later = (document(model) for model in name.split(", then "))
        cases.append(
            {
                "name": name, "model": before, "later_model": later, "folder": str(folder / name), "chunk_values": 50,
                "first": documents.dump(PLANS[first]), "second": documents.dump(PLANS[second]),
                "optimizer": optimizer, "learning_rate": 0.05 if optimizer == "sgd" else 1e-3,
            }
        )  # fmt: skip
    return answers_of(CHECKPOINT, folder, cases, processes=2)


@pytest.mark.parametrize("name", CHANGES)
def test_a_run_that_trains_other_weights_goes_on_from_a_checkpoint(changed: dict[str, dict], name: str) -> None:
    answer = changed[name]
    assert answer["difference"] == 0.0
    assert answer["loss_error"] < 1e-5
    assert max(answer["errors"].values()) < 1e-4


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("whole, then low_rank", r"states of 0.base.first.bias and 19 more are left out, since this run does not"),
        ("low_rank, then whole", r"states of 0.base.first.bias and 19 more start at zero, since the checkpoint's"),
        ("low_rank, then bases", r"the optimizer starts anew, .* did not train 0.base.* 9 more are left out"),
    ],
)
def test_a_sentence_says_what_becomes_of_states(executor, tmp_path: Path, change: str, sentence: str) -> None:
    optimizer = CHANGES[change][-1]
    one, other = (executor(Model.of(described(name)), optimizer=optimizer) for name in change.split(", then "))
    one.run_iteration(one.make_batch(0))
    save(one, tmp_path / "saved", 1)
    with pytest.warns(UserWarning, match=sentence):
        assert load(other, tmp_path / "saved") == 1
    assert other.optimizer.updates == (0 if change.endswith("bases") else 1)


def test_a_model_of_other_sizes_is_refused_by_its_layer(executor, tmp_path: Path) -> None:
    one = executor(Model.of(described("low_rank")))
    save(one, tmp_path / "saved", 0)
    with pytest.raises(
        CheckpointError, match=r"layer 0 holds 660 values in the checkpoint's model, but 612 in this run"
    ):
        load(executor(Model.of(described("encoder"))), tmp_path / "saved")


def test_a_checkpoint_in_bfloat16_loads_in_float32(executor, tmp_path: Path) -> None:
    half, whole = (executor(Model.of(described("low_rank"), dtype)) for dtype in (Dtype.BFLOAT16, Dtype.FLOAT32))
    half.run_iteration(half.make_batch(0))
    save(half, tmp_path / "half", 1)
    load(whole, tmp_path / "half")
    for own, other in zip(resident_tiles(half), resident_tiles(whole), strict=True):
        assert torch.equal(own.values.float(), other.values), own.name


def test_a_checkpoint_converts_to_the_users_names_and_back(executor, tmp_path: Path) -> None:
    one = executor(Model.of(described("low_rank")))
    one.run_iteration(one.make_batch(0))
    save(one, tmp_path / "saved", 1)
    to_torch(tmp_path / "saved", tmp_path / "there")
    dcp_to_torch_save(tmp_path / "there", tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt")
    modules = torch.nn.ModuleList(make() for make in custom_layers("frozen_models:low_rank").model.layers)
    modules.load_state_dict({name.removeprefix("layers."): value for name, value in state["model"].items()})
    trained = {f"layers.{name}" for name, parameter in modules.named_parameters() if parameter.requires_grad}
    assert set(state["optim"]["state"]) == trained
    to_worker(
        tmp_path / "there", tmp_path / "back", Training(1, custom=described("low_rank"), optimizer="sgd"), iteration=1
    )
    again = executor(Model.of(described("low_rank")))
    assert load(again, tmp_path / "back") == 1
    for own, other in zip(resident_tiles(one), resident_tiles(again), strict=True):
        assert torch.equal(own.values, other.values), own.name
