"""Plans in words, standard input, and figures that cannot be meant."""

from __future__ import annotations

import json
from importlib.metadata import version
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
from trainwright.exports.plan_shorthand import is_shorthand, plan_of_shorthand

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
    assert (len(shape.ends), shape.strategy.data, shape.strategy.tensor, shape.rows) == (pp, dp, tp, mb)
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
    ("text", "same"),
    [
        ("pp2 dp2 tp2 mb1×16 [3 3] zero1, recompute 4/6", "pp2 dp2 tp2 mb1 zero1 recompute"),
        ("pp2 dp2 mb2x8 [4,2]", "pp2 dp2 mb2 [4 2]"),
        ("[4 2]", "pp2 [4 2]"),
        ("[6×1] dp1", "pp6 dp1 [1 1 1 1 1 1]"),
        ("zero1", "pp1 dp8 zero1"),
    ],
)
def test_shorthand_takes_the_notation_of_tables(text: str, same: str) -> None:
    assert plan_of_shorthand(text, DEVICES, 6, 32) == plan_of_shorthand(same, DEVICES, 6, 32)


@pytest.mark.parametrize(
    "name", ["zero1", "recompute", "gpipe", "pp=2 dp=2", "pp 2 dp 2", "pp2/dp2", "pp2 dp2 zero1.5", "[4 2]", "pp2 4/6"]
)
def test_words_are_told_from_names_of_files(name: str) -> None:
    assert is_shorthand(name)


@pytest.mark.parametrize("name", ["plan", "pp2.json", "plans/pp2", "/tmp/pp2", "./pp2", "pp2 dp2.yaml", "zero"])
def test_names_of_files_are_told_from_words(name: str) -> None:
    assert not is_shorthand(name)


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
        ("pp=2 dp=2", "'pp=2' is not understood: write pp2"),
        ("pp2 ZeRO-1", "'zero-1' is not understood: write zero1"),
        ("pp-1", "'pp-1' is not understood: write pp1"),
        ("pp 2 dp 2", "'pp' needs its number right after it, as in pp2"),
        ("pp2/dp2", "'pp2/dp2' is not understood: put a space between words"),
        ("pp2 dp2 zero1.5", "'zero1.5' is not understood; give pp, dp, tp and mb with a number, zero1 to zero3"),
        ("pp99999999", "99999999 stages for 4 blocks; give fewer stages"),
        ("pp9999999999", "'pp9999999999' is too large"),
        ("pp2 half", "'half' is no word of a plan: write bf16 or fp16"),
        ("pp2 bf16 fp32", "'bf16' and 'fp32' contradict; keep one"),
        ("pp2 sp", "'sp' is no word of a plan: the runtime decides on sequence parallelism"),
        ("pp2 tensor_inner", "'tensor_inner' is no word of a plan: give such a plan in a file"),
        ("pp2 dp2 zero2 kept", "'kept' is said of the weights that zero3 gathers; give zero3, or leave it out"),
        ("pp2 dp2 zero3, kept 4/6", "'4/6' tells layers apart, which shorthand cannot"),
        ("pp2 dp2 recompute 2/6", "'2/6' tells layers apart, which shorthand cannot"),
        ("pp2 dp2 zero1 4/6", "'4/6' tells layers apart, which shorthand cannot"),
        ("pp1 dp4–8 tp1–2", "'dp4–8' tells layers apart, which shorthand cannot"),
        ("pp2 mb1×4 [2 dp8 tp1 | 4 dp4 tp2]", "'[2 dp8 tp1 | 4 dp4 tp2]' tells layers apart, which shorthand cannot"),
        ("pp2 dp2 mb1×8", "mb1×8 on 2 replicas are 16 rows, but the global batch is 32; give mb1×16, or leave ×8 out"),
        ("tp3", "tp3 does not divide the model, whose tensor degrees are 1, 2, 4 and 8"),
        (
            "pp3",
            "2 replicas (all that the 8 devices hold; dp is not given) × 1 row do not divide the global batch of 31",
        ),
        ("pp3 dp4", "needs 12 devices, the cluster has 8"),
        ("pp1 dp3", "do not divide the global batch of 32"),
        ("pp7 dp1", "7 stages for 4 blocks"),
        ("pp2 dp3 [4 4]", "[4 4] are 8 layers in 2 stages, but the model has 6, embedding and head included, for pp2"),
        ("pp3 [3 3]", "give 3 numbers of at least 1 that sum to 6"),
        ("[4 1]", "give 2 numbers of at least 1 that sum to 6"),
        ("[]", "give layers as numbers, as in [4 3 5]"),
    ],
)
def test_shorthand_is_refused_in_one_sentence(text: str, words: str) -> None:
    batch = 31 if "of 31" in words else 32
    with pytest.raises(ValueError, match=r"^plan ") as refusal:
        plan_of_shorthand(text, DEVICES, 6, batch, 8)
    assert words in str(refusal.value)


@pytest.mark.parametrize("command", ["estimate", "explain"])
def test_commands_take_a_plan_in_words(folder: Path, command: str) -> None:
    result = call(folder, command, "--plan", "pp2 dp2 tp2 mb1 zero1 recompute", "--output", "json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["predicted_seconds"] > 0


@pytest.mark.parametrize(
    ("words", "told"),
    [("pp0", "must be at least pp1"), ("pp2tp3", "is not understood"), ("PP=2", "is not understood: write pp2")],
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
        ("pp1 [4 2]", "for pp1; give 1 number of at least 1 that sums to 6"),
        ("pp2 tp3", "tp3 does not divide the model, whose tensor degrees are 1, 2, 4 and 8"),
        ("pp2 dp2 zero1.5", "'zero1.5' is not understood"),
        ("zero1 dp16", "needs 16 devices, the cluster has 8"),
    ],
)
@pytest.mark.parametrize("option", ["estimate --plan", "plan --keep"])
def test_what_is_wrong_with_words_in_any_order_is_told(folder: Path, option: str, words: str, told: str) -> None:
    result = call(folder, *option.split(), words)
    assert result.exit_code == 2
    assert told in result.stderr


@pytest.mark.parametrize("option", ["estimate --plan", "plan --keep"])
def test_plan_of_another_model_is_refused_by_name(folder: Path, option: str) -> None:
    for layers, tensor, told in (
        (5, 1, f"the plan is for a model of 5 layers, but that of {folder / 'model.yaml'} has 6; give the model that"),
        (6, 3, "layers 0…5: tensor degree 3 does not divide the model, whose tensor degrees are 1, 2, 4 and 8"),
    ):
        plan = plan_of_shorthand(f"pp1 dp1 tp{tensor}", DEVICES, layers, 32)
        (folder / "plan.json").write_text(documents.dumps(plan))
        result = call(folder, *option.split(), str(folder / "plan.json"))
        assert result.exit_code == 2
        assert f"{'--keep: ' * ('keep' in option)}{folder / 'plan.json'}: {told}" in result.stderr


def test_words_of_a_kept_plan_are_refused_by_the_name_of_the_option(folder: Path) -> None:
    assert "trainwright: --keep: plan 'pp2 tp3': " in call(folder, "plan", "--keep", "pp2 tp3").stderr


@pytest.mark.parametrize(
    ("command", "words", "idle"),
    [
        ("estimate", "pp3 mb1", 2),
        ("explain", "pp1 dp4", 4),
        ("export", "pp1 dp1 tp1", 7),
        ("estimate", "pp2", 0),
    ],
)
def test_devices_that_a_given_plan_leaves_idle_are_told(folder: Path, command: str, words: str, idle: int) -> None:
    given_plan = ("--to", "torchrun", words) if command == "export" else ("--plan", words)
    result = call(folder, command, *given_plan)
    assert result.exit_code == 0, result.output
    told = " ".join(result.output.split())
    which = f"Of the cluster's 8 devices, {idle} are not used: "
    how_many = f"The plan uses {8 - idle} of the cluster's 8 devices; {idle} are idle."
    assert (which in told, how_many in told) == (command == "explain", command != "explain" and idle > 0)
    if command == "estimate":
        assert json.loads(call(folder, command, *given_plan, "--output=json").stdout)["idle_devices"] == idle


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
            {"network": {"latency_seconds": 1e-5, "bandwidth_bytes_per_second": 1e15}},
            "must be at most 1e+14, got 1e+15",
        ),
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
    assert (result.exit_code, result.stdout) == (0, f"trainwright {version('trainwright')}\n")
