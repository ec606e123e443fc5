"""Phase `Profiled`: every distinct layer on every accelerator at every tensor degree that a plan may use.

Waits for one gang per accelerator and tensor degree; each fails after `profiling.deadlineSeconds` of waiting and running
together.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Final

from trainwright import documents
from trainwright.profiles import LayerProfile, LayerTooLarge, Profiles
from trainwright.runtime import ProcessBytes
from trainwright.search import RequiredProfile, required_profiles
from trainwright.worker_api import ProfilingReport, ProfilingTask, Progress
from trainwright_operator.api.conditions import ConditionType
from trainwright_operator.api.status import ConfigMapReference, TrainingPlanStatus
from trainwright_operator.flow.actions import CreateConfigMap, StoredRole
from trainwright_operator.flow.discovered_devices import DiscoveredDevices
from trainwright_operator.flow.gangs.lifecycle import GangStep, advance, stored_result
from trainwright_operator.flow.gangs.manifests import GangSpec
from trainwright_operator.flow.gangs.outcome import OutcomeState
from trainwright_operator.flow.gangs.pod_template import TASK_FILE
from trainwright_operator.flow.gangs.worker_log import parse_strict
from trainwright_operator.flow.names import DOCUMENT_KEY
from trainwright_operator.flow.phase import Done, Failed, Findings, PhaseResult, PlanPhase, ReconcileContext, Waiting
from trainwright_operator.flow.phases.acceptance import model_from_spec
from trainwright_operator.flow.reasons import Explanation, Reason, explain

MAX_CONCURRENT_PROFILES: Final = 2
"""Limit on concurrent runs: more would barely save time and would occupy devices that others could use."""
_MAX_NAMED: Final = 3


def profile(context: ReconcileContext, findings: Findings) -> PhaseResult:
    """Profile the layers, then store the profiles."""
    limits = context.spec.search.limits
    model = model_from_spec(context.spec)
    batch = context.spec.training.global_batch_size
    needed = required_profiles(findings.discovery.nodes, model, batch, limits.max_tensor_degree)
    measured: list[LayerProfile] = []
    too_large: list[LayerTooLarge] = []
    process_bytes: dict[str, int] = {}
    open_runs: list[tuple[str, RequiredProfile]] = []
    for number, run in enumerate(needed, start=1):
        gang = f"profile-{number}"
        result = stored_result(context, gang)
        if result is None:
            open_runs.append((gang, run))
        elif result.outcome.state is not OutcomeState.SUCCEEDED or not isinstance(result.report, ProfilingReport):
            where = f"profiling {run.accelerator} at tensor degree {run.tensor_degree}"
            return Failed(Explanation(result.outcome.reason, f"{where}: {result.outcome.message}"))
        else:
            measured.extend(result.report.layers)
            too_large.extend(result.report.out_of_memory)
            if result.report.process_bytes is not None:
                largest = max(result.report.process_bytes, process_bytes.get(run.accelerator, 0))
                process_bytes[run.accelerator] = largest
    if open_runs:
        return _advance_runs(context, findings.discovery, open_runs, total=len(needed))
    try:
        profiles = Profiles(tuple(measured), too_large=tuple(too_large))
    except ValueError as error:
        return Failed(explain(Reason.REPORT_INVALID, what=error))
    held = tuple(ProcessBytes(*one) for one in process_bytes.items())
    links = replace(findings.links, runtime=replace(findings.links.runtime, process_bytes=held))
    return _store_profiles(context, replace(findings, links=links), profiles)


def _advance_runs(
    context: ReconcileContext, discovery: DiscoveredDevices, open_runs: list[tuple[str, RequiredProfile]], *, total: int
) -> Waiting:
    """Advance the running profiles and start new ones up to the limit, each on the least used node."""
    tasks = {gang: context.snapshot.find(context.names.task(gang)) for gang, _ in open_runs}
    begun = [(gang, run) for gang, run in open_runs if tasks[gang] is not None]
    new = [(gang, run) for gang, run in open_runs if tasks[gang] is None]
    new = new[: max(MAX_CONCURRENT_PROFILES - len(begun), 0)]
    texts = (stored.data.get(TASK_FILE, "") for stored in tasks.values() if stored is not None)
    # Started runs keep their nodes, pinned or not.
    runs_by_node = Counter(parse_strict(text, ProfilingTask, "order").gang.nodes[0].name for text in texts)
    steps: list[tuple[RequiredProfile, GangStep]] = []
    for gang, run in (*begun, *new):
        node = _least_used_node(context, discovery, run.accelerator, runs_by_node)
        if tasks[gang] is None:
            runs_by_node[node] += 1
        steps.append((run, advance(context, _wanted_gang(context, discovery, gang, run, node))))
    done = total - len(open_runs)
    running = "; ".join(
        f"{run.accelerator} at tensor degree {run.tensor_degree}: {step.activity}" for run, step in steps
    )
    waits = all(step.reason is Reason.WAITING_FOR_CAPACITY for _, step in steps)
    reason = Reason.WAITING_FOR_CAPACITY if waits else Reason.RUNNING
    return Waiting(
        explain(reason, what=f"{done} of {total} profiles measured; {running}"),
        actions=tuple(action for _, step in steps for action in step.actions),
        progress=Progress(done, total, "profiles"),
        live_gangs=frozenset(gang for gang, _ in (*begun, *new)),
    )


def _least_used_node(
    context: ReconcileContext, discovery: DiscoveredDevices, accelerator: str, taken: Counter[str]
) -> str:
    """Return the accelerator's node with the fewest of our profiles, then the most free devices."""

    def use(name: str, devices: int) -> tuple[int, int, str]:
        return taken[name], context.snapshot.used_devices.get(name, 0) - devices, name

    return min(use(node.name, node.devices) for node in discovery.nodes if node.accelerator == accelerator)[2]


def _wanted_gang(
    context: ReconcileContext, discovery: DiscoveredDevices, gang: str, run: RequiredProfile, node: str
) -> GangSpec:
    limits = context.spec.profiling
    seconds = limits.deadline_seconds
    task = ProfilingTask(
        gang=discovery.make_gang([(node, (0,))], run_seconds=seconds),
        model=model_from_spec(context.spec),
        tensor_degree=run.tensor_degree,
        rows=run.rows,
        optimizer=context.spec.training.optimizer,
        warmup_iterations=limits.warmup_iterations,
        iterations=limits.iterations,
    )
    return GangSpec(gang, task, pending_seconds=seconds, run_seconds=seconds, deadline_seconds=seconds)


def _store_profiles(context: ReconcileContext, findings: Findings, profiles: Profiles) -> PhaseResult:
    name = context.names.profiles
    kept = context.stored_document(name, Profiles)
    if kept is None:
        data = {DOCUMENT_KEY: documents.dumps(profiles)}
        return Waiting(
            actions=(CreateConfigMap(name, StoredRole.DOCUMENT, data),), progress=Progress(0, 1, "storing profiles")
        )
    accelerators = ", ".join(dict.fromkeys(layer.accelerator for layer in kept.layers)) or "no accelerator"
    lacking = _describe_too_large(kept)
    return Done(
        replace(findings, profiles=kept),
        explain(Reason.PROFILED, profiles=len(kept.layers), accelerators=accelerators, lacking=lacking),
        status=TrainingPlanStatus(profiles_ref=ConfigMapReference(config_map=name)),
    )


def _describe_too_large(kept: Profiles) -> str:
    """Return a clause on the layers that did not fit into memory, or an empty string."""
    if not kept.too_large:
        return ""
    told = [
        f"{one.kind} on {one.accelerator} from {one.rows} rows at tensor degree {one.tensor_degree}"
        for one in kept.too_large[:_MAX_NAMED]
    ]
    more = len(kept.too_large) - _MAX_NAMED
    also = f" and {more} more" if more > 0 else ""
    unused = kept.accelerators_without_memory()
    spared = f", so no plan uses {', '.join(unused)}" if unused else ""
    return f"; out of memory: {', '.join(told)}{also}{spared}"


PHASE = PlanPhase(ConditionType.PROFILED, (profile,))
