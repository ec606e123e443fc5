"""`trainwright cluster`: machines in words, nodes of Kubernetes, this machine, and one source at a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trainwright import documents
from trainwright.cli import app
from trainwright.cluster import Cluster
from trainwright.documents import DocumentError

ROOT = Path(__file__).resolve().parents[3]
NODES = ROOT / "deploy" / "examples" / "planner" / "nodes.json"
runner = CliRunner()


def test_machines_in_words_and_by_name_make_one_cluster() -> None:
    asked = ["cluster", "p3.8xlarge=1", "lab=2x4xT4/pcie", "--network", "10Gbit"]
    cluster = documents.loads(runner.invoke(app, asked).stdout, Cluster)
    assert [node.name for node in cluster.nodes] == ["p3.8xlarge-1", "lab-1", "lab-2"]
    assert cluster.link("lab-1", "lab-2").bandwidth_bytes_per_second == 1.25e9


@pytest.mark.parametrize("given", [[str(NODES)], ["-"]])
def test_nodes_are_read_from_a_file_or_standard_input(given: list[str]) -> None:
    text = NODES.read_text() if given == ["-"] else None
    result = runner.invoke(app, ["cluster", "--from", *given, "--network", "100Gbit/roce"], input=text)
    assert result.exit_code == 0, result.output
    cluster = documents.loads(result.stdout, Cluster)
    assert [(node.name, node.devices) for node in cluster.nodes] == [("a100-1", 8), ("a100-2", 8), ("t4-1", 4)]


@pytest.mark.parametrize("name", ["x\ny", "x\n", "x\ty", "x\u2028y", " ", "\u00a0"])
@pytest.mark.parametrize(("list_name", "whose"), [("nodes", "a node"), ("accelerators", "an accelerator")])
def test_names_that_take_no_line_of_text_are_refused(name: str, list_name: str, whose: str) -> None:
    fields = {
        "accelerators": [{"name": "T4", "memory_bytes": 1}],
        "nodes": [{"name": "a", "accelerator": "T4", "devices": 1}],
    }
    fields[list_name][0]["name"] = name
    with pytest.raises(DocumentError, match=f"{whose} needs a name.*, got '"):
        documents.parse(fields, Cluster)


def test_machine_in_words_needs_a_name_on_one_line() -> None:
    result = runner.invoke(app, ["cluster", "x\ny=4xT4"])
    assert result.exit_code == 2, result.output
    assert "a name on one line" in " ".join(result.output.split())


def test_nodes_that_are_left_out_are_named_on_standard_error(tmp_path: Path) -> None:
    listed = json.loads(NODES.read_text())
    listed["items"][1]["spec"]["unschedulable"] = True
    listed["items"][2]["metadata"]["labels"]["nvidia.com/gpu.product"] = "Abacus"
    file = tmp_path / "nodes.json"
    file.write_text(json.dumps(listed))
    result = runner.invoke(app, ["cluster", "--from", str(file), "--network", "10Gbit"])
    assert result.exit_code == 0, result.output
    assert "a100-1 is left out: it is cordoned" in result.stderr
    assert "Abacus has no data sheet" in result.stderr


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ([], "give machines, for example p3.8xlarge=3, or --from, or --discover"),
        (["--from=nodes.json", "--discover"], "give one of --from and --discover, not both"),
        (["p3.8xlarge=3", "--from=nodes.json"], "give one of machines and --from, not both"),
        (
            ["p3.8xlarge=3", "--from=nodes.json", "--discover"],
            "give one of machines, --from and --discover, not several",
        ),
        (["--from", "cluster.yaml"], "cluster.yaml: cannot be read"),
        (["--from", str(ROOT / "deploy" / "examples" / "planner" / "model.yaml")], "kubectl get nodes --output json"),
        (["--from", str(NODES)], "give the rate of the network, for example --network 25Gbit"),
        (["p3.8xlarge=1", "lab=4xT4"], "--network is missing"),
        (["lab=4xT4", "--network", "fast"], "expected the rate of a network"),
        (["lab=4xT5"], "no data sheet for accelerator 'T5'"),
        (["a=4xT4", "a=4xT4", "--network", "1Gbit"], "node a is given twice"),
    ],
)
def test_what_is_no_cluster_is_refused_in_a_sentence(options: list[str], refusal: str) -> None:
    result = runner.invoke(app, ["cluster", *options])
    assert result.exit_code == 2
    assert refusal in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_machine_without_gpus_says_what_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    result = runner.invoke(app, ["cluster", "--discover"])
    assert result.exit_code == 2
    assert "nvidia-smi shows no GPU" in result.stderr


def test_a_recorded_nvidia_smi_is_discovered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    rows = "".join(f"NVIDIA A40, 46068, 4, 550.54, GPU-{number}, [N/A]\n" for number in range(2))
    matrix = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV4\t0-31\nGPU1\tNV4\t X \t0-31\n"
    program.write_text(f'#!/bin/sh\nif [ "$1" = topo ]; then printf "{matrix}"; else printf "{rows}"; fi\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    result = runner.invoke(app, ["cluster", "--discover"])
    assert result.exit_code == 0, result.output
    (node,) = documents.loads(result.stdout, Cluster).nodes
    assert (node.accelerator, node.devices) == ("NVIDIA-A40", 2)
    assert node.inside is not None
    assert node.inside.bandwidth_bytes_per_second == pytest.approx(0.77 * 56.25e9)
