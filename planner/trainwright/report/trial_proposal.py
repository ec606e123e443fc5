"""Proposal of the next trial as sentences, a table and fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.text import Text

from trainwright import documents
from trainwright.report import plan_summary, units
from trainwright.report.plan_figures import FIGURES, PlanFigures, figure_columns, figure_fields
from trainwright.report.tables import add_row, new_table, origin_fields, origin_words, plans_table, titled
from trainwright.search import Candidate, Problem
from trainwright.trial_selection import Observations, Proposal, Rule, StoppingDecision, TrialHistory

_WORTH_TELLING = 0.02
"""Minimum change of a factor for a sentence; it must also exceed the factor's remaining uncertainty."""


def proposal_fields(proposal: Proposal, study: TrialHistory, problem: Problem) -> dict[str, Any]:
    """Return a proposal for JSON output; `best` is a rank in `candidates`, regret and gain are relative."""
    order = _order(study)
    rank = {plan: place for place, plan in enumerate(order, 1)}
    return {
        "verdict": proposal.verdict.value,
        "trial": None if proposal.trial is None else _plan_fields(proposal.trial, study, problem),
        "best": None if proposal.best is None else rank[proposal.best],
        "expected_regret": proposal.regret,
        "expected_gain": proposal.gain,
        "reason": " ".join(sentences(proposal, study)),
        "factors": [
            {"name": factor.name, "share": factor.share, "deviation": factor.deviation}
            for factor in study.factor_observations
        ],
        **origin_fields(problem),
        "candidates": [{"rank": rank[plan], **_plan_fields(plan, study, problem)} for plan in order],
    }


def proposal_report(proposal: Proposal, study: TrialHistory, problem: Problem, rule: Rule) -> Group:
    """Return the candidates as tables of their predicted figures, their posterior and their plans, and what to do."""
    columns = figure_columns(problem)
    figures = new_table([("rank", "right"), *((heading, "right") for heading, _ in columns)])
    trials = new_table(
        [
            ("rank", "right"),
            ("expected", "right"),
            ("off by", "right"),
            ("measured", "right"),
            ("fits", "right"),
            ("gain", "right"),
            ("", "whole"),
        ]
    )
    order = _order(study)
    for rank, plan in enumerate(order, 1):
        posterior, of_plan = study.posterior, study.plans[plan]
        measured = posterior.measured.get(plan)
        tried = measured is not None or plan in posterior.failed
        style = "bold" if plan == proposal.trial else ""
        plan_figures = PlanFigures.of(Candidate(of_plan, study.estimates[plan]), problem)
        add_row(figures, str(rank), *(cell(plan_figures) for _, cell in columns), style=style)
        add_row(
            trials,
            str(rank),
            units.seconds(posterior.seconds.expected[plan]),
            f"{posterior.seconds.deviations[plan]:.1%}",
            "failed" if plan in posterior.failed else "" if measured is None else units.seconds(measured),
            "" if tried else f"{posterior.fit_probability[plan]:.0%}",
            "" if tried or not posterior.measured else f"{posterior.expected_gain(plan):.2%}",
            "next" if plan == proposal.trial else "best" if plan == proposal.best else "",
            style=style,
        )
    caption = (
        "expected: prediction corrected by the trials; off by: its standard deviation; fits: probability that the plan "
        "fits into memory; gain: expected speed-up of the best plan by the trial; "
        f"stops below a regret of {rule.regret_below:.1%}"
    )
    words = (Text(sentence) for sentence in sentences(proposal, study))
    return Group(
        titled(f"Next trials{origin_words(problem)}", figures, f"predicted, not measured; {FIGURES}"),
        Text(),
        trials,
        Text(),
        Text(caption, style="dim"),
        Text(),
        plans_table(
            [study.plans[plan] for plan in order],
            problem,
            bold=None if proposal.trial is None else order.index(proposal.trial),
        ),
        Text(),
        Text(plan_summary.legend(study.plans, problem.cluster), style="dim"),
        Text(),
        *words,
    )


def sentences(proposal: Proposal, study: TrialHistory) -> list[str]:
    """Return what to do, why, and what the trials say about the cost model."""
    return [
        _verdict(proposal, study),
        *_regret(proposal, study),
        *_factors(study.factor_observations if study.posterior.measured else ()),
    ]


def _verdict(proposal: Proposal, study: TrialHistory) -> str:
    posterior = study.posterior
    if proposal.trial is not None:
        name, fits = plan_summary.name(study.plans[proposal.trial]), float(posterior.fit_probability[proposal.trial])
        expected = units.seconds(posterior.seconds.expected[proposal.trial])
        first = (
            f"Try {name} next: it is expected to take {expected} ± {posterior.seconds.deviations[proposal.trial]:.1%}"
        )
        memory = "" if fits > 0.99 else f", and it fits into memory with probability {fits:.0%}"
        if not posterior.measured:
            return f"{first}{memory}; no plan ran yet, and none that likely fits is expected to be faster."
        return f"{first}{memory}; no other trial has a higher expected gain ({proposal.gain:.2%})."
    return {
        StoppingDecision.REGRET_IS_SMALL: "Stop: the expected regret is below the threshold.",
        StoppingDecision.NOTHING_IS_WORTH_IT: "Stop: no single trial has a noticeable expected gain.",
    }.get(proposal.verdict, "Stop: every plan was tried.")


def _regret(proposal: Proposal, study: TrialHistory) -> list[str]:
    if proposal.best is None:
        return ["Every plan failed: no plan is left to train with."]
    ran = "of those that ran, the best is" if study.posterior.measured else "without a trial the best guess is"
    name, regret = (
        plan_summary.name(study.plans[proposal.best]),
        f"{proposal.regret:.2%} slower than the truly fastest plan",
    )
    return [f"If trials stop now, {ran} {name}, expected to be {regret}."]


def _factors(learnt: Sequence[Observations]) -> list[str]:
    moved = [factor for factor in learnt if abs(factor.share) >= max(_WORTH_TELLING, factor.deviation)]
    if not moved:
        return []
    corrections = "; ".join(f"{factor.name} {factor.share:+.0%} (± {factor.deviation:.0%})" for factor in moved)
    return [f"Corrections of the cost model from the trials: {corrections}."]


def _order(study: TrialHistory) -> list[int]:
    """Return plans by expected seconds, failed ones last."""
    posterior = study.posterior
    return sorted(
        range(len(study.plans)), key=lambda plan: (plan in posterior.failed, float(posterior.seconds.means[plan]), plan)
    )


def _plan_fields(plan: int, study: TrialHistory, problem: Problem) -> dict[str, Any]:
    posterior = study.posterior
    tried = plan in posterior.measured or plan in posterior.failed
    return {
        "predicted_seconds": study.estimates[plan].iteration_seconds,
        "expected_seconds": float(posterior.seconds.expected[plan]),
        "deviation": float(posterior.seconds.deviations[plan]),
        "measured_seconds": posterior.measured.get(plan),
        "failed": plan in posterior.failed,
        "fits": float(posterior.fit_probability[plan]),
        "expected_gain": None if tried else posterior.expected_gain(plan),
        "peak_memory_bytes": study.estimates[plan].peak_memory_bytes,
        **figure_fields(Candidate(study.plans[plan], study.estimates[plan]), problem),
        "plan": documents.dump(study.plans[plan]),
    }
