"""What a result rests on, where that is less than a measurement of real devices."""

from __future__ import annotations

from trainwright.search import Problem


def origin_words(problem: Problem) -> str:
    """Behind a title: ` (device times emulated, profiles estimated)`, or nothing."""
    marks = [
        *(["device times emulated"] if problem.cluster.is_emulated else []),
        *(["profiles estimated"] if problem.profiles.origin == "estimated" else []),
    ]
    return f" ({', '.join(marks)})" if marks else ""


def origin_fields(problem: Problem) -> dict[str, str]:
    """The same in an answer for programs: only there where profiles are estimated."""
    return {"profiles": problem.profiles.origin} if problem.profiles.origin == "estimated" else {}
