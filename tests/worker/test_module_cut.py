"""Whole torch modules, cut into layers: they compute the same, and plans train them as one process does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import yaml
from gang_answers import answers_of

from trainwright import documents
from trainwright.cluster import Device
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.strategy import Sharding, Strategy
from trainwright.training import Training
from trainwright_worker.model_description.description import describe
from trainwright_worker.module_cut.equality import differences
from trainwright_worker.module_cut.whole_module import WholeModule
from trainwright_worker.module_cut.written_layers import write_layers

pytestmark = [pytest.mark.torch_processes, pytest.mark.timeout(400)]

WHOLE_MODULES = Path(__file__).with_name("oracles") / "whole_modules"
EQUIVALENCE = Path(__file__).with_name("equivalence_gang.py")
LAYERS = {
    "decoder": ["First", *["Block"] * 4, "Last"],
    "tied_decoder": ["First", *["Block"] * 4, "Last"],
    "unet": ["First", "Residual", "Residual2", "Residual3", "Residual4", "Residual5", "Last"],
    "two_towers": ["First", *["TransformerEncoderLayer"] * 2, "Between", *["TransformerEncoderLayer"] * 2, "Last"],
    "diffusion_transformer": ["First", *["Block"] * 3, "Last"],
    "convolution_attention_scan": ["First", *["Attention", "Recurrence"] * 2, "Last"],
    "speech": ["First", *["Recurrent"] * 3, "Last"],
}
EQUAL_LAYERS = {
    "decoder": 4,
    "tied_decoder": 4,
    "unet": 1,
    "two_towers": 2,  # of each tower
    "diffusion_transformer": 3,
    "convolution_attention_scan": 2,
    "speech": 3,
}
ROWS, MICRO_BATCHES = 4, 2
DEVICES = [Device("node-0", number) for number in range(3)]


class Written(NamedTuple):
    """Layers that were written, and what was said of them."""

    entrypoint: str
    path: Path
    notes: list[str]

    @property
    def model(self):
        return import_module(self.path.stem).layers()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    for file in (
        *WHOLE_MODULES.glob("*.py"),
        *(WHOLE_MODULES.with_name(name) for name in ("own_models.py", "outside_models.py")),
    ):
        shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def written(folder: Path) -> dict[str, Written]:
    models = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        for name in LAYERS:
            notes: list[str] = []
            entrypoint = write_layers(f"{folder / name}.py:build", None, notes.append)
            models[name] = Written(entrypoint, folder / f"{name}_layers.py", notes)
        over_the_batch = models["two_towers"].path  # as a user adds it, as the refusal says
        text = over_the_batch.read_text(encoding="utf-8")
        over_the_batch.write_text(
            text.replace("build=build,", "build=build,\n        whole_batch=True,"), encoding="utf-8"
        )
        sys.modules.pop(over_the_batch.stem)
        yield models


@pytest.mark.parametrize("name", LAYERS)
def test_repeated_blocks_become_layers_of_one_class(written: dict[str, Written], name: str) -> None:
    model = written[name].model
    with torch.device("meta"):
        whole = model.build()
        assert [type(make(whole)).__name__ for make in model.layers] == LAYERS[name]


@pytest.mark.parametrize("name", LAYERS)
def test_losses_and_gradients_are_those_of_the_whole_module(written: dict[str, Written], name: str) -> None:
    notes = written[name].notes
    assert [note.partition(":")[0] for note in notes[1:]] == ["1 row", "2 rows", "3 rows"]
    whole = WholeModule.load(f"{written[name].path.with_name(name)}.py:build")
    computed = list(differences(whole.build, whole.losses, written[name].model))
    assert [(one.rows, one.refusal) for one in computed] == [(1, ""), (2, ""), (3, "")]
    assert max(max(one.losses, one.gradients) for one in computed) < 1e-6


def test_another_model_is_not_equal(written: dict[str, Written]) -> None:
    whole = WholeModule.load(f"{written['unet'].path.with_name('unet')}.py:build")

    def doubled(module, rows):
        return 2 * whole.losses(module, rows)

    assert all(
        not one.is_equal and one.gradients == pytest.approx(0.5)
        for one in differences(whole.build, doubled, written["unet"].model)
    )


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("torchvision_resnet", "10 layers (First, 8 × BasicBlock, Last)"),
        ("hugging_face_bert", "5 layers (First, 3 × BertLayer, Last)"),
    ],
)
def test_models_of_other_libraries_are_cut_as_they_are(folder: Path, name: str, layers: str) -> None:
    """Their dropout draws the same numbers, and `write_layers` refuses what differs."""
    notes: list[str] = []
    write_layers(f"{folder / name}.py:build", None, notes.append)
    assert notes[0].endswith(layers)
    assert [note.partition(" of the layers differ by ")[0] for note in notes[1:]] == [
        "1 row: losses", "2 rows: losses", "3 rows: losses",
    ]  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_written_layers_pass_the_checks_of_a_description(written: dict[str, Written], name: str) -> None:
    described = describe(written[name].entrypoint)
    assert described.checks is not None
    assert described.checks.left_out == ()
    assert max(described.layers.count(kind) for kind in described.layers) == EQUAL_LAYERS[name]


def two_stages(layers: int, *, whole_batch: bool) -> Plan:
    """Return a plan of two stages, whose second has replicas of one and three rows unless one computes the whole batch."""
    first = layers // 2
    rows = (ROWS * MICRO_BATCHES,) if whole_batch else (1, 3)
    sharded = {} if whole_batch else {"sharding": Sharding.ZERO3, "recompute": True}
    runs = (
        LayerRun(0, first, Strategy(1, 1), (sum(rows),)),
        LayerRun(first, layers - first, Strategy(1, len(rows), **sharded), rows),
    )
    stages = Stage((DEVICES[0],), (runs[0],)), Stage(tuple(DEVICES[1 : 1 + len(rows)]), (runs[1],))
    micro_batches = 1 if whole_batch else MICRO_BATCHES
    return Plan(layers, micro_batches * sum(rows), (Pipeline(micro_batches, sum(rows), stages),))


@pytest.fixture(scope="module")
def trained(written: dict[str, Written], folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    cases = []
    for name, kinds in LAYERS.items():
        family = describe(written[name].entrypoint, check_seconds=0, dtypes=[torch.float32])
        plan = two_stages(len(kinds), whole_batch=name == "two_towers")
        model = {"custom": documents.dump(Training(1, custom=family))["custom"]}
        cases.append({"name": name, "model": model, "plan": documents.dump(plan), "steps": 3})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *sys.path]))
        return answers_of(EQUIVALENCE, tmp_path_factory.mktemp("trained"), cases, processes=3)


@pytest.mark.parametrize("name", LAYERS)
def test_two_stages_train_as_one_process_does(trained: dict[str, dict], name: str) -> None:
    answer = trained[name]
    assert answer["missing"] == []
    assert answer["loss_error"] < 1e-5
    assert answer["gradient_error"] < 1e-4
    assert answer["weight_error"] < 1e-4


def command(*arguments: object, folder: Path) -> subprocess.CompletedProcess[str]:
    run = [sys.executable, "-m", *map(str, arguments)]
    return subprocess.run(run, check=False, capture_output=True, text=True, cwd=folder)


def test_the_command_writes_layers_and_describes_them(tmp_path: Path) -> None:
    for file in (WHOLE_MODULES / "diffusion_transformer.py", WHOLE_MODULES.with_name("own_models.py")):
        shutil.copy(file, tmp_path)
    options = "--module", "diffusion_transformer.py:build", "--write", "mine.py", "--check-seconds", 0
    done = command("trainwright", "describe", *options, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "mine.py: 5 layers (First, 3 × Block, Last)" in done.stderr
    assert yaml.safe_load(done.stdout)["custom"]["entrypoint"] == "mine:layers"
    by_entry = command("trainwright", "describe", "mine:layers", "--check-seconds", 0, folder=tmp_path)
    former = command("trainwright_worker.describe", "mine:layers", "--check-seconds", 0, folder=tmp_path)
    assert by_entry.stdout == former.stdout == done.stdout
    again = command("trainwright", "describe", *options, folder=tmp_path)
    assert (again.returncode, again.stdout) == (2, "")
    assert "mine.py is there, and may hold changes of yours" in again.stderr


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ((), "give either an entry point package.module:function, or --module FILE.py:FUNCTION"),
        (("a:b", "--module", "c.py:d"), "give either"),
        (("a:b", "--write", "c.py"), "--write names the layers' file of --module"),
        (("--module", "missing.py:build"), "there is no file missing.py"),
        (("--module", "decoder"), "must be written file.py:function"),
        (("--module", "decoder.py:other"), "decoder.py has no function other()"),
    ],
)
def test_the_command_says_what_is_wrong_in_one_sentence(options: tuple[str, ...], sentence: str, folder: Path) -> None:
    done = command("trainwright", "describe", *options, folder=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1
