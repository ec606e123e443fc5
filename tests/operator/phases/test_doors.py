"""Command line, library and operator give the same answer to the same question."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import trainwright as tw
from trainwright import documents
from trainwright.accelerators import cluster_of
from trainwright.answer.formats import problems_in_formats
from trainwright.cli import app
from trainwright.exports import TARGETS
from trainwright.profiles import LayerTooLarge, Profiles
from trainwright.search import Objective, Preference
from trainwright.training import Training
from trainwright_operator.flow.actions import PlanningRequest
from trainwright_operator.flow.documents.planned_trials import PlannedTrials, Role
from trainwright_operator.search_process import search

GPT = "gpt: {layers: 4, hidden_size: 1024, heads: 8, sequence_length: 512, vocabulary_size: 8192}"
SCARCE = GPT.replace("sequence_length: 512", "sequence_length: 16")
"""Model whose state takes most of its memory, so that float32 fits where a half format does not."""
MIXED = {"p3.8xlarge": 1, "g4dn.12xlarge": 1}
THREE = {"p4d.24xlarge": 1, "p3.8xlarge": 1, "g4dn.12xlarge": 1}
V100, T4 = "Tesla-V100-SXM2-16GB", "Tesla-T4"
TOP = 3


@dataclass(frozen=True)
class Asked:
    """Question in the words of all doors."""

    machines: dict[str, int]
    dtype: str = "auto"
    planner: str = "amp"
    batch: int = 32
    expressible_by: str = ""
    objective: Objective = Objective.TIME
    model: str = GPT
    memory_bytes: int | None = None
    profiles: Profiles | None = None
    tolerance: float = 0.0

    @property
    def cluster(self) -> tw.Cluster:
        found = cluster_of(self.machines)
        if self.memory_bytes is None:
            return found
        return replace(
            found, accelerators=tuple(replace(one, memory_bytes=self.memory_bytes) for one in found.accelerators)
        )

    @property
    def training(self) -> Training:
        text = f"{self.model}\nglobal_batch_size: {self.batch}\ndtype: {self.dtype}\n"
        return documents.loads(text, Training)

    @property
    def problem(self) -> tw.Problem:
        trainer = TARGETS[self.expressible_by].capabilities if self.expressible_by else None
        limits = tw.Limits(expressible_by=trainer, objective=self.objective)
        problem = tw.problem(self.cluster, self.training, profiles=self.profiles, limits=limits)
        return replace(problem, preference=Preference(self.tolerance))

    @property
    def has_worth(self) -> bool:
        return self.objective is Objective.TIME


@dataclass(frozen=True)
class Said:
    """Answer of one door: seconds of candidates and baselines, number formats, prices and worths."""

    candidates: Sequence[float]
    dtypes: Sequence[str | None]
    plans: Sequence[Any]
    baselines: frozenset[float]
    slow: bool
    unlimited: float | None
    worths: dict[str, tuple[float | None, float | None]]


def by_command_line(asked: Asked, folder: Path) -> Said:
    (folder / "cluster.json").write_text(documents.dumps(asked.cluster))
    (folder / "model.json").write_text(documents.dumps(asked.training))
    words = [f"--cluster={folder / 'cluster.json'}", f"--model={folder / 'model.json'}", f"--planner={asked.planner}"]
    if asked.profiles is not None:
        (folder / "profiles.json").write_text(documents.dumps(asked.profiles))
        words.append(f"--profiles={folder / 'profiles.json'}")
    if asked.expressible_by:
        words.append(f"--expressible-by={asked.expressible_by}")
    words += [
        f"--objective={asked.objective}",
        f"--tolerance={asked.tolerance}",
        f"--top={TOP}",
        *(["--node-worth"] if asked.has_worth else []),
    ]
    result = CliRunner().invoke(app, ["plan", *words, "--output=json"])
    assert result.exit_code == 0, result.output
    small = {} if asked.profiles is None else asked.profiles.accelerators_without_memory()
    assert all(f"{name} is left out: no layer of kind {kind} fitted" in result.stderr for name, kind in small.items())
    found = json.loads(result.stdout)
    heuristic = found.get("heuristic", {})
    return Said(
        [one["predicted_seconds"] for one in found["candidates"]],
        [one.get("dtype") for one in found["candidates"]],
        [one["plan"] for one in found["candidates"]],
        frozenset(heuristic[name] for name in ("seconds_on_all", "seconds_on_equal") if name in heuristic),
        "slow_format" in found,
        found.get("unlimited_seconds"),
        {one["accelerator"]: (one["without_seconds"], one["slowdown"]) for one in found.get("node_worth", ())},
    )


def by_library(asked: Asked) -> Said:
    answer = tw.ask(asked.problem, asked.planner, top=TOP, node_worth=asked.has_worth)
    assert tw.find_plans(asked.problem, asked.planner, top=TOP) == [*answer.candidates]
    heuristic = (answer.baselines.of_all, answer.baselines.of_equal) if answer.baselines else ()
    return Said(
        [one.estimate.iteration_seconds for one in answer.candidates],
        [one.dtype for one in answer.candidates],
        [documents.dump(one.plan) for one in answer.candidates],
        frozenset(one.estimate.iteration_seconds for one in heuristic if one is not None),
        answer.slow is not None,
        answer.candidates[0].unlimited_seconds,
        {one.accelerator: (one.without_seconds, one.slowdown) for one in answer.node_worths},
    )


def measured(problem: tw.Problem) -> Profiles:
    """Return the profiles as if they were measured: of accelerators that compute the problem's format."""
    layers = tuple(one for one in problem.profiles.layers if one.accelerator in problem.accelerators)
    return replace(problem.profiles, layers=layers, origin="measured")


def by_operator(asked: Asked) -> Said:
    problem = asked.problem
    problems = problems_in_formats(problem) if problem.chooses_format else [problem]
    models = [documents.dumps(one.model) for one in problems]
    tables = [documents.dumps(measured(one)) for one in problems]
    if asked.profiles is not None:
        tables = [documents.dumps(asked.profiles)]
    request = PlanningRequest(
        key="",
        cluster=documents.dumps(asked.cluster),
        model=models[0],
        profiles=tables[0],
        runtime=documents.dumps(problem.runtime),
        global_batch_size=asked.batch,
        optimizer=problem.optimizer,
        planner=asked.planner,
        objective=asked.objective,
        tolerance=asked.tolerance,
        effort=1.0,
        budget_seconds=600.0,
        top_k=TOP,
        baselines=2,
        max_tensor_degree=None,
        chooses_format=problem.chooses_format,
        further_models=tuple(models[1:]),
        further_profiles=tuple(tables[1:]),
        expressible_by=asked.expressible_by,
    )
    found: PlannedTrials = documents.loads(search(request), PlannedTrials)
    candidates = [one for one in found.trials if one.role is Role.CANDIDATE]
    return Said(
        [one.predicted_seconds for one in candidates],
        [one.dtype for one in candidates],
        [documents.dump(replace(one.plan, dtype=one.dtype or problem.model.dtype)) for one in candidates],
        frozenset(one.predicted_seconds for one in found.trials if one.counts_as_baseline),
        bool(found.slow_format),
        found.unlimited_seconds,
        {one.accelerator: (one.without_seconds, one.slowdown) for one in found.node_worth},
    )


def answer_of_all(asked: Asked, folder: Path) -> Said:
    """Return what all doors say. The operator tries two baselines, whatever is compared with the best plan."""
    told, of_operator = by_command_line(asked, folder), by_operator(asked)
    assert by_library(asked) == told
    assert replace(of_operator, baselines=told.baselines) == told
    assert told.baselines <= of_operator.baselines
    return told


@pytest.mark.parametrize(
    "asked",
    [
        Asked(MIXED),
        Asked(MIXED, batch=8),
        Asked(MIXED, "float16"),
        Asked(MIXED, "bfloat16"),
        Asked(THREE, planner="megatron"),
        Asked(MIXED, tolerance=0.2),
        Asked(THREE, expressible_by="torchtitan"),
        Asked({"p3.8xlarge": 1, "a2-highgpu-4g": 1}, expressible_by="deepspeed"),
        Asked(MIXED, objective=Objective.COST),
        Asked({"a2-highgpu-1g": 1}, planner="megatron", batch=4, model=SCARCE, memory_bytes=3_254_000_000),
    ],
    ids=[
        "auto",
        "batch",
        "float16",
        "slow",
        "three types",
        "tolerance",
        "torchtitan",
        "deepspeed",
        "cost",
        "scarce memory",
    ],
)
def test_all_doors_give_the_same_answer(asked: Asked, tmp_path: Path) -> None:
    told = answer_of_all(asked, tmp_path)
    assert bool(told.baselines) == (asked.objective is Objective.TIME and asked.planner != "megatron")
    assert len(told.worths) == (len(asked.machines) if len(asked.machines) > 1 and asked.has_worth else 0)


def small(asked: Asked) -> Profiles:
    """Return measured profiles of a question, in which a block did not fit on the T4."""
    found = asked.problem.profiles
    layers = tuple(one for one in found.layers if (one.accelerator, one.kind) != (T4, "block"))
    return Profiles(layers, too_large=(LayerTooLarge(T4, "block", 1, 1),))


@pytest.mark.parametrize("dtype", ["auto", "float16"])
def test_no_door_plans_on_accelerators_on_which_a_layer_did_not_fit(dtype: str, tmp_path: Path) -> None:
    asked = Asked(MIXED, dtype, profiles=small(Asked(MIXED, "float16")))
    told = answer_of_all(asked, tmp_path)
    assert {stage["devices"][0]["node"] for plan in told.plans for stage in plan["pipelines"][0]["stages"]} == {
        "p3.8xlarge-1"
    }


def test_batch_size_that_is_searched_is_that_of_the_command_line(tmp_path: Path) -> None:
    asked = Asked(MIXED, planner="megatron")
    (tmp_path / "cluster.json").write_text(documents.dumps(asked.cluster))
    (tmp_path / "model.json").write_text(documents.dumps(asked.training))
    words = [f"--cluster={tmp_path / 'cluster.json'}", f"--model={tmp_path / 'model.json'}", "--planner=megatron"]
    found = CliRunner().invoke(app, ["plan", *words, "--global-batch-size=search", "--output=json"])
    answer = tw.ask(asked.problem, "megatron", top=10, searches_batch=True)
    listed = json.loads(found.stdout)["candidates"]
    assert [one["plan"] for one in listed] == [documents.dump(one.plan) for one in answer.candidates]
    (sizes,) = answer.batch_sizes
    assert f"tried {len(sizes.samples_per_second)} batch sizes from 8" in found.stderr
    assert sizes.best == answer.candidates[0].plan.global_batch_size


def test_given_plan_is_estimated_in_the_format_of_the_command_line(tmp_path: Path) -> None:
    asked = Asked(THREE)
    (tmp_path / "cluster.json").write_text(documents.dumps(asked.cluster))
    (tmp_path / "model.json").write_text(documents.dumps(asked.training))
    (tmp_path / "plan.json").write_text(documents.dumps(plan := tw.plan_in_words("pp2 dp2 tp4 mb4", asked.problem)))
    given = [f"--{name}={tmp_path / name}.json" for name in ("cluster", "model", "plan")]
    told = json.loads(CliRunner().invoke(app, ["estimate", *given, "--output=json"]).stdout)
    found = tw.estimate(plan, asked.problem)
    assert told["predicted_seconds"] == found.iteration_seconds
    assert told["feasible"] == found.feasible
