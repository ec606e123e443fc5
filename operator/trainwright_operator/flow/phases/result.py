"""Phase `Succeeded`: the winner with its speed-up over the baseline and its price, and the job that trains by it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from trainwright import documents
from trainwright.cluster import Cluster, PricedBy, price_per_hour
from trainwright.plan import Plan
from trainwright.throughput import throughput, tokens_per_second_per_device
from trainwright.training_run import price_per_row
from trainwright_operator.api.frameworks import Apply
from trainwright_operator.api.handed_over import HandedOverJob
from trainwright_operator.api.installation import NO_JOBS, HandoverRule
from trainwright_operator.api.spec import Objective
from trainwright_operator.api.status import TrainingPlanStatus, Winner
from trainwright_operator.flow.documents.discovered_devices import DiscoveredDevices
from trainwright_operator.flow.documents.number_formats import model_from_spec
from trainwright_operator.flow.documents.planned_trials import PlannedTrial, Role, only_accelerator
from trainwright_operator.flow.gangs.kueue import explain_problem
from trainwright_operator.flow.patience import explain_exhaustion, explain_lack, waiting_since
from trainwright_operator.flow.phase import Done, Findings, MeasuredTrial, PhaseResult, ReconcileContext, Waiting
from trainwright_operator.flow.phases.discovery import find_lost_nodes, listed
from trainwright_operator.flow.phases.handover import hand_over
from trainwright_operator.flow.reasons import Explanation, Reason, explain
from trainwright_operator.flow.trials.comparison import explain_doubt, explain_operators

_MIN_WAIT_SECONDS: Final = 60.0
"""Shortest wait for nodes or the job of the winner, two dry runs long."""
_PRICED: Final = {PricedBy.NODE: "whole nodes", PricedBy.DEVICE: "the devices"}


def select_winner(context: ReconcileContext, findings: Findings) -> PhaseResult:
    """Select the winner, and hand it over where the spec asks for it.

    While a node of it is gone there is no answer: the node comes back, or the nodes are discovered anew once it has been
    gone for `settlingSeconds`. A plan that may wait no longer has its answer all the same, but hands nothing over.
    """
    trial, status, explanation = _answer(context, findings)
    waiting = _wait_for_nodes(context, findings.discovery, trial, status)
    job = waiting if waiting is not None else hand_over(context, findings.discovery, trial, status)
    cause = None
    if isinstance(job, Waiting):
        cause = _exhausted_wait(context, job)
        if cause is None:
            return job
        job = context.plan.status.job
    if job is not None:
        status = status.model_copy(update={"job": job})
    further = _explain_job(context, job, cause)
    return Done(findings, Explanation(explanation.reason, explanation.message + further), status=status)


def _explain_job(context: ReconcileContext, job: HandedOverJob | None, cause: Explanation | None) -> str:
    """Return what the answer says of the job; `cause`: what is waited for no longer."""
    asks, rule = context.spec.apply is not Apply.NEVER, context.snapshot.rules.handover.rule
    if job is None and asks and rule is HandoverRule.NEVER:
        return f"; no job of it is created: {NO_JOBS}"
    if job is None:
        return f"; no job of it was created: {cause.message}" if cause is not None and asks else ""
    if job.owned and not asks:
        return f"; the {job.kind} {job.names[0]} could not be ended: {cause.message}" if cause is not None else ""
    owner = ", which is the plan's own" if job.owned else ""
    incomplete = f", which may be incomplete: {cause.message}" if cause is not None else ""
    return f"; the job of this plan is the {job.kind} {job.names[0]}{owner}{incomplete}"


def _exhausted_wait(context: ReconcileContext, last: Waiting) -> Explanation | None:
    """Return what is waited for no longer, `spec.waitDeadlineSeconds` being over; None while it is waited for.

    The job of the winner has a while even if trials used up the limit: the first refusal may be over soon.
    """
    lack = explain_lack(context, last.explanation, is_lacking=last.is_lacking)
    if lack is None or explain_exhaustion(context, lack) is None:
        return None
    failing = context.snapshot.failing
    since = failing.since if failing is not None else waiting_since(context, lack.reason)
    return lack if since is not None and (context.now - since).total_seconds() >= _MIN_WAIT_SECONDS else None


def _wait_for_nodes(
    context: ReconcileContext, discovery: DiscoveredDevices, winner: PlannedTrial, status: TrainingPlanStatus
) -> Waiting | None:
    """Return the wait for nodes of the winner that are gone; None if there are none."""
    gone = _lost_nodes(context, discovery, winner)
    if not gone:
        return None
    what = f"nodes of the winner; {listed(gone)}"
    waiting = explain(Reason.WAITING_FOR_NODES, seconds=context.spec.settling_seconds, what=what)
    return Waiting(waiting, is_lacking=True, status=status)


def _lost_nodes(context: ReconcileContext, discovery: DiscoveredDevices, winner: PlannedTrial) -> list[str]:
    """Return a sentence for each node of the winner that the plan cannot use any more."""
    if explain_problem(context) is not None:
        return []  # nobody knows which nodes the queue gives
    used = {device.node for device in winner.plan.devices}
    lost = find_lost_nodes(context.snapshot, context.spec, discovery)
    return [f"{name}: {problem}" for name, problem in lost.items() if name in used]


def _answer(context: ReconcileContext, findings: Findings) -> tuple[PlannedTrial, TrainingPlanStatus, Explanation]:
    """Return the fastest measured plan (the cheapest where cost is the objective), candidates and baselines alike.

    Without trials, return the planner's first candidate.
    """
    discovery, cluster, best = findings.discovery, findings.links.cluster, findings.planned.best
    if context.spec.trials.top_k == 0:
        status = TrainingPlanStatus(winner=_winner(context, findings, best))
        return best, status, explain(Reason.PLANNED_ONLY, best=best.predicted_seconds)
    is_cost = context.spec.search.objective is Objective.COST

    def worth(measured: MeasuredTrial) -> tuple[float, int]:
        seconds, trial = measured.seconds, measured.planned
        price = _price_per_sample(trial.plan, seconds, cluster) if is_cost else None
        return (seconds if price is None else price), trial.overall_rank

    best_trial = min(findings.measured, key=worth)
    seconds, winner = best_trial.seconds, best_trial.planned
    speedup = _Speedup.of(findings, best_trial)
    price = _price_per_sample(winner.plan, seconds, cluster)
    explanation = explain(
        Reason.BEST_TRIAL_SELECTED,
        trial=winner.name,
        seconds=seconds,
        price="" if price is None else f", {price:.4g} per sample by the price of {_PRICED[cluster.priced_by]}",
        speedup=speedup.words if speedup is not None else "",
        operators=explain_operators(findings.measured),
        emulated=" (emulated devices)" if discovery.emulations() else "",
    )
    certain = speedup if speedup is not None and not speedup.doubt else None
    status = TrainingPlanStatus(winner=_winner(context, findings, winner, seconds, certain))
    return winner, status, explanation


@dataclass(frozen=True, slots=True)
class _Speedup:
    """Seconds of the best measured baseline over the winner's.

    Attributes:
        accelerator: type of the baseline's devices; None where it is on several types, and where there is but one.
        doubt: clause on why it means nothing; empty where it does.
    """

    ratio: float
    accelerator: str | None
    doubt: str = ""

    @classmethod
    def of(cls, findings: Findings, winner: MeasuredTrial) -> _Speedup | None:
        """Return the speed-up of the winner; None without a measured baseline."""
        baselines = [
            measured
            for measured in findings.measured
            if measured.planned.role is Role.BASELINE or measured.planned.counts_as_baseline
        ]
        if not baselines:
            return None
        baseline = min(baselines, key=lambda measured: measured.seconds)
        doubt = explain_doubt(winner.report, baseline.report) if baseline is not winner else ""
        only = only_accelerator(baseline.planned.plan, findings.discovery.nodes)
        return cls(baseline.seconds / winner.seconds, only, doubt)

    @property
    def words(self) -> str:
        if self.doubt:
            return f", not told apart from the baseline: {self.doubt}"
        where = f" on {self.accelerator} alone" if self.accelerator is not None else ""
        return f", {self.ratio:.2f} × as fast as the baseline{where}"


def _price_per_sample(plan: Plan, seconds: float, cluster: Cluster) -> float | None:
    """Return the price of training on one row, given seconds per iteration, or None where a price is unknown."""
    price = price_per_hour(cluster, plan.devices)
    return None if price is None else price_per_row(price, seconds, plan.global_batch_size)


def _winner(
    context: ReconcileContext,
    findings: Findings,
    trial: PlannedTrial,
    measured_seconds: float | None = None,
    speedup: _Speedup | None = None,
) -> Winner:
    discovery, plan = findings.discovery, trial.plan
    seconds = trial.predicted_seconds if measured_seconds is None else measured_seconds
    model = model_from_spec(context.spec, trial.dtype)
    speed = throughput([seconds], plan, model, findings.links.cluster)
    return Winner(
        trial=trial.name if measured_seconds is not None else None,
        summary=trial.summary[:512],
        dtype=trial.dtype,
        predicted_rank=trial.overall_rank,
        predicted_seconds=trial.predicted_seconds,
        measured_seconds=measured_seconds,
        speedup_over_baseline=speedup.ratio if speedup is not None else None,
        baseline_accelerator=speedup.accelerator if speedup is not None else None,
        tokens_per_second_per_device=tokens_per_second_per_device(speed, plan),
        model_flop_utilisation=speed.utilisation,
        price_per_sample=_price_per_sample(plan, seconds, findings.links.cluster),
        emulated=bool(discovery.emulations()),
        revision=context.names.revision,
        plan=documents.dump(replace(plan, dtype=model.dtype)),
    )
