"""Error band of an answer, for estimated and for measured profiles."""

from __future__ import annotations

from trainwright.error_bands import MEAN_MEASURED_ERROR, ErrorBand, scarce_runs
from trainwright.report.plan_summary import short_names
from trainwright.report.remark import Remark
from trainwright.report.units import seconds
from trainwright.search import Candidate, Problem
from trainwright.search.candidates import band_of_estimates, is_without_published_runs, published_band


def expected_range(candidate: Candidate, problem: Problem, *, which: str = "") -> Remark:
    """Return the range in which the iteration is expected, and the runs that it comes from; the mean error if it was measured.

    A second sentence names the accelerators of the plan that few or none of these runs used. `which` names the plan where
    an answer has several.
    """
    if is_without_published_runs(problem):
        return Remark(
            ("Estimated from data sheets; no published runs support this, since the model is your own: measure it.",),
            {"estimated_range": {"published_runs": 0}},
        )
    band, published = band_of_estimates(candidate, problem), published_band(candidate, problem)
    if band is None or published is None:
        these = "; these profiles are estimated" if problem.profiles.origin == "estimated" else ""
        measured = (
            f"With measured profiles, predictions were {MEAN_MEASURED_ERROR:.1%} off on average (on emulated devices)"
        )
        return Remark((f"{measured}{these}.",), {"mean_error": MEAN_MEASURED_ERROR})
    predicted = candidate.estimate.iteration_seconds
    least, greatest = band.range_of(predicted)
    scarce = scarce_runs(problem.cluster.accelerators_of(candidate.plan.nodes))
    of = f" of {which}" if which else ""
    expected = f"Estimated from data sheets: {seconds(least)} to {seconds(greatest)} an iteration{of}"
    narrowed, narrowed_fields = _narrowed(published, band, predicted)
    return Remark(
        (f"{expected}, as 8 of 10 published runs{_which_runs(band)}{narrowed}.", *_scarce(scarce, problem)),
        {
            "estimated_range": {
                "least_seconds": least,
                "greatest_seconds": greatest,
                "published_runs": band.runs,
                "published_sources": band.sources,
                **({"published_framework": band.framework} if band.framework else {}),
                **({"published_generation": band.generation} if band.generation else {}),
                **narrowed_fields,
                **({"scarce_runs": scarce} if scarce else {}),
            }
        },
    )


def _which_runs(band: ErrorBand) -> str:
    framework = f" with {band.framework}" if band.framework else ""
    where = f" on {band.generation} GPUs" if band.generation else ""
    return f"{framework}{where} ({band.runs} of {band.sources} sources)"


def _narrowed(published: ErrorBand, band: ErrorBand, predicted: float) -> tuple[str, dict[str, object]]:
    """Return how a sentence and the JSON say what a user's own trials take from the range of published runs."""
    if band == published:
        return "", {}
    least, greatest = published.range_of(predicted)
    return (
        f", which your trials narrow from {seconds(least)} to {seconds(greatest)}",
        {"before_calibration": {"least_seconds": least, "greatest_seconds": greatest}},
    )


def _scarce(runs: dict[str, int], problem: Problem) -> list[str]:
    """Return a sentence on the accelerators with too few published runs; none if there is none."""
    if not runs:
        return []
    names = short_names(problem.cluster)
    counts = ", ".join(f"{count or 'none'} on the {names[name]}'s generation" for name, count in runs.items())
    return [f"Such runs are few on GPUs of this plan ({counts}): the error there may be larger."]
