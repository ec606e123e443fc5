"""What a preference changed, and what changing to a plan takes, in words and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainwright.report import units
from trainwright.search import Candidate, Problem
from trainwright.search.preference.keep import moved_bytes, moved_seconds


def preference_sentences(candidates: Sequence[Candidate], problem: Problem) -> list[str]:
    """What was traded for the first candidate, and what must be moved to change to it."""
    first, keep = candidates[0], problem.preference.keep
    told = [] if first.traded is None else [f"The first plan is preferred: it is {first.traded}."]
    if keep is None:
        return told
    if first.plan == keep:
        return [*told, "It is the plan that runs now: nothing moves."]
    moved = moved_bytes(keep, first.plan, problem.setting)
    seconds = moved_seconds(keep, first.plan, problem.setting)
    if not moved:
        return [*told, "To change to it no state moves."]
    return [*told, f"To change to it {units.size(moved)} of state move, which takes {units.seconds(seconds)}."]


def preference_fields(candidate: Candidate, problem: Problem) -> dict[str, Any]:
    """The same for programs: only what was asked for and what happened."""
    keep = problem.preference.keep
    return {
        **({} if candidate.traded is None else {"traded": candidate.traded}),
        **({} if keep is None else {"moved_bytes": moved_bytes(keep, candidate.plan, problem.setting)}),
    }
