"""Answers to questions: one composition for command line, operator and library."""

from __future__ import annotations

from trainwright.answer.answer import Answer, Baselines, BatchSizes, NodeWorth, SlowFormat, Stop
from trainwright.answer.composition import (
    answer_of_plan,
    compose,
    find_candidates,
    stop_of,
    with_baselines,
    with_price,
)
from trainwright.answer.question import HEURISTIC, Question

__all__ = [
    "HEURISTIC",
    "Answer",
    "Baselines",
    "BatchSizes",
    "NodeWorth",
    "Question",
    "SlowFormat",
    "Stop",
    "answer_of_plan",
    "compose",
    "find_candidates",
    "stop_of",
    "with_baselines",
    "with_price",
]
