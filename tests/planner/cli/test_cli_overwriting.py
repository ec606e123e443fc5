"""No command writes into a file that it reads, or into one file twice."""

from __future__ import annotations

import inspect
import os
import pty
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated, get_args, get_type_hints

import pytest
import typer
from typer.testing import CliRunner

from trainwright.cli import COMMANDS, app
from trainwright.cli.framework import command
from trainwright.cli.inputs.overwriting import WRITTEN

runner = CliRunner()

CASES = {
    "plan over its cluster": ["plan", "--cluster={a}", "--model={b}", "--write-plan={a}"],
    "plan over its model": ["plan", "--cluster={a}", "--model={b}", "--write-plan={b}"],
    "plan over the plan that runs": ["plan", "--cluster={a}", "--model={b}", "--keep={c}", "--write-plan={c}"],
    "propose over its trials": ["propose", "--cluster={a}", "--model={b}", "--trials={c}", "--write-plan={c}"],
    "propose over its candidates": ["propose", "--cluster={a}", "--model={b}", "--candidates={c}", "--write-plan={c}"],
    "calibrate over its trials": ["calibrate", "--cluster={a}", "--model={b}", "--trials={c}", "--write={c}"],
    "import over a table": ["profiles", "import", "{a}", "{c}", "--model={b}", "--format=amp", "--accelerator=x", "--write={c}"],
    "profiles over its model": ["profiles", "estimate", "--model={b}", "--accelerator=V100", "--write={b}"],
    "merge over the first": ["profiles", "merge", "{a}", "{b}", "--write={a}"],
    "trace over the report": ["trial", "--cluster={a}", "--model={b}", "--plan={c}", "--report={d}", "--trace={d}"],
    "trials over the plan": ["trial", "--cluster={a}", "--model={b}", "--plan={c}", "--report={d}", "--append={c}"],
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in "abcd":
        (tmp_path / name).write_text(f"what {name} holds\n")
    return tmp_path


def refused(arguments: list[str], folder: Path) -> str:
    result = runner.invoke(app, [word.format(**{name: folder / name for name in "abcdef"}) for word in arguments])
    assert result.exit_code == 2, result.output
    assert not result.stdout
    for name in "abcd":
        assert (folder / name).read_text() == f"what {name} holds\n"
    return result.stderr


@pytest.mark.parametrize("arguments", CASES.values(), ids=CASES)
def test_a_command_refuses_to_overwrite_a_file_that_it_reads(arguments: list[str], folder: Path) -> None:
    told = refused(arguments, folder)
    target, _, place = arguments[-1].partition("=")
    source = next((word.partition("=")[0] for word in arguments[:-1] if word.endswith(place)), "")
    named = {"import": "TABLE…", "merge": "PROFILES…"}.get(arguments[1], source)
    assert told == (
        f"trainwright: {target}: would overwrite the file that {named} reads, got {place.format(**_in(folder))}; "
        "write into another file\n"
    )


def _in(folder: Path) -> dict[str, Path]:
    return {name: folder / name for name in "abcdef"}


@pytest.mark.parametrize("link", ["symbolic", "hard", "folder", "relative"])
def test_an_input_is_recognised_through_links(link: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = folder / "e"
    if link == "symbolic":
        place.symlink_to(folder / "a")
    elif link == "hard":
        os.link(folder / "a", place)
    elif link == "folder":
        place.symlink_to(folder, target_is_directory=True)
        place /= "a"
    else:
        monkeypatch.chdir(folder)
        place = Path("a")
    told = refused(["plan", "--cluster={a}", "--model={b}", f"--write-plan={place}"], folder)
    assert f"--write-plan: would overwrite the file that --cluster reads, got {place}; " in told


@pytest.mark.parametrize("second", ["e", "f/../e"])
def test_outputs_of_one_command_need_different_files(second: str, folder: Path) -> None:
    (folder / "f").mkdir()
    inputs = ["trial", "--cluster={a}", "--model={b}", "--plan={c}", "--report={d}"]
    told = refused([*inputs, "--trace={e}", f"--append={folder / second}"], folder)
    assert f"--trace: writes into the same file as --append, got {folder / 'e'}; give each a file of its own" in told
    assert not (folder / "e").exists()


def test_terminal_device_may_be_read_and_written() -> None:
    reached: list[Path | None] = []
    program = typer.Typer()

    @program.command()
    @command
    def copy(
        source: Annotated[Path, typer.Option()], write: Annotated[Path | None, typer.Option(), WRITTEN] = None
    ) -> None:
        reached.append(write)

    leader, follower = pty.openpty()
    terminal = os.ttyname(follower)
    try:
        assert runner.invoke(program, ["--source", terminal, "--write", terminal]).exit_code == 0
    finally:
        os.close(leader)
        os.close(follower)
    assert reached == [Path(terminal)]


def _commands() -> dict[str, Callable[..., None]]:
    return {
        f"{module} {one.name or one.callback.__name__}": one.callback
        for module in dict.fromkeys(module for module, _ in COMMANDS.values())
        for one in import_module(f"trainwright.cli.{module}").app.registered_commands
        if one.callback is not None
    }


@pytest.mark.parametrize(("name", "function"), _commands().items(), ids=_commands())
def test_every_output_path_is_marked(name: str, function: Callable[..., None]) -> None:
    hints = get_type_hints(function, include_extras=True)
    for parameter in inspect.signature(function).parameters:
        is_file = parameter in {"trace", "append", "report"} or (parameter == "output" and name == "report report")
        writes = parameter.startswith("write") or is_file
        assert (WRITTEN in get_args(hints[parameter])) == writes, f"{name}: {parameter}"
