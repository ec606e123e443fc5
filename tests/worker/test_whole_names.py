"""Checkpoints of a whole module that was cut into layers have its own names, so that it loads them as it is."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import save as dcp_save
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from trainwright.model import Model
from trainwright.training import Training
from trainwright_worker.checkpoint_conversion import to_torch, to_worker
from trainwright_worker.executor.checkpoint import load, save
from trainwright_worker.executor.checkpoint_chunks import resident_tiles
from trainwright_worker.executor.executor import PlanExecutor
from trainwright_worker.model_description.description import describe
from trainwright_worker.module_cut.whole_module import WholeModule
from trainwright_worker.module_cut.written_layers import write_layers

pytestmark = [pytest.mark.torch_processes, pytest.mark.timeout(300)]

ORACLES = Path(__file__).with_name("oracles")
MODELS = {
    "diffusion_transformer": "blocks.1.attention.in_proj_weight",
    "tied_decoder": "words.weight",
    "torchvision_resnet": "layer3.0.bn1.running_mean",
    "numbered": "1.0.weight",
}
UNUSED = {"numbered": ["pooled.weight", "pooled.bias"]}
NUMBERED = '''
"""A module without names of its own: its parts have numbers, as layers have; a table that all blocks read is saved."""
import torch
from torch import nn
from own_models import WIDTH

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.add_module("0", nn.Linear(WIDTH, WIDTH))
    def forward(self, x, table):
        return x + self.get_submodule("0")(x * table)

class Numbered(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.arange(1.0, WIDTH + 1) / WIDTH)
        self.base = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        for number in range(3):
            self.add_module(str(number), Block())
        self.pooled = nn.Linear(WIDTH, 1)
    def forward(self, x):
        for number in range(3):
            x = self.get_submodule(str(number))(x * self.base.to(x.dtype), self.table.to(x.dtype))
        return x

def build():
    return Numbered()

def loss(output, targets):
    return (output - targets).square().mean(1)

def rows(*, seed, iteration, first, count):
    numbers = torch.arange(first, first + count)[:, None] + seed + iteration
    return {"x": (numbers * torch.arange(1.0, WIDTH + 1)).sin(), "targets": (numbers + torch.zeros(WIDTH)).cos()}
'''


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, WholeModule]]:
    """Whole modules whose layers were written beside them."""
    folder = tmp_path_factory.mktemp("wholes")
    for file in (*ORACLES.glob("whole_modules/*.py"), ORACLES / "own_models.py", ORACLES / "outside_models.py"):
        shutil.copy(file, folder)
    (folder / "numbered.py").write_text(NUMBERED, encoding="utf-8")
    before, path = set(sys.modules), list(sys.path)
    wholes, notes = {}, list[str]()
    for name in MODELS:
        write_layers(f"{folder / name}.py:build", None, notes.append)
        wholes[name] = WholeModule.load(f"{folder / name}.py:build")
    assert "not used by the forward, so not trained and in no checkpoint: pooled.bias, pooled.weight" in notes
    yield wholes
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@cache
def described(name: str):
    return describe(f"{name}_layers:layers", check_seconds=0, dtypes=[torch.float32])


@torch.no_grad()
def loss(whole: WholeModule, module: nn.Module, iteration: int) -> float:
    """Return the mean loss of two micro-batches of four rows, as the executor's plan has them."""
    batches = [whole.rows(seed=0, iteration=iteration, first=first, count=4) for first in (0, 4)]
    return sum(float(whole.losses(module, rows).mean()) for rows in batches) / 2


def assert_equal_states(one: PlanExecutor, other: PlanExecutor) -> None:
    for own, loaded in zip(resident_tiles(one), resident_tiles(other), strict=True):
        assert own.name == loaded.name
        assert torch.equal(own.values, loaded.values), own.name


@pytest.mark.parametrize("name", MODELS)
def test_the_users_module_loads_what_was_trained(executor, wholes, tmp_path: Path, name: str) -> None:
    one = executor(Model.of(described(name)))
    one.run_iteration(one.make_batch(0))
    save(one, tmp_path / "saved", 1)
    to_torch(tmp_path / "saved", tmp_path / "there")
    dcp_to_torch_save(tmp_path / "there", tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt")
    module = wholes[name].build()
    assert MODELS[name] in state["model"]
    missing, unexpected = module.load_state_dict(state["model"], strict=False)
    assert not unexpected
    assert missing == UNUSED.get(name, [])
    named = module.named_parameters(remove_duplicate=False)
    assert set(state["optim"]["state"]) == {name for name, weight in named if weight.requires_grad} - {*missing}
    to_worker(tmp_path / "there", tmp_path / "back", Training(1, custom=described(name), optimizer="sgd"), iteration=1)
    again = executor(Model.of(described(name)))
    assert load(again, tmp_path / "back") == 1
    assert_equal_states(one, again)
    assert one.run_iteration(one.make_batch(1)) == pytest.approx(loss(wholes[name], module, 1), rel=1e-5)


@pytest.mark.parametrize("name", ["diffusion_transformer", "torchvision_resnet", "numbered"])
def test_training_starts_from_the_users_own_weights(executor, wholes, tmp_path: Path, name: str) -> None:
    torch.manual_seed(5)
    module = wholes[name].build()
    dcp_save({"model": module.state_dict()}, checkpoint_id=tmp_path / "pretrained", no_dist=True)
    to_worker(tmp_path / "pretrained", tmp_path / "start", Training(1, custom=described(name), optimizer="sgd"))
    one = executor(Model.of(described(name)))
    load(one, tmp_path / "start")
    assert one.run_iteration(one.make_batch(0)) == pytest.approx(loss(wholes[name], module, 0), rel=1e-5)
