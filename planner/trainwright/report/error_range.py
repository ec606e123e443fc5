"""Error band of an answer, for estimated and for measured profiles."""

from __future__ import annotations

from dataclasses import asdict

from trainwright.error_bands import MEAN_MEASURED_ERROR, ErrorBand, scarce_runs
from trainwright.report.plan_summary import short_names
from trainwright.report.remark import Remark
from trainwright.report.units import seconds
from trainwright.runtime import OwnTrials
from trainwright.search import Candidate, Problem
from trainwright.search.candidates import band_of_estimates, is_without_published_runs, own_trials, published_band


def expected_range(candidate: Candidate, problem: Problem, *, which: str = "") -> Remark:
    """Return the range in which the iteration is expected, and the runs that it comes from; the mean error if it was measured.

    A second sentence names the accelerators of the plan that few or none of these runs used. `which` names the plan where
    an answer has several.
    """
    own = own_trials(problem)
    if is_without_published_runs(problem):
        return _without_published_runs(own)
    band, published = band_of_estimates(candidate, problem), published_band(candidate, problem)
    if band is None or published is None:
        these = "; these profiles are estimated" if problem.profiles.origin == "estimated" else ""
        measured = (
            f"With measured profiles, predictions were {MEAN_MEASURED_ERROR:.1%} off on average (on emulated devices)"
        )
        return Remark((f"{measured}{these}{_own_errors(own)}.",), {"mean_error": MEAN_MEASURED_ERROR})
    predicted = candidate.estimate.iteration_seconds
    least, greatest = band.range_of(predicted)
    scarce = scarce_runs(problem.cluster.accelerators_of(candidate.plan.nodes))
    of = f" of {which}" if which else ""
    expected = f"Estimated from data sheets: {seconds(least)} to {seconds(greatest)} an iteration{of}"
    support = f"8 of 10 published runs{_which_runs(band)}"
    if own is None:
        support, before = f", as {support}", {}
    else:
        least_before, greatest_before = published.range_of(predicted)
        before = {"before_calibration": {"least_seconds": least_before, "greatest_seconds": greatest_before}}
        support = (
            f": 8 of 10 runs within {_within(band)} after {_own_words(own)}; {_within(published)} before, as {support}"
        )
    return Remark(
        (f"{expected}{support}.", *_scarce(scarce, problem)),
        {
            "estimated_range": {
                "least_seconds": least,
                "greatest_seconds": greatest,
                "published_runs": band.runs,
                "published_sources": band.sources,
                **({"published_framework": band.framework} if band.framework else {}),
                **({"published_generation": band.generation} if band.generation else {}),
                **before,
                **({"scarce_runs": scarce} if scarce else {}),
                **_own_fields(own),
            }
        },
    )


def _without_published_runs(own: OwnTrials | None) -> Remark:
    """Return the remark on a user's own model, which no published run trained."""
    support = _own_errors(own) or ": measure it"
    return Remark(
        (f"Estimated from data sheets; no published runs support this, since the model is your own{support}.",),
        {"estimated_range": {"published_runs": 0, **_own_fields(own)}},
    )


def _which_runs(band: ErrorBand) -> str:
    framework = f" with {band.framework}" if band.framework else ""
    where = f" on {band.generation} GPUs" if band.generation else ""
    return f"{framework}{where} ({band.runs} of {band.sources} sources)"


def _within(band: ErrorBand) -> str:
    """Return the range of measured seconds, relative to the estimate: `-4 to +5 %`."""
    least, greatest = band.range_of(1.0)
    return f"{100 * (least - 1):+.0f} to {greatest - 1:+.0%}"


def _own_words(own: OwnTrials) -> str:
    return "your trial" if own.count == 1 else f"your {own.count} trials"


def _own_errors(own: OwnTrials | None) -> str:
    """Return how far predictions of a user's trials were off, for the end of a sentence; empty where nothing says."""
    if own is None or own.error_ratio is None:
        return ""
    return f"; {_own_words(own)} deviate by {own.error_ratio:.1%} from predictions by the fit to the others"


def _own_fields(own: OwnTrials | None) -> dict[str, object]:
    return {} if own is None else {"own_trials": asdict(own)}


def _scarce(runs: dict[str, int], problem: Problem) -> list[str]:
    """Return a sentence on the accelerators with too few published runs; none if there is none."""
    if not runs:
        return []
    names = short_names(problem.cluster)
    counts = ", ".join(f"{count or 'none'} on the {names[name]}'s generation" for name, count in runs.items())
    return [f"Such runs are few on GPUs of this plan ({counts}): the error there may be larger."]
