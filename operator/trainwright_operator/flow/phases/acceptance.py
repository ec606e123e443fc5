"""Phase `Accepted`: the spec is valid, a worker image is set, and the API server admits the pods.

Waits for the answer to a dry run, which the next pass has. A template that the API server calls invalid ends the plan;
where the cluster lacks the CRD, or forbids the job (a quota, missing rights, a policy), the dry run is repeated. A part of
the spec that the installation does not allow is waited for: the operator may be installed otherwise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

from trainwright import documents
from trainwright.families import Custom
from trainwright.layer import Dtype
from trainwright.outside.plain_text import find_control
from trainwright.worker_api import Gang, GangNode, LinkTask
from trainwright_operator.api.conditions import ConditionType
from trainwright_operator.api.frameworks import Apply
from trainwright_operator.api.installation import NO_JOBS, HandoverRule
from trainwright_operator.api.pods import PodTemplate
from trainwright_operator.api.spec import LauncherKind, TrainingPlanSpec
from trainwright_operator.api.status import TrainingPlanStatus
from trainwright_operator.flow.actions import Action, DryRunJob, StoredRole
from trainwright_operator.flow.documents.number_formats import check_format, model_from_spec
from trainwright_operator.flow.documents.outcome import parse_outcome
from trainwright_operator.flow.gangs.framework_log import check_framework
from trainwright_operator.flow.gangs.gang_spec import GangSpec
from trainwright_operator.flow.gangs.launchers.launcher import Launcher
from trainwright_operator.flow.gangs.launchers.registry import possible_launchers
from trainwright_operator.flow.gangs.pod_limits import find_template_excess
from trainwright_operator.flow.phase import Done, Failed, Findings, PhaseResult, ReconcileContext, Waiting
from trainwright_operator.flow.phases.plan_places import wait_for_place
from trainwright_operator.flow.reasons import Explanation, Reason, explain
from trainwright_operator.flow.trials.device_time import discard_result

_PROBE = GangSpec(
    name="dry-run",
    task=LinkTask(gang=Gang(nodes=(GangNode("a", (0,), "a"), GangNode("b", (0,), "b")))),
    pending_seconds=60,
    run_seconds=60,
)
"""Gang of two pods, rendered for the dry run and never created."""
_REPEATED = (Reason.PYTORCHJOB_MISSING, Reason.JOBSET_MISSING, Reason.JOB_REFUSED)


def accept(context: ReconcileContext, findings: Findings) -> PhaseResult:
    """Accept the model, the image and the pods once for each generation, and what the pods may have at every pass."""
    refusal = _find_excess(context)
    if refusal is not None:
        return Waiting(refusal, live_gangs=context.current_gangs, is_lacking=True)
    accepted = context.condition(ConditionType.ACCEPTED)
    is_known = (
        accepted is not None and accepted.status == "True" and accepted.observed_generation == context.plan.generation
    )
    failure = None if is_known else _find_failure(context)
    if failure is not None:
        return Failed(failure)
    waiting = wait_for_place(context)
    if waiting is not None:
        return waiting
    return Done(findings, status=_chosen(context)) if is_known else _try_templates(context, findings)


def _find_failure(context: ReconcileContext) -> Explanation | None:
    """Explain why no plan of this spec can be made, or return None."""
    try:
        model = model_from_spec(context.spec, Dtype.FLOAT32)
        check_format(context.spec)
        if context.spec.trials.framework is not None:
            check_framework(context.spec.trials.framework, model.family)
        _refuse_controls(context)
    except ValueError as error:
        return explain(Reason.SPEC_INVALID, what=error)
    return None if context.plan.image else explain(Reason.WORKER_IMAGE_MISSING)


def _find_excess(context: ReconcileContext) -> Explanation | None:
    """Explain the first part of the spec that the installation does not allow, or return None."""
    spec, rules = context.spec, context.snapshot.rules
    priority = rules.limits.explain_priority(spec.priority)
    if priority is not None:
        return explain(Reason.PRIORITY_NOT_ALLOWED, what=priority)
    excesses = ((place, find_template_excess(template, rules)) for place, template in _templates(spec).items())
    sentences = (excess.sentence(place) for place, excess in excesses if excess is not None)
    return next((explain(Reason.POD_TEMPLATE_NOT_ALLOWED, what=sentence) for sentence in sentences), None)


def _templates(spec: TrainingPlanSpec) -> Mapping[str, PodTemplate]:
    """Return the pod templates of a spec by their place."""
    templates = {"spec.worker.podTemplate": spec.worker.pod_template}
    if spec.trials.framework is not None:
        templates["spec.trials.framework.podTemplate"] = spec.trials.framework.pod_template
    if spec.job is not None:
        templates["spec.job.podTemplate"] = spec.job.pod_template
    return templates


def _refuse_controls(context: ReconcileContext) -> None:
    """Raise ValueError for a control character in a pod template, of which the resource's definition sees little."""
    for place, template in _templates(context.spec).items():
        control = find_control({"metadata": template.metadata.model_dump(), "spec": template.spec})
        if control is not None:
            raise ValueError(
                f"{place}.{control[0]}: holds the control or invisible character {control[1]}, which can hide or falsify what the "
                "text says; remove it"
            )


def _try_templates(context: ReconcileContext, findings: Findings) -> PhaseResult:
    """Ask the API server for a dry run of a job with each pod template of the gangs: of the first launcher that it knows."""
    launchers, gangs = possible_launchers(context.snapshot), _gangs_by_template(context)
    tried = context.snapshot.dry_run
    probes = [_probe(context, launcher, gang_spec) for launcher in launchers for gang_spec in gangs.values()]
    number = next((at for at, probe in enumerate(probes) if tried and tried.key.startswith(probe.key)), None)
    if tried is None or number is None:
        return Waiting(actions=(probes[0],), live_gangs=context.current_gangs)
    launcher, template = launchers[number // len(gangs)], tuple(gangs)[number % len(gangs)]
    following = (probes[number + 1].repeated(context.now)[0],) if (number + 1) % len(gangs) else ()
    is_other = launcher is not launchers[0]
    if not tried.reason and (following or is_other):
        # Kept before the plan goes on, since its gangs do not change their launcher.
        chosen = TrainingPlanStatus(launcher=LauncherKind(launcher.kind)) if is_other else TrainingPlanStatus()
        return Waiting(status=chosen, actions=following, live_gangs=context.current_gangs)
    if not tried.reason:
        return Done(findings, _acceptance(context), status=_chosen(context))
    is_missing = tried.reason == launcher.missing
    reason = launchers[0].missing if is_missing else Reason(tried.reason)
    alternative = " or JobSet" if len(launchers) > 1 else ""
    explanation = explain(reason, what=tried.message, kind=launcher.kind, alternative=alternative, template=template)
    if reason not in _REPEATED:
        return Failed(explanation)
    tries_other = is_missing and launcher is not launchers[-1]
    # A refusal of the first template begins with the first launcher again, which may be there now.
    refused = number if number % len(gangs) else 0
    again, due_at = probes[len(gangs) if tries_other else refused].repeated(context.now)
    if tries_other and tried.key == probes[number].key:
        return Waiting(actions=(again,), live_gangs=context.current_gangs)  # nothing is known to be missing yet
    is_early = not tries_other and tried.key == probes[number].repeated(context.now)[0].key
    return Waiting(
        explanation,
        actions=() if is_early else (again,),
        live_gangs=context.current_gangs,
        is_lacking=True,
        again_at=due_at,
    )


def _acceptance(context: ReconcileContext) -> Explanation:
    """Return that the spec is valid, and which wish of it this installation does not fulfil."""
    accepted = explain(Reason.ACCEPTED)
    family = context.spec.model.family
    if isinstance(family, Custom) and family.unchecked:
        accepted = Explanation(accepted.reason, f"{accepted.message}; {family.unchecked}")
    is_allowed = context.snapshot.rules.handover.rule is not HandoverRule.NEVER or context.plan.status.job is not None
    if context.spec.apply is Apply.NEVER or is_allowed:
        return accepted
    what = f"{accepted.message}, but apply: {context.spec.apply} creates no job of the winner: {NO_JOBS}"
    return Explanation(accepted.reason, what)


def _chosen(context: ReconcileContext) -> TrainingPlanStatus:
    """Return the status with the launcher that was chosen for a plan without a wish, if it is not the usual one."""
    chosen = context.plan.status.launcher if context.spec.launcher is None else None
    return TrainingPlanStatus() if chosen is None else TrainingPlanStatus(launcher=chosen)


def _gangs_by_template(context: ReconcileContext) -> Mapping[str, GangSpec]:
    """Return a gang for each pod template that gangs have: the workers', and that of the trials if it is another."""
    framework = context.spec.trials.framework
    of_trials = {"spec.trials.framework.podTemplate": replace(_PROBE, framework=framework)} if framework else {}
    return {"spec.worker.podTemplate": _PROBE, **of_trials}


def _probe(context: ReconcileContext, launcher: Launcher, gang_spec: GangSpec) -> DryRunJob:
    """Return a dry run of the launcher's first object of a gang."""
    manifest = launcher.manifests(context, gang_spec)[0]
    return DryRunJob(hashlib.sha256(f"{context.plan.generation} {manifest}".encode()).hexdigest(), manifest)


def discard_transient_failures(context: ReconcileContext, findings: Findings) -> PhaseResult:
    """Delete environmental failures of former generations and versions, so that their gangs run again."""
    discards: list[Action] = []
    for stored in context.snapshot.stored:
        if stored.role != StoredRole.RESULT or stored.terminating or not context.names.owns(stored.name):
            continue
        try:
            outcome = parse_outcome(stored)
        except documents.DocumentError:
            continue  # reported where the result is read
        if not outcome.counts_for(context.plan.generation):
            discards.extend(discard_result(context, stored))
    if discards:
        return Waiting(actions=tuple(discards), live_gangs=context.current_gangs)
    return Done(findings)
