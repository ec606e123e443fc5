"""Plans in words, standard input, and figures that cannot be meant."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples
from typer.testing import CliRunner, Result

from trainwright import documents
from trainwright.accelerators import cluster_of
from trainwright.cli import app
from trainwright.cluster import Device
from trainwright.exports import shape_of
from trainwright.exports.plan_shorthand import plan_of_shorthand

MODEL = """
gpt: {layers: 4, hidden_size: 1024, heads: 8, sequence_length: 512, vocabulary_size: 8192}
global_batch_size: 32
dtype: float16
"""
DEVICES = tuple(Device(f"node-{number // 4}", number % 4) for number in range(8))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.yaml").write_text(MODEL)
    (tmp_path / "cluster.json").write_text(documents.dumps(cluster_of({"p3.8xlarge": 2})))
    return tmp_path


def call(folder: Path, command: str, *options: str, cluster: str | None = None, typed: str = "") -> Result:
    given_files = [f"--cluster={cluster or folder / 'cluster.json'}", f"--model={folder / 'model.yaml'}"]
    return CliRunner().invoke(app, [command, *given_files, *options], input=typed)


@given(
    pp=st.integers(1, 4),
    dp=st.integers(1, 4),
    tp=st.sampled_from([1, 2]),
    mb=st.integers(1, 3),
    recompute=st.booleans(),
)
@examples(100)
def test_shorthand_gives_the_plan_that_it_says(pp: int, dp: int, tp: int, mb: int, recompute: bool) -> None:
    devices = tuple(Device("node", slot) for slot in range(32))
    text = f"pp{pp} dp{dp} tp{tp} mb{mb} zero1{' recompute' * recompute}"
    plan = plan_of_shorthand(text, devices, 10, 36 * dp * mb)
    shape = shape_of(plan)
    assert shape is not None
    assert (len(shape.ends), shape.data, shape.tensor, shape.rows) == (pp, dp, tp, mb)
    assert shape.recomputed_blocks == (max(shape.blocks) if recompute else 0)
    assert max(shape.blocks) - min(shape.blocks) <= 1
    assert shape.devices == devices[: pp * dp * tp]


def test_shorthand_is_read_in_any_case(folder: Path) -> None:
    words = "PP2 DP2 TP2 mb1 ZeRO1 Recompute"
    assert plan_of_shorthand(words, DEVICES, 6, 32) == plan_of_shorthand(words.lower(), DEVICES, 6, 32)
    assert call(folder, "estimate", "--plan", words).exit_code == 0


def test_shorthand_takes_layers_by_stage() -> None:
    plan = plan_of_shorthand("pp2 [4 2] mb2", DEVICES, 6, 32)
    assert plan.summary() == "pp2 dp4 tp1 mb2×4 [4 2]"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pp2 dp2 xp2", "'xp2' is not understood"),
        ("pp2 pp2", "'pp2' is given twice; keep one"),
        ("pp2 pp4", "'pp2' and 'pp4' contradict; keep one"),
        ("pp2 zero1 zero3", "'zero1' and 'zero3' contradict; keep one"),
        ("pp2 gpipe 1f1b", "'gpipe' and '1f1b' contradict; keep one"),
        ("pp2 [4 2] [2 4]", "layers are given twice, as [4 2] and [2 4]; keep one"),
        ("pp1 mb0", "'mb0' must be at least mb1"),
        ("pp3 dp4", "needs 12 devices, the cluster has 8"),
        ("pp1 dp3", "do not divide the global batch of 32"),
        ("pp7 dp1", "7 stages for 4 blocks"),
        ("pp2 dp3 [4 4]", "[4 4] are 8 layers in 2 stages, but the model has 6, embedding and head included, for pp2"),
        ("pp3 [3 3]", "give 3 numbers of at least 1 that sum to 6"),
    ],
)
def test_shorthand_is_refused_in_one_sentence(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=r"^plan ") as refusal:
        plan_of_shorthand(text, DEVICES, 6, 32)
    assert words in str(refusal.value)


@pytest.mark.parametrize("command", ["estimate", "explain"])
def test_commands_take_a_plan_in_words(folder: Path, command: str) -> None:
    result = call(folder, command, "--plan", "pp2 dp2 tp2 mb1 zero1 recompute", "--output", "json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["predicted_seconds"] > 0


@pytest.mark.parametrize(
    ("words", "told"), [("pp0", "must be at least pp1"), ("pp2tp3", "is not understood"), ("PP-1", "is not understood")]
)
def test_wrong_degree_is_not_taken_for_a_file(folder: Path, words: str, told: str) -> None:
    result = call(folder, "estimate", "--plan", words)
    assert result.exit_code == 2
    assert f"{words.lower()!r} {told}" in result.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", "the plan is empty; give a file, or pp, dp, tp and mb with a number"),
        (" ", "the plan is empty; give a file, or pp, dp, tp and mb with a number"),
        ("[4 1] pp2 mb1", "[4 1] are 5 layers in 2 stages, but the model has 6"),
        ("[4 2]", "for pp1; give 1 numbers of at least 1 that sum to 6"),
        ("zero1 dp16", "needs 16 devices, the cluster has 8"),
    ],
)
@pytest.mark.parametrize("option", ["estimate --plan", "plan --keep"])
def test_what_is_wrong_with_words_in_any_order_is_told(folder: Path, option: str, words: str, told: str) -> None:
    result = call(folder, *option.split(), words)
    assert result.exit_code == 2
    assert told in result.stderr


def test_kept_plan_may_be_in_words(folder: Path) -> None:
    result = call(folder, "plan", "--planner=megatron", "--keep", "pp1 dp8 mb1", "--output", "json")
    assert result.exit_code == 0, result.output
    assert "moved_bytes" in json.loads(result.stdout)["candidates"][0]


def test_document_is_read_from_standard_input(folder: Path) -> None:
    answers = [
        call(folder, "estimate", "--plan", "pp2 dp4 mb1", "--output=json", **options).stdout
        for options in ({}, {"cluster": "-", "typed": (folder / "cluster.json").read_text()})
    ]
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"devices": True}, "nodes.0.devices: expected a number, got true"),
        ({"network": {"latency_seconds": 1e-5, "bandwidth_bytes_per_second": 200}}, "must be at least 10,000, got 200"),
        (
            {"network": {"latency_seconds": 50, "bandwidth_bytes_per_second": 1e9}},
            "network.latency_seconds: must be at most 1, got 50, longer than any network's; write seconds: 50 µs are 5e-05",
        ),
        (
            {"inside": {"latency_seconds": -1, "bandwidth_bytes_per_second": 1e9}},
            "nodes.0.inside: latency_seconds must be at least 0, got -1",
        ),
        (
            {"accelerator": "V100"},
            "not among the accelerators (Tesla-V100-SXM2-16GB); did you mean Tesla-V100-SXM2-16GB?",
        ),
        (
            {"accelerator": "Tesla-V100-SXM2-32GB"},
            "not among the accelerators (Tesla-V100-SXM2-16GB); did you mean Tesla-V100-SXM2-16GB?",
        ),
        ({"accelerator": "abacus"}, "(Tesla-V100-SXM2-16GB); add it there, with its memory_bytes"),
    ],
)
def test_figures_that_cannot_be_meant_are_refused(folder: Path, changes: dict[str, object], words: str) -> None:
    cluster = json.loads((folder / "cluster.json").read_text())
    cluster["nodes"][0] |= changes
    result = call(folder, "estimate", "--plan", "pp2 dp4 mb1", cluster="-", typed=json.dumps(cluster))
    assert result.exit_code == 2
    assert words in result.stderr


@pytest.mark.parametrize(
    ("size", "meant"),
    [(16, "16 GiB are 17179869184"), (16384, "16384 MiB are 17179869184"), (2**25, "33554432 KiB are 34359738368")],
)
def test_memory_in_another_unit_is_refused_with_the_bytes_to_write(folder: Path, size: int, meant: str) -> None:
    cluster = json.loads((folder / "cluster.json").read_text())
    cluster["accelerators"][0]["memory_bytes"] = size
    result = call(folder, "estimate", "--plan", "pp2 dp4 mb1", cluster="-", typed=json.dumps(cluster))
    assert result.exit_code == 2
    assert f"memory_bytes: must be at least 67,108,864 (64.0 MiB), got {size}, less than any" in result.stderr
    assert meant in result.stderr


def test_version_is_shown() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, "trainwright 0.1.0\n")
