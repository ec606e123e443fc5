"""Remarks on the runtime that an answer assumes, and on networks that nobody has measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainwright import library
from trainwright.accelerators import cluster_of
from trainwright.families import Gpt
from trainwright.report.assumptions import assumed_network, assumed_runtime
from trainwright.report.remark import Remark
from trainwright.runtime import Runtime
from trainwright.runtime_presets import runtime_preset
from trainwright.search import Candidate, Limits, Problem, assumed_process_bytes
from trainwright.training import Training


def answered(
    counts: dict[str, int], runtime: Runtime | None = None, headroom: float | None = None
) -> tuple[Candidate, Problem]:
    training = Training(8, gpt=Gpt(2, 256, 4, 128, 1000))
    limits = Limits(memory_headroom_ratio=headroom)
    problem = library.problem(cluster_of(counts), training, runtime=runtime, limits=limits)
    return library.find_plans(problem, "amp")[0], problem


def test_a_share_of_a_network_is_said_where_several_nodes_use_it() -> None:
    several, alone = (assumed_network(*answered({"g4dn.12xlarge": count})) for count in (2, 1))
    assert several.sentences[0].startswith("Between nodes, 60% of the stated bandwidth counts")
    assert several.fields == {"assumed_network_share": 0.6}
    assert alone == Remark()


def test_a_network_that_is_reached_in_full_is_not_mentioned() -> None:
    assert not assumed_network(*answered({"dgx-a100": 2})).sentences


@pytest.mark.parametrize(
    ("counts", "words"), [({"dgx-a100": 1}, "2 GB"), ({"p3.8xlarge": 1, "g4dn.12xlarge": 1}, "0.6 to 1 GB")]
)
def test_an_unknown_trainer_gets_an_assumption_by_card_that_is_said(counts: dict[str, int], words: str) -> None:
    candidate, problem = answered(counts)
    whole = replace(candidate, plan=library.plan_in_words(f"dp{len(problem.devices)} mb1", problem))
    said = assumed_runtime(whole, problem)
    assert said.sentences[0].startswith(
        f"No runtime is stated: Trainwright's own worker is assumed, and {words} a device"
    )
    assert said.fields == {"assumed_process_bytes": max(map(assumed_process_bytes, problem.accelerators))}


def test_memory_that_a_user_leaves_free_needs_no_assumption() -> None:
    assert assumed_runtime(*answered({"g4dn.12xlarge": 1}, headroom=0.1)) == Remark()


@pytest.mark.parametrize(("name", "title"), [("megatron-2021", "Megatron-LM"), ("tensorflow", "TensorFlow 2")])
def test_the_preset_that_was_taken_is_said(name: str, title: str) -> None:
    found = assumed_runtime(*answered({"g4dn.12xlarge": 1}, runtime_preset(name).runtime))
    assert found.sentences[0].startswith(f"Runtime: {title}")
    assert found.fields == {"runtime": name}


def test_a_runtime_of_ones_own_is_not_a_preset() -> None:
    own = replace(runtime_preset("megatron").runtime, constant_seconds=0.5)
    assert assumed_runtime(*answered({"g4dn.12xlarge": 1}, own)) == Remark()
