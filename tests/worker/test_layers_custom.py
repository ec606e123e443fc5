"""User models: they are loaded from an entry point with the user's layers; what is wrong is stated in one sentence."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import nn
from torchvision.models import resnet18
from transformers import DistilBertModel

from trainwright_worker.layers.custom import CustomModel, custom_layers
from trainwright_worker.layers.tensor_parallel import TensorShard

ROWS = 4


def made(layers, *, seed: int = 1) -> list:
    return [layers.make(layer, seed=seed, shard=TensorShard(), shared={}) for layer in range(len(layers))]


def run(layers, modules: list) -> torch.Tensor:
    boundary = ()
    for place, module in enumerate(modules):
        data = layers.rows(module.reads, seed=1, iteration=0, first=0, count=ROWS)
        output = module(boundary, data)
        boundary, loss = output.boundary, output.loss
        assert tuple(value.shape[1:] for value in boundary) == layers.boundary(place)
    return loss


def test_torchvisions_resnet_cut_into_layers_has_its_loss_and_gradients() -> None:
    layers = custom_layers("outside_models:resnet18")
    modules = made(layers)
    theirs = resnet18(num_classes=10)
    blocks = [*theirs.layer1, *theirs.layer2, *theirs.layer3, *theirs.layer4]
    theirs.conv1.load_state_dict(modules[0].module[0].state_dict())
    for block, layer in zip(blocks, modules[1:-1], strict=True):
        block.load_state_dict(layer.module.state_dict())
    theirs.fc.load_state_dict(modules[-1].module.fc.state_dict())
    rows = layers.rows(("images", "targets"), seed=1, iteration=0, first=0, count=ROWS)
    loss = run(layers, modules)
    expected = nn.functional.cross_entropy(theirs(rows["images"]), rows["targets"])
    torch.testing.assert_close(loss / ROWS, expected)
    (loss / ROWS).backward()
    expected.backward()
    torch.testing.assert_close(modules[7].module.conv1.weight.grad, blocks[6].conv1.weight.grad, rtol=1e-3, atol=1e-6)
    assert layers.boundary(0) == ((64, 16, 16),)
    assert layers.boundary(8) == ((512, 2, 2),)
    assert layers.boundary(9) == ()


def test_layers_may_have_several_inputs_and_outputs() -> None:
    """Hugging Face's DistilBERT passes its mask from layer to layer next to the hidden states."""
    layers = custom_layers("outside_models:distilbert")
    modules = made(layers)
    import outside_models

    theirs = DistilBertModel(outside_models.SMALL_BERT)
    theirs.embeddings.load_state_dict(modules[0].module.inner.state_dict())
    for block, layer in zip(theirs.transformer.layer, modules[1:-1], strict=True):
        block.load_state_dict(layer.module.inner.state_dict())
    rows = layers.rows(("tokens", "mask", "targets"), seed=1, iteration=0, first=0, count=ROWS)
    hidden = theirs(input_ids=rows["tokens"], attention_mask=rows["mask"]).last_hidden_state
    logits = modules[-1].module.classes(hidden[:, 0])
    torch.testing.assert_close(run(layers, modules) / ROWS, nn.functional.cross_entropy(logits, rows["targets"]))
    assert layers.boundary(1) == ((12, 32), (12,))
    assert modules[0].reads == ("tokens", "mask")


def test_custom_weights_depend_only_on_seed_and_leave_torchs_generator_alone() -> None:
    layers = custom_layers("outside_models:distilbert")
    torch.manual_seed(5)
    expected = torch.randn(3)
    torch.manual_seed(5)
    first = made(layers)
    assert torch.equal(torch.randn(3), expected)
    torch.manual_seed(6)
    again, other = made(layers), made(layers, seed=2)

    def weight(module) -> torch.Tensor:
        return module.module.inner.ffn.lin1.weight

    assert torch.equal(weight(first[2]), weight(again[2]))
    assert not torch.equal(weight(first[2]), weight(other[2]))
    assert not torch.equal(weight(first[1]), weight(first[2]))


def rows(seed: int, iteration: int, first: int, count: int) -> dict[str, torch.Tensor]:
    return {"inputs": torch.ones(count, 4), "targets": torch.zeros(count, 2)}


class Distance(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, made: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.scale * (made - targets).square().mean(1)


class ByValue(nn.Module):
    """Module that needs its input's values, which the meta device does not have."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs[:, : int(inputs.sum().item() / len(inputs)) // 2]


@pytest.fixture
def entry(monkeypatch):
    """Return a factory of entry points that return a given result."""

    def of(result) -> str:
        module = ModuleType("users_module")
        module.model = lambda: result
        monkeypatch.setitem(sys.modules, "users_module", module)
        return "users_module:model"

    return of


def test_a_layer_that_needs_values_is_tried_on_the_cpu(entry) -> None:
    layers = custom_layers(entry(CustomModel([ByValue, Distance], rows)))
    assert layers.boundary(0) == ((2,),)


def test_model_of_one_layer_is_accepted(entry) -> None:
    def pairs(seed: int, iteration: int, first: int, count: int) -> dict[str, torch.Tensor]:
        return {"inputs": torch.ones(count, 2), "targets": torch.zeros(count, 2)}

    layers = custom_layers(entry(CustomModel([Distance], pairs)))
    (only,) = made(layers)
    assert only.reads == ("inputs", "targets")
    assert run(layers, [only]) == ROWS


class In(nn.Module):
    """Layer that hands on its input in formats."""

    def __init__(self, *formats: torch.dtype) -> None:
        super().__init__()
        self.formats = formats

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(map(inputs.to, self.formats))


def linear() -> nn.Module:
    return nn.Linear(4, 2)


EXISTING = nn.Linear(4, 2)


def unseeded(count: int, **which: int) -> dict[str, torch.Tensor]:
    return {"inputs": torch.rand(count, 4), "targets": torch.zeros(count, 2)}


def one_for_all(seed: int, count: int, **which: int) -> dict[str, torch.Tensor]:
    """Return seeded rows that wrongly depend on which rows are requested together."""
    made = torch.Generator().manual_seed(seed)
    return {"inputs": torch.rand(count, 4, generator=made), "targets": torch.zeros(count, 2)}


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("not a model", "model.. must return a CustomModel, got str"),
        (CustomModel([], rows), "layers must be a list of at least one function"),
        (CustomModel([linear(), Distance], rows), r"layer 0 is a module \(Linear\).* lambda: Linear"),
        (CustomModel([linear, 3], rows), "layer 1 must be a function that makes a module, got 3"),
        (CustomModel([linear, lambda: 3], rows), "layer 1 must be made as a torch module, got int"),
        (CustomModel([nn.Linear, Distance], rows), "layer 0 cannot be made: TypeError"),
        (
            CustomModel([lambda: nn.Linear(5, 2), Distance], rows),
            r"layer 0 \(Linear\) fails on float32 \(2, 4\): RuntimeError",
        ),
        (CustomModel([linear, lambda: nn.Flatten(0), Distance], rows), r"layer 1 must return .*float32 \(4,\)"),
        (
            CustomModel([lambda: In(torch.float32, torch.int16), Distance], rows),
            r"layer 0 must return tensors of floats, bool, int32 or int64 .*, got int16 \(2, 4\)",
        ),
        (
            CustomModel([lambda: In(torch.int64), Distance], rows),
            "layer 0 hands on integers alone, which have no gradients; make it and the next one a single layer",
        ),
        (
            CustomModel([nn.Identity, linear, nn.PairwiseDistance, Distance], rows),
            r"layer 2 \(PairwiseDistance\) fails",
        ),
        (CustomModel([linear, nn.MSELoss], rows), r"each row's mean loss, .* got float32 \(\)"),
        (CustomModel([linear, Distance], lambda **which: {"inputs": torch.ones(2, 4)}), "no field 'targets'"),
        (
            CustomModel([linear, Distance], rows, keep_float32=["running_mean"]),
            r"keep_float32 names 'running_mean', but the float fields of rows\(\) are inputs, targets",
        ),
        (CustomModel([linear, Distance], lambda **which: torch.ones(2, 4)), "must return a dict of tensors"),
        (CustomModel([linear, Distance], lambda **which: {"targets": torch.ones(3)}), "first dimension is the count 2"),
        (CustomModel([linear, Distance], lambda count: {}), r"rows\(\) fails for 2 rows: TypeError"),
        (
            CustomModel([linear, Distance], unseeded),
            "'inputs' of rows.. has other values for row 1 when that is asked for",
        ),
        (CustomModel([linear, Distance], one_for_all), "'inputs' of rows.. has other values for row 1"),
        (CustomModel([lambda: EXISTING, Distance], rows), "layer 0 gives the same weights whenever it is made"),
        (
            CustomModel([lambda: nn.Sequential(nn.Identity(), EXISTING), Distance], rows),
            "layer 0 gives the same weights",
        ),
    ],
)
def test_invalid_model_is_refused_with_its_fault(entry, model, told: str) -> None:
    with pytest.raises(ValueError, match=told) as failure:
        custom_layers(entry(model))
    assert str(failure.value).startswith("entry point users_module:model: ")
    assert "\n" not in str(failure.value)


def test_missing_entry_point_is_refused(monkeypatch, tmp_path) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "breaks_on_import.py").write_text("1 / 0\n")
    (tmp_path / "breaks_when_called.py").write_text("def model():\n    1 / 0\n")
    (tmp_path / "lacks_a_library.py").write_text("import nowhere.deep\n")
    for entrypoint, told in (
        ("nowhere", "must be written package.module:function"),
        (":model", "must be written package.module:function"),
        ("nowhere.at_all:model", "no module nowhere; bring it into the worker's image or into a volume"),
        ("lacks_a_library:model", "lacks_a_library imports nowhere, which this worker has not; install that"),
        ("outside_models:vgg", "has no function vgg; change the name after the colon"),
        ("outside_models:SMALL_BERT", "has no function SMALL_BERT"),
        ("breaks_on_import:model", "importing breaks_on_import fails: ZeroDivisionError"),
        ("breaks_when_called:model", "model.. fails: ZeroDivisionError"),
    ):
        with pytest.raises(ValueError, match=told):
            custom_layers(entrypoint)
