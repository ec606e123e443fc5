"""The command line without files: schemas, help, completion, closed pipes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from trainwright.cli import COMMANDS, app

runner = CliRunner()


@pytest.mark.parametrize("name", ["cluster", "model", "profiles", "plan", "runtime", "trials"])
def test_schema_prints_a_json_schema(name: str) -> None:
    result = runner.invoke(app, ["schema", name])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["additionalProperties"] is False


def test_closed_pipe_leaves_no_traceback() -> None:
    program = "from trainwright.cli import app; app(prog_name='trainwright')"
    with subprocess.Popen(
        [sys.executable, "-c", program, "schema", "plan"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert not process.stderr.read()


def test_help_loads_no_search() -> None:
    program = "import sys; from trainwright.cli import app; app(['--help'], standalone_mode=False); print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_help(name: str) -> None:
    result = runner.invoke(app, [name, "--help"])
    assert result.exit_code == 0, result.output
    assert name in runner.invoke(app, []).output


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("plan --planner ", "megatron"),
        ("estimate --cost-model ", "galvatron"),
        ("schema ", "runtime"),
        ("profiles import --format ", "sailor"),
        ("accelerators ", "Tesla-T4"),
    ],
)
def test_the_shell_completes_names(words: str, expected: str) -> None:
    typed = f"trainwright {words}"
    environment = {
        "_TRAINWRIGHT_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(typed.split())),
    }
    result = runner.invoke(app, [], prog_name="trainwright", env=environment)
    assert expected in result.stdout.split()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("plan --budget-seconds 5s", "'--budget-seconds': expected a number of seconds, got '5s'; write 5; see"),
        ("plan --top x", "'--top': expected a whole number, got 'x'; see"),
        ("plan --top 2.5", "'--top': expected a whole number, got '2.5'; see"),
        ("plan --tolerance 3%", "'--tolerance': expected a share below 1, got '3%'; write 0.03 for 3%; see"),
        ("propose --stop-below 1%", "'--stop-below': expected a "),
    ],
)
def test_wrong_value_of_an_option_is_told_with_what_to_write(options: str, told: str) -> None:
    result = runner.invoke(app, [*options.split(), "--cluster=cluster.json", "--model=model.yaml"])
    assert result.exit_code == 2
    assert f"trainwright: Invalid value for {told}" in result.stderr
