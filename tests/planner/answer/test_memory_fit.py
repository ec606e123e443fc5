"""Memory that plans leave free for what a trainer's allocator loses, and how likely a plan fits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trainwright import documents, library
from trainwright.accelerators.machines import cluster_of
from trainwright.answer import answer_of_plan
from trainwright.cli import app
from trainwright.families import Gpt
from trainwright.layer import Attention
from trainwright.report.memory_fit import SURE, fit
from trainwright.runtime import OwnTrials, Runtime
from trainwright.runtime_presets import runtime_preset, runtime_presets
from trainwright.search import Problem
from trainwright.training import RequestedDtype, Training
from trainwright.trial_selection import ModelUncertainty, TrialHistory, fit_probability


def gpt2_xl(preset: str, attention: Attention) -> Problem:
    """GPT-2 XL on 16 V100-32."""
    training = Training(
        gpt=Gpt(48, 1600, 25, 1024, 50257, dropout=True),
        global_batch_size=384,
        dtype=RequestedDtype.FLOAT16,
        attention=attention,
    )
    return library.problem(cluster_of({"p3dn.24xlarge": 2}), training, runtime=runtime_preset(preset).runtime)


@pytest.mark.parametrize(
    ("words", "fits"), [("dp16 mb1", False), ("dp16 mb1 zero1", True), ("dp16 mb4", False), ("dp16 mb4 zero1", False)]
)
def test_published_runs_that_ran_out_of_memory_are_refused(words: str, fits: bool) -> None:
    """Hugging Face's GPT-2 XL under DeepSpeed, with stored attention: plain replicas never ran, ZeRO-1 with one row did."""
    problem = gpt2_xl("deepspeed", Attention.STORED)
    assert library.estimate(library.plan_in_words(words, problem), problem).feasible is fits


def test_a_preset_leaves_free_what_fragments() -> None:
    """A plan that would fill the memory to the last half GiB does not run."""
    problem = gpt2_xl("deepspeed", Attention.FUSED)
    plan = library.plan_in_words("dp16 mb2", problem)
    tight = answer_of_plan(problem, plan).best.estimate
    memory = problem.cluster.accelerators[0].memory_bytes
    assert 0.98 * memory < tight.peak_memory_bytes < memory
    assert not tight.feasible
    assert library.estimate(plan, replace(problem, limits=replace(problem.limits, memory_headroom_ratio=0.0))).feasible


def test_every_preset_of_another_trainer_states_what_fragments_with_its_source() -> None:
    presets = {name: preset for name, preset in runtime_presets().items() if preset.trainer is not None}
    assert {"megatron", "deepspeed", "torchtitan"} <= presets.keys()
    for preset in presets.values():
        assert preset.runtime.fragmented_ratio == 0.08
        assert preset.facts["fragmented_ratio"].source == "published_peaks"


def test_a_plan_fits_as_likely_as_the_choice_of_trials_says() -> None:
    problem = gpt2_xl("deepspeed", Attention.FUSED)
    plans = [library.plan_in_words(words, problem) for words in ("dp16 mb1", "dp16 mb1 zero1", "dp16 mb2")]
    context = problem.cost_context
    history = TrialHistory.of(plans, context)
    shown = [fit_probability(answer_of_plan(problem, plan).best.estimate, context) for plan in plans]
    assert shown == pytest.approx(history.posterior.fit_probability.tolist())
    assert shown[1] > SURE > shown[0] > 0.5 > shown[2]


def test_nothing_is_said_of_a_plan_that_surely_fits_or_that_does_not() -> None:
    problem = gpt2_xl("deepspeed", Attention.FUSED)
    said = [
        fit(answer_of_plan(problem, library.plan_in_words(words, problem)).best, problem)
        for words in ("dp16 mb1", "dp16 mb1 zero1", "dp16 mb2")
    ]
    assert [len(remark.sentences) for remark in said] == [1, 0, 0]
    assert said[0].sentences[0].startswith("The plan fits into memory with probability ")
    assert all(0 <= remark.fields["fits"] <= 1 for remark in said)


def test_plan_shows_how_likely_its_candidates_fit(tmp_path: Path) -> None:
    model = "gpt: {layers: 48, hidden_size: 1600, heads: 25, sequence_length: 1024, vocabulary_size: 50304}\n"
    (tmp_path / "model.yaml").write_text(model + "global_batch_size: 32\ndtype: float16\n")
    (tmp_path / "cluster.json").write_text(documents.dumps(cluster_of({"p3dn.24xlarge": 1})))
    inputs = [f"--cluster={tmp_path / 'cluster.json'}", f"--model={tmp_path / 'model.yaml'}", "--runtime=deepspeed"]
    words = ["plan", *inputs, "--planner=megatron", "--top=20"]
    listed = json.loads(CliRunner().invoke(app, [*words, "--output=json"]).stdout)["candidates"]
    assert any(candidate["fits"] < SURE for candidate in listed)
    table = " ".join(CliRunner().invoke(app, words).stdout.split())
    assert "fits: probability that the plan fits into memory" in table
    for candidate in listed:
        usable = 0.92 * candidate["memory_limit_bytes"]
        assert (candidate["fits"] > 0.5) == (candidate["peak_memory_bytes"] < usable)


def test_memory_of_another_trainer_or_of_estimated_layers_is_less_sure() -> None:
    problem = gpt2_xl("deepspeed", Attention.FUSED)
    own = replace(problem, runtime=Runtime(), profiles=replace(problem.profiles, origin="measured"))
    spread = ModelUncertainty.of(own.cost_context).memory
    for other in (problem, replace(own, runtime=problem.runtime), replace(own, profiles=problem.profiles)):
        assert ModelUncertainty.of(other.cost_context).memory > 2 * spread


def test_own_trials_say_how_sure_memory_is() -> None:
    problem = gpt2_xl("deepspeed", Attention.FUSED)
    spread = ModelUncertainty.of(problem.cost_context).memory

    def after(own: OwnTrials) -> float:
        runtime = replace(problem.runtime, own_memory_trials=own)
        return ModelUncertainty.of(replace(problem, runtime=runtime).cost_context).memory

    assert after(OwnTrials(1)) == spread
    assert 0.02 < after(OwnTrials(100, 0.02)) < after(OwnTrials(5, 0.02)) < spread < after(OwnTrials(5, 0.3))
