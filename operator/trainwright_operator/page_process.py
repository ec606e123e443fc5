"""Page of a plan's answer, and the process that draws it: a request as JSON on standard input, the page on standard output.

Exit 0: standard output holds the page. Otherwise the last line of standard error holds the failure.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from typing import Any, Final

from trainwright import documents
from trainwright.answer import Answer
from trainwright.layer import Dtype
from trainwright.outside.plain_text import plain_line
from trainwright.quantity import format_bytes
from trainwright.report.breakdown import Difference, why
from trainwright.report.error_range import expected_range
from trainwright.report.page.composition import html_page
from trainwright.report.page.content import PageCandidate, PageContent, PageTrials
from trainwright.report.units import seconds
from trainwright.search import Problem
from trainwright.search.candidates import candidate_of
from trainwright.timeline import Timeline
from trainwright.worker_api import TrialReport, WorkerReport
from trainwright_operator.api.conditions import ConditionType
from trainwright_operator.api.status import TrainingPlanStatus, TrialState, TrialStatus, Winner
from trainwright_operator.flow.actions import PageRequest, PlanningRequest
from trainwright_operator.flow.documents.planned_trials import PlannedTrial, PlannedTrials, Role
from trainwright_operator.search_process import begin, question_of

_HOUR_SECONDS: Final = 3600.0


def draw_page(request: PageRequest, commands: Sequence[str]) -> str:
    """Return the page of an answer as HTML. `commands`: that make the answer again."""
    status = TrainingPlanStatus.model_validate_json(request.status)
    planned: PlannedTrials = documents.loads(request.planned, PlannedTrials, source="candidates")
    assert status.winner is not None
    trials = _AnsweredTrials(request, status, status.winner, planned)
    return html_page(trials.content(commands))


@dataclass(frozen=True)
class _AnsweredTrials:
    """Trials of a plan that has its answer, with the problems that their predictions are of."""

    request: PageRequest
    status: TrainingPlanStatus
    winner: Winner
    planned: PlannedTrials

    @cached_property
    def problems(self) -> dict[Dtype | None, Problem]:
        """Problem of each number format; None: of trials that name none."""
        problems = question_of(self.request.question).problems
        return {None: problems[0], **{problem.model.dtype: problem for problem in problems}}

    @cached_property
    def states(self) -> dict[str, TrialStatus]:
        return {trial.name: trial for trial in self.status.trials}

    @cached_property
    def candidates(self) -> dict[str, PageCandidate]:
        """Candidate of each trial, by its name."""
        return {trial.name: self._candidate(trial) for trial in self.planned.trials}

    def content(self, commands: Sequence[str]) -> PageContent:
        winner, own = self.winner, self._winning_trial
        best, problem = self.candidates[own.name], self.problems[own.dtype]
        difference = self._difference(best)
        answer = Answer(problem, (best.candidate,), node_worths=self.planned.node_worth)
        reason = why(difference, problem, what="by prediction, the winner")
        expected = expected_range(best.candidate, problem)
        return PageContent(
            answer,
            tuple(sorted(self.candidates.values(), key=_by_measured)),
            (*self._sentences(best), *reason.sentences, *expected.sentences),
            difference,
            self._timeline(),
            tuple(commands),
            PageTrials(self.request.plan, winner.measured_seconds, winner.speedup_over_baseline, self._course()),
        )

    @property
    def _winning_trial(self) -> PlannedTrial:
        name = self.winner.trial
        return next((trial for trial in self.planned.trials if trial.name == name), self.planned.best)

    def _candidate(self, trial: PlannedTrial) -> PageCandidate:
        state = self.states.get(trial.name)
        problem = self.problems[trial.dtype]
        candidate = candidate_of(problem, replace(trial.plan, dtype=problem.model.dtype))
        if state is None:
            return PageCandidate(trial.name, candidate)
        if state.state is not TrialState.SUCCEEDED:
            return PageCandidate(trial.name, candidate, remark=f"{state.state}: {state.reason or ''}".rstrip(": "))
        shortest, longest = state.shortest_seconds, state.longest_seconds
        extent = (shortest, longest) if shortest is not None and longest is not None else None
        remark = "winner" if trial.name == self.winner.trial else ""
        return PageCandidate(trial.name, candidate, state.measured_seconds, remark, extent)

    def _difference(self, best: PageCandidate) -> Difference | None:
        """Return the difference by part, as predicted, to the heuristic's fastest plan; None if that is the winner."""
        heuristic = (
            self.candidates[trial.name]
            for trial in self.planned.trials
            if trial.role is Role.BASELINE or trial.counts_as_baseline
        )
        compared = min(heuristic, key=_by_measured, default=None)
        if compared is None or compared.candidate.plan == best.candidate.plan:
            return None
        return Difference(best.candidate, compared.candidate, f"the heuristic's plan ({compared.name})")

    def _course(self) -> tuple[PageCandidate, ...]:
        """Return the candidates that were measured, as their trials ended."""
        ended = [(trial.end_time, trial.name) for trial in self.status.trials if trial.end_time is not None]
        in_order = (self.candidates.get(name) for _, name in sorted(ended, key=itemgetter(0)))
        return tuple(each for each in in_order if each is not None and each.measured_seconds is not None)

    def _timeline(self) -> Timeline | None:
        if not self.request.report:
            return None
        report: WorkerReport = documents.loads(self.request.report, WorkerReport, source="report")
        return report.timeline if isinstance(report, TrialReport) else None

    def _sentences(self, best: PageCandidate) -> list[str]:
        """Return the answer as its condition says it, and what of it no drawing shows."""
        succeeded = self.status.condition(ConditionType.SUCCEEDED)
        lines = [f"{succeeded.message}."] if succeeded is not None else []
        predicted, measured = best.candidate.estimate.iteration_seconds, best.measured_seconds
        if measured:
            error = (predicted - measured) / measured
            lines.append(
                f"The cost model predicted {seconds(predicted)}, {abs(error):.1%} {'more' if error > 0 else 'less'}."
            )
        state = self.states.get(best.name)
        if state is not None and state.peak_memory_bytes and state.predicted_peak_memory_bytes:
            measured_bytes, expected_bytes = map(
                format_bytes, (state.peak_memory_bytes, state.predicted_peak_memory_bytes)
            )
            lines.append(f"The fullest device held {measured_bytes}, where {expected_bytes} were predicted.")
        spent = sum(used.total for used in self.status.device_seconds) / _HOUR_SECONDS
        if spent:
            lines.append(f"Measuring took {spent:.3g} device hours.")
        return lines


def _by_measured(each: PageCandidate) -> tuple[bool, float]:
    """Return the order of candidates: what was measured first, then by prediction."""
    measured = each.measured_seconds
    return measured is None, each.candidate.estimate.iteration_seconds if measured is None else measured


def cluster_commands(request: PageRequest) -> list[str]:
    """Return the commands that explain the winner again, from the ConfigMaps that the status names."""
    status = TrainingPlanStatus.model_validate_json(request.status)
    read = f"kubectl --namespace {request.namespace} get"
    documents_of = (
        (status.cluster_ref, "document", "cluster"),
        (status.cluster_ref, "runtime", "runtime"),
        (status.profiles_ref, "document", "profiles"),
    )
    files = " ".join(f"--{name} {name}.json" for name in ("plan", "cluster", "runtime", "profiles"))
    return [
        f"{read} trainingplan {request.plan} --output jsonpath='{{.status.winner.plan}}' > plan.json",
        *(
            f"{read} configmap {reference.config_map} --output jsonpath='{{.data.{key}\\.json}}' > {name}.json"
            for reference, key, name in documents_of
            if reference is not None
        ),
        f"trainwright explain {files} --model model.yaml  # spec.model and spec.training",
    ]


def read_request(fields: Mapping[str, Any]) -> PageRequest:
    """Return the request in JSON data."""
    return PageRequest(**{**fields, "question": PlanningRequest(**fields["question"])})


def main(concurrent: int) -> int:
    """Draw one page. `concurrent`: the number of processes that share the memory."""
    begin(concurrent)
    request = read_request(json.load(sys.stdin))
    try:
        page = draw_page(request, cluster_commands(request))
    except Exception as error:  # noqa: BLE001 - the status says what went wrong, whatever it is
        sys.stderr.write(plain_line(f"the page could not be drawn: {type(error).__name__}: {error}"))
        return 1
    sys.stdout.write(page)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
