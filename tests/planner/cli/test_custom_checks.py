"""`trainwright plan` of a user's model: what its description did not check is said beside the plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from trainwright.cli import app
from trainwright.families import Custom, CustomChecks, CustomKind
from trainwright.model import Model
from trainwright.report.unchecked import unchecked

KIND = {"name": "Block", "parameters": 1000, "forward_flops_per_row": 2e6, "output_elements_per_row": 64}


def plan_of(folder: Path, **fields: object) -> str:
    custom = {"entrypoint": "mine:model", "kinds": [{**KIND, "saved_elements_per_row": 100}], "layers": ["Block"] * 4}
    model = folder / "model.yaml"
    model.write_text(yaml.safe_dump({"custom": {**custom, **fields}, "global_batch_size": 8}), encoding="utf-8")
    cluster = folder / "cluster.yaml"
    runner = CliRunner()
    cluster.write_text(runner.invoke(app, ["cluster", "p3.8xlarge=1"]).stdout, encoding="utf-8")
    asked = ["plan", "--cluster", str(cluster), "--model", str(model), "--planner", "megatron"]
    done = runner.invoke(app, asked)
    return " ".join((done.stdout + done.stderr).split())


def test_plan_warns_of_a_description_without_checks_and_obeys_its_rows(tmp_path: Path) -> None:
    assert "The description of mine:model was not checked" in plan_of(tmp_path)
    assert "not checked" not in plan_of(tmp_path, checks={}, min_rows=2)
    assert "custom.min_rows asks every replica to compute 16 rows" in plan_of(tmp_path, checks={}, min_rows=16)
    left_out = {"left_out": ["values of Block: too large"], "unchecked_kinds": ["Block"]}
    told = plan_of(tmp_path, checks=left_out)
    assert "Not checked of mine:model: values of Block: too large. Gangs that profile the layers check" in told


@pytest.mark.parametrize(
    ("left_out", "told"),
    [
        (("values of Head: a GPU",), ("Not checked of mine:model: values of Head: a GPU.",)),
        (("values of Head: a GPU", "b", "c"), ("Not checked of mine:model: values of Head: a GPU, and 2 more.",)),
        ((), ()),
    ],
)
def test_what_was_left_out_is_named(left_out: tuple[str, ...], told: tuple[str, ...]) -> None:
    kind = CustomKind("Block", 1000, 2e6, 64, 100)
    family = Custom("mine:model", (kind,), ("Block",), checks=CustomChecks(left_out))
    assert unchecked(Model.of(family)).sentences == told
