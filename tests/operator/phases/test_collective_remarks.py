"""Remarks on collectives: what follows where predictions are far off, and nothing where they are near."""

from __future__ import annotations

import pytest

from trainwright.cluster import Device
from trainwright.measurement.collective_check import CollectiveCheck, ComparedCollective
from trainwright.worker_api import CollectiveTime
from trainwright_operator.flow.documents.link_results import SMALL_ERROR, explain_check


def remark(error: float, ratio: float, *, is_emulated: bool = False, has_trials: bool = True) -> str:
    measured = CollectiveTime("all_reduce", (Device("a", 0), Device("b", 0)), 1024, 1.0, 3)
    check = CollectiveCheck(9, error, ratio, ComparedCollective(measured, 1.0 + error))
    return explain_check(check, is_emulated=is_emulated, has_trials=has_trials)


def test_small_errors_are_figures_alone() -> None:
    assert remark(SMALL_ERROR, 1.2) == (
        "collectives are predicted well (9 measured, mean error 25%, largest +25% for all_reduce of 1024 bytes on 2 devices)"
    )


@pytest.mark.parametrize(
    ("ratio", "words"),
    [
        (
            3.2,
            ("took 3.2 times as long as predicted", "may rank too high", "other traffic", "NCCL on TCP", "NET/Socket"),
        ),
        (0.24, ("took only 0.24 of the predicted time", "may rank too low", "slowed the links", "SHARP")),
        (1.0, ("partly more and partly less", "may rank wrongly", "other traffic")),
    ],
)
def test_large_errors_say_what_follows_and_what_to_look_at(ratio: float, words: tuple[str, ...]) -> None:
    told = remark(3.19, ratio)
    assert "mean error 319%" in told
    assert all(word in told for word in words), told
    assert "trials decide, and a higher trials.topK tries more" in told
    assert len(told) < 700
    assert "NCCL" not in remark(3.19, ratio, is_emulated=True)
    assert "without trials (trials.topK is 0) nothing corrects that" in remark(3.19, ratio, has_trials=False)
