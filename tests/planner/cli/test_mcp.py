"""`trainwright mcp` with the SDK's own client over standard input and output (`make test-mcp` installs the SDK)."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from trainwright.cli import app

EXAMPLES = Path(__file__).resolve().parents[3] / "deploy" / "examples" / "planner"
CLUSTER, MODEL = str(EXAMPLES / "mixed-cluster.yaml"), str(EXAMPLES / "model.yaml")
CONFIG, ROWS = str(EXAMPLES / "config.json"), {"sequence_length": 256, "global_batch_size": 8}
FILES = {"cluster": CLUSTER, "model": MODEL}
DOCUMENTS = {name: yaml.safe_load(Path(file).read_text(encoding="utf-8")) for name, file in FILES.items()}
WORDS = "pp2 dp2 tp1 mb1"
KUBECTL = """#!/usr/bin/env python3
import json, sys
words = [word for word in sys.argv[1:] if not word.startswith("trainingplans")]
plan = {"metadata": {"name": "demo", "managedFields": [1]}, "status": {"phase": "Trying"}}
if "missing" in words:
    sys.exit("Error from server (NotFound): no such plan")
print(json.dumps(plan if "demo" in words else {"items": [plan], "words": words}))
"""


def command_line(*words: str) -> dict[str, Any]:
    """Return the JSON of a command."""
    return json.loads(CliRunner().invoke(app, [*words, "--output", "json"]).stdout)


def without_seconds(answer: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in answer.items() if key != "search_seconds"}


@pytest.fixture
def ask(tmp_path: Path):
    """Return a function that calls tools of one server: a folder of its own, a fake kubectl, the SDK's client."""
    pytest.importorskip("mcp", reason="the SDK is not installed here; `make test-mcp` runs these tests")
    from mcp import Client, StdioServerParameters, stdio_client

    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "kubectl").write_text(KUBECTL)
    (programs / "kubectl").chmod(0o755)
    environment = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    server = StdioServerParameters(
        command=sys.executable, args=["-m", "trainwright", "mcp"], env=environment, cwd=str(tmp_path)
    )

    def call(*calls: tuple[str, dict[str, Any]]) -> tuple[Sequence[Any], Sequence[Any]]:
        async def answers() -> tuple[Sequence[Any], Sequence[Any]]:
            async with Client(stdio_client(server)) as client:
                tools = (await client.list_tools()).tools
                return tools, [await client.call_tool(name, arguments) for name, arguments in calls]

        return asyncio.run(answers())

    return call


@pytest.mark.timeout(300)
def test_answers_are_those_of_the_command_line_and_nothing_is_written(ask, tmp_path: Path) -> None:
    plan = {"planner": "amp", "top": 2, "budget_seconds": 600}
    run = {"tokens": 1e9, "within": 30.0}
    tools, (found, estimated, explained, sized, exported) = ask(
        ("plan", {**FILES, **plan}),
        ("estimate", {"cluster": CLUSTER, "model": CONFIG, "plan": WORDS, **ROWS}),
        ("explain", {**FILES, "plan": WORDS, "against": "pp1 dp4 tp1 mb1"}),
        ("size", {"model": DOCUMENTS["model"], "accelerators": ["T4", "V100-16"], **run}),
        ("export", {**DOCUMENTS, "plan": WORDS, "to": "megatron"}),
    )
    assert {tool.name for tool in tools} == {"plan", "estimate", "explain", "size", "export", "plan_status"}
    assert all(tool.annotations.read_only_hint and tool.description for tool in tools)
    inputs = ["--cluster", CLUSTER, "--model", MODEL]
    listed = command_line("plan", *inputs, "--planner", "amp", "--top", "2")
    assert without_seconds(found.structured_content) == without_seconds(listed)
    rows = ["--sequence-length", "256", "--global-batch-size", "8"]
    of_config = ["--cluster", CLUSTER, "--model", CONFIG, *rows, "--plan", WORDS]
    assert estimated.structured_content == command_line("estimate", *of_config)
    against = ["--against", "pp1 dp4 tp1 mb1"]
    assert explained.structured_content == command_line("explain", *inputs, "--plan", WORDS, *against)
    needed = command_line("size", "--model", MODEL, "--accelerators", "T4,V100-16", "--tokens=1e9", "--within=30")
    assert sized.structured_content == needed
    written = command_line("export", WORDS, "--to", "megatron", *inputs)
    assert exported.structured_content["files"].keys() == written["files"].keys()
    assert exported.structured_content["plan"] == written["plan"]
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


@pytest.mark.timeout(300)
def test_refusals_are_the_commands_sentences_and_values_are_no_options(ask, tmp_path: Path) -> None:
    large = {**DOCUMENTS["model"], "global_batch_size": 10**6}
    _, answers = ask(
        ("plan", {**FILES, "planner": "swift"}),
        ("estimate", {**FILES, "plan": {"pipelines": 3}}),
        ("size", {"model": MODEL, "accelerators": ["T4", "Z9"]}),
        ("plan", {**FILES, "planner": f"amp --write-plan={tmp_path}/plan.json"}),
        ("export", {"plan": f"--into={tmp_path}", "to": "megatron", **FILES}),
        ("plan_status", {"name": "--raw=/api/v1/secrets"}),
        ("estimate", {"cluster": CLUSTER, "model": large, "plan": "pp1 dp1 tp1 mb1000000"}),
    )
    *refused, infeasible = answers
    assert all(answer.is_error for answer in refused)
    sentences = [answer.content[0].text for answer in refused]
    assert "swift" in sentences[0]
    assert "plan.json: " in sentences[1]
    assert "/tmp" not in sentences[1]
    assert "Z9" in sentences[2]
    assert "lower-case letters" in sentences[5]
    assert not infeasible.is_error
    assert infeasible.structured_content["feasible"] is False
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


def test_plans_of_a_cluster_are_read_by_kubectl(ask) -> None:
    _, (single, listed, missing) = ask(
        ("plan_status", {"name": "demo", "namespace": "team"}),
        ("plan_status", {"context": "kind"}),
        ("plan_status", {"name": "missing"}),
    )
    plan = {"metadata": {"name": "demo"}, "status": {"phase": "Trying"}}
    assert single.structured_content == plan
    assert listed.structured_content == {"items": [plan]}
    assert missing.is_error
    assert "there is no plan missing" in missing.content[0].text


def test_missing_sdk_is_refused_in_a_sentence() -> None:
    program = "import sys; sys.modules['mcp'] = None; sys.argv[1:] = ['mcp']; from trainwright.cli import app; app()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.strip() == (
        "trainwright: the package mcp is not installed here; install the Model Context Protocol's SDK with `pip install '.[mcp]'`"
    )
