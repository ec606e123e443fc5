"""Input that `tune` cannot use: one sentence on standard error, exit code 2, and nothing started."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from local_plan import PLAN
from typer.testing import CliRunner

from trainwright.cli import app
from trainwright_operator.local import loop

JOB = {"image": "i", "command": ["c"]}
FRAMEWORK = {**JOB, "stepTimeRegex": "s"}
SPECS = {
    "queue": ({"queueName": "q"}, "spec.queueName: only a cluster has that"),
    "framework": ({"trials": {"framework": FRAMEWORK}}, "spec.trials.framework: only a cluster has that"),
    "job": ({"apply": "Run", "job": JOB}, "spec.apply: Run hands the winner to a cluster"),
    "products": (
        {"devices": {"products": ["NVIDIA-X"]}},
        "none of this machine's devices can be used: its devices are cpu-",
    ),
}


def refusal_of(path: Path) -> str:
    """Return the sentence with which the command refuses."""
    shown = CliRunner().invoke(app, ["tune", str(path), "--cpu-devices", "1"])
    assert shown.exit_code == 2
    assert shown.stdout == ""
    (line,) = shown.stderr.splitlines()
    assert line.startswith("trainwright: ")
    assert not list(path.parent.rglob("gangs"))
    assert not list(path.parent.rglob("status.yaml"))
    return line


@pytest.mark.parametrize("name", SPECS)
def test_spec_of_a_cluster(plan_file: Callable[..., Path], name: str) -> None:
    spec, words = SPECS[name]
    assert words in refusal_of(plan_file(**spec))


def test_several_manifests(plan_file: Callable[..., Path]) -> None:
    path = plan_file()
    path.write_text(f"{yaml.safe_dump(PLAN)}---\n{yaml.safe_dump(PLAN)}")
    assert "holds 2 documents; tune takes one TrainingPlan at a time" in refusal_of(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    missing, binary = tmp_path / "none.yaml", tmp_path / "torch.pt"
    binary.write_bytes(b"\x80\x02\xff")
    assert refusal_of(missing) == f"trainwright: {missing}: cannot be read: No such file or directory"
    folder = tmp_path / "folder"
    folder.mkdir()
    assert refusal_of(folder) == f"trainwright: {folder}: cannot be read: Is a directory"
    assert refusal_of(binary) == f"trainwright: {binary}: not YAML: it is no text in UTF-8"


def test_missing_torch(plan_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop.importlib.util, "find_spec", lambda name: None if name == "torch" else object())
    assert "the package torch is not installed here; run `pip install" in refusal_of(plan_file())


def test_too_little_disk(plan_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_MIN_FREE_BYTES", 1 << 62)
    assert "MB are free there, and the measurements may take" in refusal_of(plan_file())


def test_state_of_another_version(plan_file: Callable[..., Path]) -> None:
    path = plan_file()
    folder = path.parent / ".trainwright" / "tiny"
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text(json.dumps({"version": 99}))
    assert "the state is of version 99, and this program reads 1" in refusal_of(path)


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_other_systems(plan_file: Callable[..., Path], platform: str) -> None:
    program = (
        "import sys, trainwright.cli.tune;"
        f"sys.platform = {platform!r}; sys.modules['fcntl'] = None; sys.argv[1:] = ['tune', {str(plan_file())!r}];"
        "trainwright.cli.app()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr == (
        f"trainwright: tune runs on Linux, since it counts what other programs take there; this is {platform}\n"
    )
    assert done.stdout == ""
