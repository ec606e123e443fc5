"""Weights that layers of a user's model share by name: trained as one process with tied weights, planned and saved once."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from gang_answers import answers_of
from own_models import Causal, NextWord
from plan_cases import runs_of
from random_plans import random_plan
from tied_models import ROWS, Wrapped
from torch.distributed.checkpoint import FileSystemReader

from trainwright import documents
from trainwright.accelerators.roofline import estimate_profiles
from trainwright.cluster import Accelerator, Cluster, Device, Link, Node
from trainwright.cost.context import CostContext
from trainwright.cost.estimate import Estimate, estimate_with_context
from trainwright.families import Custom, CustomKind, Gpt
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.runtime import Runtime
from trainwright.strategy import Sharding, Strategy
from trainwright.training import Training
from trainwright_worker.checkpoint_conversion import named_tensors, to_torch
from trainwright_worker.executor.checkpoint import save
from trainwright_worker.gang.errors import WorkerError
from trainwright_worker.layers.registry import make_family_layers
from trainwright_worker.model_description.description import describe
from trainwright_worker.synthetic_data import weight_generator

EQUIVALENCE, CHECKPOINT = (Path(__file__).with_name(f"{name}_gang.py") for name in ("equivalence", "checkpoint"))
MODELS = "tied", "tied_to_the_head", "of_three", "two_tables"
SEEDS = {
    "tied": (9, 17, 25, 27, 36, 38),
    "tied_to_the_head": (11, 17),
    "of_three": (9, 25, 27, 36),
    "two_tables": (11, 17, 36),
}


def family(name: str) -> Custom:
    return describe(f"tied_models:{name}", check_seconds=0)


def plan(name: str, seed: int) -> Plan:
    layers = {"of_three": 4}.get(name, 5)
    return random_plan(seed, layers=layers, tensor_degrees=(1,), devices=4)


def model(name: str) -> dict:
    return {"custom": documents.dump(Training(1, custom=family(name)))["custom"]}


def test_plans_have_both_ends_in_one_stage_and_in_several_with_uneven_replicas_sharding_and_recompute() -> None:
    """Seeds draw random plans."""
    plans = [documents.dump(plan(name, seed)) for name in MODELS for seed in SEEDS[name]]
    replicated = [run for one in plans for run in runs_of(one) if run["data"] > 1]
    assert {run["sharding"] for run in replicated} == {"none", "zero1", "zero2", "zero3"}
    assert any(run["recompute"] and run["sharding"] == "zero3" for run in replicated)
    assert any(len(set(run["rows"])) > 1 for run in replicated)
    assert {len(pipeline["stages"]) for one in plans for pipeline in one["pipelines"]} >= {1, 2, 3}
    assert {len(one["pipelines"]) for one in plans} == {1, 2, 3}


@pytest.mark.torch_processes
@pytest.mark.timeout(300)
def test_plans_train_shared_weights_as_one_process_does(tmp_path: Path) -> None:
    cases = [
        {"name": f"{name} {seed}", "plan": documents.dump(plan(name, seed)), "model": model(name), "steps": 3}
        for name in MODELS
        for seed in SEEDS[name]
    ]
    for name, answer in answers_of(EQUIVALENCE, tmp_path, cases, processes=4).items():
        assert answer["missing"] == [], name
        assert answer["loss_error"] < 1e-5, name
        assert answer["gradient_error"] < 1e-4, name
        assert answer["weight_error"] < 1e-4, name


@pytest.mark.torch_processes
@pytest.mark.timeout(300)
def test_training_continues_under_another_plan(tmp_path: Path) -> None:
    cases = [
        {
            "name": name, "model": model(name), "folder": str(tmp_path / name), "optimizer": "adam", "learning_rate": 0.01,
            "first": documents.dump(plan(name, first)), "second": documents.dump(plan(name, second)),
        }
        for name, first, second in (("tied", 17, 36), ("two_tables", 36, 25))
    ]  # fmt: skip
    for name, answer in answers_of(CHECKPOINT, tmp_path, cases, processes=4).items():
        assert answer["missing"] == [], name
        assert answer["difference"] == 0.0, name
        assert answer["loss_error"] < 1e-5, name


def test_one_plain_module_with_tied_weights_trains_the_same(executor) -> None:
    """The whole model in torch's own words: a sequence whose head has the table of its first layer."""
    made = []
    for layer, make in enumerate([Wrapped, *[partial(Causal, casts=True)] * 3, NextWord]):
        torch.manual_seed(weight_generator(0, f"layer {layer}").initial_seed())
        made.append(make())
    made[4].weight = made[0].words.weight
    optimizer = torch.optim.SGD(torch.nn.ModuleList(made).parameters(), lr=0.1, momentum=0.9)
    losses = []
    for iteration in range(3):
        rows = ROWS(seed=0, iteration=iteration, first=0, count=8)
        hidden = rows["tokens"]
        for module in made[:4]:
            hidden = module(hidden)
        loss = made[4](hidden, rows["targets"]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    one = executor(Model.of(family("tied")), recompute=True)
    assert [one.run_iteration(one.make_batch(number)) for number in range(3)] == pytest.approx(losses, rel=1e-5)


def test_a_checkpoint_holds_a_shared_weight_once_and_torchs_under_all_of_its_names(executor, tmp_path: Path) -> None:
    one = executor(Model.of(family("of_three")))
    save(one, tmp_path / "saved", 0)
    stored = FileSystemReader(tmp_path / "saved").read_metadata().state_dict_metadata
    names = {"0.words.weight", "2.words", "3.weight"}
    assert {name for name in stored if name.partition("/")[2] in names} == {
        "weights/0.words.weight",
        "momentum/0.words.weight",
    }
    to_torch(tmp_path / "saved", tmp_path / "torch")
    stored = FileSystemReader(tmp_path / "torch").read_metadata().state_dict_metadata
    assert {f"model.layers.{name}" for name in names} <= set(stored)


def test_a_weight_that_a_layer_has_twice_keeps_one_name(executor) -> None:
    tensors = {tensor.name: tensor.torch_names for tensor in named_tensors(Model.of(family("two_tables")))}
    assert tensors["1.first.weight"] == ("layers.1.first.weight", "layers.3.first.weight")
    assert not any(name.startswith("3.") for name in tensors if "bias" not in name)


def test_a_description_counts_a_shared_weight_once() -> None:
    described = Model.of(family("of_three"))
    modules = [Wrapped(), Causal(casts=True), Causal(casts=True), NextWord()]
    table = 32 * 16
    assert described.parameters == sum(one.numel() for made in modules for one in made.parameters()) - table
    assert described.owners == (0, 2, 3)
    assert {(kind.shared_weight, kind.shared_parameters) for kind in described.kinds} == {
        (None, 0),
        ("0.words.weight", table),
    }


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("unknown_weight", "shared_weights names 0.table.weight, but the weights of layer 0 are places, words.weight; name one"),
        ("unknown_layer", "shared_weights names layer 9, but the layers are 0 … 4; name one"),
        ("without_layer", "shared_weights names 'weight', but a weight is written LAYER.NAME"),
        ("other_shape", "4.bias is 0.words.weight, but the one has shape (32,) and the other (32, 16); give both the same"),
        ("chained", "4.weight is 1.inner.weight, which itself is 0.words.weight; name that for both"),
        ("two_of_one_layer", "layer 4 shares two weights with other layers, weight and bias, but a layer can share one; share"),
        ("within_a_layer", "1.inner.weight is 1.outer.weight of the same layer; assign one to the other in that"),
        ("a_list", 'shared_weights must be a dict such as shared_weights={"13.head.weight"'),
        ("by_closure", 'name weights that layers share, such as shared_weights={"13.head.weight"'),
    ],
)  # fmt: skip
def test_weights_that_cannot_be_shared_are_refused_in_one_sentence(name: str, told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)) as refusal:
        family(name)
    assert str(refusal.value).startswith(f"entry point tied_models:{name}: ")
    assert "\n" not in str(refusal.value)


def test_a_model_that_shares_other_weights_than_described_is_refused() -> None:
    other = replace(family("tied"), entrypoint="tied_models:tied_to_the_head")
    told = "layer 0 .Wrapped. shares 4.weight of 512 values, not 0.words.weight of 512 values"
    with pytest.raises(WorkerError, match=told):
        make_family_layers(Model.of(other))


@pytest.mark.parametrize(("name", "size"), [(None, 3), ("0.words", 0), ("0.words", 9)])
def test_a_description_whose_shared_weight_has_no_such_size_is_refused(name: str | None, size: int) -> None:
    with pytest.raises(ValueError, match="shared_parameters of Wrapped must be those of shared_weight"):
        CustomKind("Wrapped", 8, 0.0, 1, 0.0, shared_weight=name, shared_parameters=size)


def test_half_formats_train_shared_weights(executor) -> None:
    one = executor(Model.of(family("tied"), Dtype.BFLOAT16), recompute=True)
    first, *_, last = (one.run_iteration(one.make_batch(0)) for _ in range(5))
    assert last < first


NODES = tuple(Node(f"node-{number}", "A100-40", 1) for number in range(4))
PAIRS = [(one.name, other.name) for one in NODES for other in NODES if one != other]
CLUSTER = Cluster((Accelerator("A100-40", 40 * 10**9),), NODES, tuple(Link(*pair, 1e-5, 1e10) for pair in PAIRS))
LAYERS = 26
RUNS = {
    "both ends of a pipeline": (
        LayerRun(0, 13, Strategy(1, 2), (1, 1)),
        LayerRun(13, 13, Strategy(1, 2), (1, 1)),
    ),
    "one stage": (LayerRun(0, LAYERS, Strategy(1, 4, sharding=Sharding.ZERO2), (1, 1, 1, 1)),),
    "sharded weights": (LayerRun(0, LAYERS, Strategy(1, 4, sharding=Sharding.ZERO3, recompute=True), (1, 1, 1, 1)),),
}


@pytest.fixture(scope="module")
def own_and_family() -> tuple[Model, Model]:
    """Return GPT-2 medium, tied, as a user writes it and as a family."""
    sizes = {"layers": 24, "hidden_size": 1024, "heads": 16, "sequence_length": 1024, "vocabulary_size": 50_304}
    own = describe("own_gpt:medium_tied", check_seconds=0)
    return Model.of(own), Model.of(Gpt(**sizes))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", RUNS)
def test_a_tied_gpt_is_priced_as_the_family_is(own_and_family: tuple[Model, Model], name: str) -> None:
    devices, stages = [Device(node.name, 0) for node in NODES], []
    for run in RUNS[name]:
        stages.append(Stage(tuple(devices[: run.strategy.data]), (run,)))
        devices = devices[run.strategy.data :]
    rows = sum(RUNS[name][0].rows)
    planned = Plan(LAYERS, 4 * rows, (Pipeline(4, rows, tuple(stages)),))

    def priced(one: Model) -> Estimate:
        profiles = estimate_profiles(one, ["A100-40"], tensor_degrees=[1], rows=[1])
        return estimate_with_context(planned, CostContext(one, CLUSTER, profiles, "adam", Runtime()))

    own, family_of_gpt = map(priced, own_and_family)
    assert own.iteration_seconds == pytest.approx(family_of_gpt.iteration_seconds, rel=0.05)
    assert own.breakdown.shared_weight_sync_seconds == pytest.approx(
        family_of_gpt.breakdown.shared_weight_sync_seconds, rel=1e-6
    )
    for parts, wanted in zip(own.memory_parts, family_of_gpt.memory_parts, strict=True):
        assert parts.weights_bytes == wanted.weights_bytes
        assert parts.gradients_bytes == wanted.gradients_bytes
        assert parts.optimizer_bytes == wanted.optimizer_bytes


def test_only_those_of_equal_layers_that_share_a_weight_are_described_so() -> None:
    described = Model.of(family("two_of_three_blocks"))
    names = [described.kind_of(layer).shared_weight for layer in range(5)]
    assert names == [None, "1.first.weight", None, "1.first.weight", None]
