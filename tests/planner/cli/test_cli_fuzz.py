"""Commands answer or refuse any document in one sentence, never with a traceback."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from property_tests import examples
from quick_planner import quickly
from typer.testing import CliRunner, Result

from trainwright import documents
from trainwright.calibration import Trial, Trials
from trainwright.cli import app
from trainwright.runtime import Runtime
from trainwright.search import Problem, run
from trainwright.worker_api import TrialReport

runner = CliRunner()

MODEL = {
    "gpt": {"layers": 2, "hidden_size": 16, "heads": 2, "sequence_length": 4, "vocabulary_size": 10},
    "global_batch_size": 4,
}
PROBLEM_FILES = ("cluster", "model", "profiles", "runtime")
COMMANDS = (
    *((command, file) for command in ("plan", "compare", "explain") for file in PROBLEM_FILES),
    *((command, file) for command in ("estimate", "explain") for file in (*PROBLEM_FILES, "plan")),
    *(("calibrate", file) for file in ("trials", "cluster", "runtime")),
    *(("propose", file) for file in ("trials", "cluster", "profiles")),
    *(("trial", file) for file in ("report", "trials", "plan")),
    ("profiles merge", "profiles"),
    ("profiles estimate", "cluster"),
    ("profiles estimate", "model"),
    ("profiles import", "table"),
    ("profiles import", "model"),
)


@pytest.fixture(scope="module")
def good(make_problem: Callable[..., Problem]) -> dict[str, Any]:
    """Return one document of each kind as plain data; they match."""
    problem = make_problem(layers=2, heads=2, batch=4, hidden=16)
    plan = run("amp", problem, top=1)[0].plan
    return {
        "cluster": documents.dump(problem.cluster),
        "model": MODEL,
        "profiles": documents.dump(problem.profiles),
        "runtime": documents.dump(Runtime()),
        "plan": documents.dump(plan),
        "trials": documents.dump(Trials((Trial(plan, 1.0),))),
        "report": documents.dump(TrialReport((2.0,), (3.0,))),
        "table": {"1": {"1": {"0": [1.0, 1.0, 1.0]}}},
    }


@pytest.fixture(scope="module")
def folder(good: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("documents")
    for name, document in good.items():
        (found / f"{name}.json").write_text(json.dumps(document))
    return found


def call(folder: Path, command: str, file: str, content: bytes) -> Result:
    """Run the command with one document replaced by `content`."""
    (folder / "odd").write_bytes(content)
    path = {
        name: str(folder / ("odd" if name == file else f"{name}.json"))
        for name in (*PROBLEM_FILES, "plan", "trials", "report", "table")
    }
    problem = [f"--{name}={path[name]}" for name in PROBLEM_FILES]
    arguments = {
        "plan": [*quickly("plan"), *problem],
        "compare": ["compare", "megatron", *problem],
        "explain": [*quickly("explain"), *problem, *([f"--plan={path['plan']}"] if file == "plan" else [])],
        "estimate": ["estimate", *problem, f"--plan={path['plan']}"],
        "calibrate": ["calibrate", *problem, f"--trials={path['trials']}"],
        "trial": [
            *("trial", *problem, f"--plan={path['plan']}", f"--report={path['report']}"),
            *([f"--append={path['trials']}"] if file == "trials" else []),
        ],
        "propose": [*quickly("propose"), "--top=3", *problem, f"--trials={path['trials']}"],
        "profiles merge": ["profiles", "merge", path["profiles"], path["profiles"]],
        "profiles estimate": ["profiles", "estimate", f"--model={path['model']}", f"--cluster={path['cluster']}"],
        "profiles import": [
            *("profiles", "import", "--format=sailor", "--accelerator=Tesla-T4"),
            *(f"--model={path['model']}", path["table"]),
        ],
    }
    return runner.invoke(app, arguments[command])


def check(result: Result) -> None:
    """Check that the command answers, or refuses in one sentence."""
    assert result.exit_code in {0, 2, 3}, (result.output, result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    if result.exit_code:
        assert result.stderr.splitlines()[-1].startswith("trainwright: ")


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**20, 10**23, 10**400, -1, 0, 10**9, 2**53])
    | st.floats()
    | st.sampled_from([1e-300, 1e23, -1e23, 5e-324])
    | st.text(max_size=5)
)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.sampled_from(COMMANDS), content=st.binary(max_size=60) | anything.map(lambda d: json.dumps(d).encode()))
def test_any_text_as_a_document_is_refused_in_one_sentence(
    folder: Path, where: tuple[str, str], content: bytes
) -> None:
    check(call(folder, *where, content))


@examples(120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), where=st.sampled_from(COMMANDS), value=anything)
def test_valid_document_with_one_odd_value_is_read_or_refused(
    folder: Path, good: dict[str, Any], data: st.DataObject, where: tuple[str, str], value: Any
) -> None:
    document = json.loads(json.dumps(good[where[1]]))
    place = document
    while True:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = value
    check(call(folder, *where, json.dumps(document).encode()))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[" * 100_000,
        b"{" * 100_000,
        b"a: " * 5_000,
        b"- " * 5_000,
        b"\x00" * 64,
        b"9" * 100_000,
        b"x: &x [1]\ny: [*x, *x]",
        b"%YAML 9.9\n---\n",
        b"? " * 3_000,
        b"!!python/object/apply:os.system ['true']",
        b"\xef\xbb\xbf{}",
    ],
    ids=lambda content: repr(content[:12]),
)
@pytest.mark.parametrize("file", [*PROBLEM_FILES, "plan"])
def test_hostile_texts_are_refused_in_one_sentence(folder: Path, file: str, content: bytes) -> None:
    result = call(folder, "estimate", file, content)
    check(result)
    assert result.exit_code == 2 or (file == "runtime" and content.startswith(b"\xef"))


@pytest.mark.parametrize(
    ("field", "value"), [("layers", 10**9), ("layers", 10**12), ("hidden_size", 10**18), ("vocabulary_size", 10**23)]
)
def test_absurd_sizes_are_refused_quickly(folder: Path, good: dict[str, Any], field: str, value: int) -> None:
    model = {**good["model"], "gpt": {**good["model"]["gpt"], field: value}}
    result = call(folder, "plan", "model", json.dumps(model).encode())
    check(result)
    assert result.exit_code in {2, 3}
