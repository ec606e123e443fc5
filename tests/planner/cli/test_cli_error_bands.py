"""Error bands of estimates from data sheets, from the published runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trainwright import error_bands
from trainwright.cli import app
from trainwright.cluster import Device
from trainwright.error_bands import (
    BAND_DEVIATIONS,
    EIGHT_OF_TEN_DEVIATIONS,
    MIN_SOURCES,
    ErrorBand,
    error_band,
    plan_kind,
    scarce_runs,
)
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.runtime import OwnTrials
from trainwright.strategy import Sharding, Strategy


def make_plan(tensor: int = 1, data: int = 1, stages: int = 1, sharding: Sharding = Sharding.NONE) -> Plan:
    width = tensor * data
    made = [
        Stage(
            tuple(Device("node", stage * width + slot) for slot in range(width)),
            (LayerRun(stage, 1, Strategy(tensor, data, sharding=sharding), (1,) * data),),
        )
        for stage in range(stages)
    ]
    return Plan(stages, data, (Pipeline(1, data, tuple(made)),))


@pytest.mark.parametrize(
    ("plan", "kind"),
    [
        (make_plan(), "one GPU"),
        (make_plan(data=2), "dp"),
        (make_plan(data=2, sharding=Sharding.ZERO1), "dp"),
        (make_plan(data=2, sharding=Sharding.ZERO3), "fsdp"),
        (make_plan(tensor=2, data=2, stages=2), "tp+pp+dp"),
        (make_plan(tensor=2, data=2, sharding=Sharding.ZERO2), "tp+fsdp"),
    ],
)
def test_kind_of_a_plan_names_how_it_divides_the_model(plan, kind):
    assert plan_kind(plan) == kind


def test_committed_bands_are_of_all_runs_and_their_parts():
    bands = {(band.framework, band.generation): band for band in error_bands.error_bands()}
    every = bands[None, None]
    assert every.runs == sum(
        band.runs for (framework, generation), band in bands.items() if generation and not framework
    )
    assert every.sources >= MIN_SOURCES
    assert all(band.least_ratio <= band.greatest_ratio for band in bands.values())


BANDS = (
    ErrorBand(None, None, 9, 40, 0.7, 1.4, 0.5),
    ErrorBand(None, "ampere", 5, 20, 0.8, 1.3, 0.5),
    ErrorBand(None, "hopper", 1, 19, 0.9, 1.2, 0.5),
    ErrorBand(None, "volta", 3, 9, 0.8, 1.5, 0.5),
    ErrorBand("megatron", None, 3, 12, 0.85, 1.2, 0.5),
    ErrorBand("megatron", "ampere", 3, 12, 0.95, 1.1, 0.5),
    ErrorBand("deepspeed", None, 2, 12, 0.95, 1.1, 0.5),
)


@pytest.mark.parametrize(
    ("framework", "generations", "greatest"),
    [
        ("megatron", ["ampere"], 1.1),
        ("megatron", ["volta"], 1.5),  # errors are alike by generation rather than by framework
        ("megatron", ["hopper"], 1.2),
        ("deepspeed", ["ampere"], 1.3),  # two sources are too few
        (None, ["hopper"], 1.4),
        (None, ["ampere", "hopper"], 1.4),
        (None, [None], 1.4),
    ],
)
def test_a_band_falls_back_to_the_generation_then_to_the_framework_then_to_all(framework, generations, greatest):
    assert error_band(framework, generations, BANDS).greatest_ratio == greatest


@pytest.mark.parametrize(
    ("accelerators", "scarce"),
    [(["A100-80"], {}), (["H100", "T4", "Abacus", "A100-80"], {"H100": 19, "T4": 0, "Abacus": 0})],
)
def test_runs_are_counted_for_generations_of_fewer_than_three_sources(monkeypatch, accelerators, scarce):
    monkeypatch.setattr(error_bands, "error_bands", lambda: BANDS)
    assert scarce_runs(accelerators) == scarce


def test_the_estimate_is_in_its_own_range():
    assert ErrorBand(None, None, 3, 9, 0.7, 0.8, 0.5).range_of(2.0) == (1.4, 2.0)


WIDE = ErrorBand(None, None, 9, 40, 0.8, 2.0, 0.5)


def test_trials_that_state_no_error_narrow_a_band_to_what_runs_of_one_source_differ_by():
    widths = [WIDE.width, *(WIDE.narrowed(OwnTrials(count)).width for count in (1, 5, 10**6))]
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] == pytest.approx(0.5 * WIDE.width * EIGHT_OF_TEN_DEVIATIONS / BAND_DEVIATIONS, rel=1e-3)
    fitted = WIDE.narrowed(OwnTrials(1))
    assert fitted.greatest_ratio * fitted.least_ratio == pytest.approx(1)
    assert ErrorBand(None, None, 9, 40, 0.8, 2.0, 0.0).narrowed(OwnTrials(1)).range_of(1.0) == (1.0, 1.0)


@pytest.mark.parametrize(("error_ratio", "narrows"), [(0.0, True), (0.05, True), (0.8, False)])
def test_a_band_follows_the_errors_of_own_trials_the_more_the_more_they_are(error_ratio, narrows):
    plain = WIDE.narrowed(OwnTrials(3)).width
    widths = [WIDE.narrowed(OwnTrials(count, error_ratio)).width for count in (3, 10**6)]
    assert (widths[0] < plain) == narrows
    assert widths[-1] == pytest.approx(2 * EIGHT_OF_TEN_DEVIATIONS * error_ratio, abs=2e-3)


def test_plan_says_estimated_with_a_range_where_nothing_was_measured(tmp_path):
    cluster, model = tmp_path / "cluster.yaml", tmp_path / "model.yaml"
    cluster.write_text(CliRunner().invoke(app, ["cluster", "p4d.24xlarge=1"]).stdout)
    model.write_text(
        "gpt: {layers: 4, hidden_size: 512, heads: 8, sequence_length: 512, vocabulary_size: 50304}\nglobal_batch_size: 16\n"
    )
    given = ["plan", "--planner", "megatron", "--cluster", str(cluster), "--model", str(model)]
    told = CliRunner().invoke(app, given, env={"COLUMNS": "200"})
    assert "Estimated from data sheets: " in told.stdout
    answer = json.loads(CliRunner().invoke(app, [*given, "--output", "json"]).stdout)
    found, seconds = answer["estimated_range"], answer["candidates"][0]["predicted_seconds"]
    assert found["least_seconds"] <= seconds <= found["greatest_seconds"]
    assert "runs are few" not in told.stdout
    assert "scarce_runs" not in found
    cluster.write_text(CliRunner().invoke(app, ["cluster", "g4dn.12xlarge=1"]).stdout)
    told = CliRunner().invoke(app, given, env={"COLUMNS": "200"})
    assert "Such runs are few on GPUs of this plan (21 on the T4's generation): the error there may be" in told.stdout
    answer = json.loads(CliRunner().invoke(app, [*given, "--output", "json"]).stdout)
    assert answer["estimated_range"]["scarce_runs"] == {"Tesla-T4": 21}


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ("compute_ratios: [{accelerator: NVIDIA-A100-SXM4-40GB, ratio: 1.2}]", "your trial; "),
        ("own_trials: {count: 5, error_ratio: 0.02}", "your 5 trials; "),
    ],
    ids=["of an older release", "with its trials"],
)
def test_a_calibrated_runtime_narrows_the_range_and_says_by_how_much(tmp_path, stated, words):
    cluster, model, runtime = (tmp_path / f"{name}.yaml" for name in ("cluster", "model", "runtime"))
    cluster.write_text(CliRunner().invoke(app, ["cluster", "p4d.24xlarge=1"]).stdout)
    model.write_text(
        "gpt: {layers: 4, hidden_size: 512, heads: 8, sequence_length: 512, vocabulary_size: 50304}\nglobal_batch_size: 16\n"
    )
    runtime.write_text(f"{stated}\n")
    documents = [f"--cluster={cluster}", f"--model={model}", f"--runtime={runtime}"]
    given = ["plan", "--planner=megatron", *documents]
    shown = " ".join(CliRunner().invoke(app, given, env={"COLUMNS": "200"}).stdout.split())
    assert re.search(
        rf"8 of 10 runs within -\d+ to \+\d+% after {words}-\d+ to \+\d+% before, as 8 of 10 published", shown
    )
    found = json.loads(CliRunner().invoke(app, [*given, "--output", "json"]).stdout)["estimated_range"]
    before = found["before_calibration"]
    narrowed = found["greatest_seconds"] / found["least_seconds"]
    if found["own_trials"]["count"] > 1:
        assert narrowed < before["greatest_seconds"] / before["least_seconds"]


EXAMPLES = Path(__file__).parents[3] / "deploy" / "examples" / "planner"


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "--planner=megatron"),
        ("estimate", "--plan=pp2 dp2 tp2 mb1"),
        ("explain", "--plan=pp2 dp2 tp2 mb1"),
        ("compare", "megatron"),
    ],
    ids=lambda words: words[0],
)
@pytest.mark.parametrize(
    ("cluster", "origin", "sentence"),
    [
        ("mixed-cluster", None, "Estimated from data sheets: "),
        ("cluster", "measured", "predictions were 1.5% off on average (on emulated devices)."),
        (
            "cluster",
            "estimated",
            "predictions were 1.5% off on average (on emulated devices); these profiles are estimated.",
        ),
    ],
    ids=["estimated", "measured", "emulated"],
)
def test_every_answer_says_its_error_band(tmp_path, words, cluster, origin, sentence):
    given = [*words, f"--cluster={EXAMPLES / cluster}.yaml", f"--model={EXAMPLES / 'model.yaml'}"]
    if origin is not None:
        profiles = json.loads((EXAMPLES / "profiles.json").read_text()) | {"origin": origin}
        (tmp_path / "profiles.json").write_text(json.dumps(profiles))
        given.append(f"--profiles={tmp_path / 'profiles.json'}")
    told = CliRunner().invoke(app, given, env={"COLUMNS": "200"})
    assert sentence in told.stdout, told.output
    answer = json.loads(CliRunner().invoke(app, [*given, "--output", "json"]).stdout)
    field = "estimated_range" if origin is None else "mean_error"
    assert field in answer.get("planners", [answer])[0]


OWN = """\
custom:
  entrypoint: models:mine
  kinds:
  - {name: Block, parameters: 1000000, forward_flops_per_row: 2.0e+9, output_elements_per_row: 65536, saved_elements_per_row: 500000}
  - {name: Head, parameters: 1000000, forward_flops_per_row: 2.0e+9, output_elements_per_row: 1, saved_elements_per_row: 500000}
  layers: [Block, Block, Block, Head]
global_batch_size: 16
"""


def test_no_published_band_is_claimed_for_a_users_own_model(tmp_path):
    model = tmp_path / "model.yaml"
    model.write_text(OWN)
    given = ["plan", f"--cluster={EXAMPLES / 'mixed-cluster.yaml'}", f"--model={model}", "--planner=amp"]
    told = CliRunner().invoke(app, given, env={"COLUMNS": "200"})
    assert "Estimated from data sheets; no published runs support this" in told.stdout, told.output
    assert "published runs (" not in told.stdout
    answer = json.loads(CliRunner().invoke(app, [*given, "--output", "json"]).stdout)
    assert answer["estimated_range"] == {"published_runs": 0}


def test_own_trials_support_a_model_that_no_published_run_trained(tmp_path):
    model, runtime = tmp_path / "model.yaml", tmp_path / "runtime.yaml"
    model.write_text(OWN)
    runtime.write_text("own_trials: {count: 4, error_ratio: 0.03}\n")
    given = ["plan", f"--cluster={EXAMPLES / 'mixed-cluster.yaml'}", f"--model={model}", f"--runtime={runtime}"]
    shown = CliRunner().invoke(app, [*given, "--planner=amp"], env={"COLUMNS": "200"}).stdout
    assert "your 4 trials deviate by 3.0% from predictions by the fit to the others" in " ".join(shown.split())
