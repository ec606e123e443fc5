"""Phase `Profiled`: every distinct layer on every accelerator at every tensor degree that a plan may use.

Waits for one gang per accelerator and tensor degree; each fails after `profiling.deadlineSeconds` of running, and is tried
again where the cluster ended it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Final, NamedTuple

from trainwright import documents
from trainwright.cluster import is_cpu
from trainwright.layer import Dtype
from trainwright.profiles import LayerProfile, LayerTooLarge, Profiles
from trainwright.runtime import ProcessBytes
from trainwright.search import RequiredProfile, required_profiles
from trainwright.worker_api import ProfilingReport, ProfilingTask, Progress
from trainwright_operator.api.spec import AUTO
from trainwright_operator.api.status import ConfigMapReference, TrainingPlanStatus
from trainwright_operator.flow.actions import CreateConfigMap, StoredRole
from trainwright_operator.flow.documents.discovered_devices import DiscoveredDevices
from trainwright_operator.flow.documents.number_formats import formats_to_profile, model_from_spec
from trainwright_operator.flow.documents.outcome import OutcomeState, result_in
from trainwright_operator.flow.documents.stored_documents import parse_strict
from trainwright_operator.flow.gangs.gang_spec import GangSpec
from trainwright_operator.flow.gangs.gang_step import GangStep
from trainwright_operator.flow.gangs.launchers.job_set import JobSetLauncher
from trainwright_operator.flow.gangs.launchers.registry import launcher_of
from trainwright_operator.flow.gangs.lifecycle import stored_result
from trainwright_operator.flow.gangs.pod_template import TASK_FILE
from trainwright_operator.flow.gangs.retries import find_retry
from trainwright_operator.flow.gangs.scheduling import is_gated
from trainwright_operator.flow.measurements.former_revision import former_revision
from trainwright_operator.flow.measurements.kept_measurements import advance_and_keep
from trainwright_operator.flow.measurements.reuse import describe_reuse, missing_kinds, partial_result, reuse_layers
from trainwright_operator.flow.names import DOCUMENT_KEY
from trainwright_operator.flow.phase import Done, Failed, Findings, PhaseResult, ReconcileContext, Waiting
from trainwright_operator.flow.reasons import Explanation, Reason, explain, explain_wait
from trainwright_operator.flow.snapshot import StoredConfigMap

MAX_CONCURRENT_PROFILES: Final = 2
"""Limit on concurrent runs: more would barely save time and would occupy devices that others could use."""
_MAX_NAMED: Final = 3
_MIN_SPEEDUP: Final = 1.5
"""Ratio to float32's rate below which a half format is not computed natively: units for it are at least twice as fast."""


class ProfilingRun(NamedTuple):
    """Profiling run with the name of its gang and its number format."""

    gang: str
    dtype: Dtype
    run: RequiredProfile


def profile(context: ReconcileContext, findings: Findings) -> PhaseResult:
    """Profile the layers, then store the profiles."""
    needed = needed_runs(context, findings.discovery)
    formats = dict.fromkeys(run.dtype for run in needed)
    measured: dict[Dtype, list[LayerProfile]] = {dtype: [] for dtype in formats}
    too_large: dict[Dtype, list[LayerTooLarge]] = {dtype: [] for dtype in formats}
    process_bytes: dict[str, int] = {}
    speedups: dict[tuple[Dtype, str], float] = {}
    unchecked: list[str] = []
    measured_at: datetime | None = None
    open_runs: list[ProfilingRun] = []
    for profiling_run in needed:
        dtype, run = profiling_run.dtype, profiling_run.run
        stored = stored_profiles(context, findings.discovery, profiling_run)
        if not stored:
            open_runs.append(profiling_run)
        for result in map(result_in, stored):
            if result.outcome.state is not OutcomeState.SUCCEEDED or not isinstance(result.report, ProfilingReport):
                where = f"profiling {run.accelerator} at tensor degree {run.tensor_degree}"
                return Failed(Explanation(result.outcome.reason, f"{where}: {result.outcome.message}"))
            measured_at = min(result.outcome.ended_at, measured_at or result.outcome.ended_at)
            measured[dtype].extend(result.report.layers)
            too_large[dtype].extend(result.report.out_of_memory)
            unchecked.extend(result.report.unchecked)
            if result.report.process_bytes is not None:
                largest = max(result.report.process_bytes, process_bytes.get(run.accelerator, 0))
                process_bytes[run.accelerator] = largest
            if result.report.format_speedup is not None:
                speedups[dtype, run.accelerator] = result.report.format_speedup
    if open_runs:
        return _advance_runs(context, findings.discovery, open_runs, total=len(needed))
    try:
        profiles = {
            dtype: Profiles(tuple(layers), too_large=tuple(too_large[dtype])) for dtype, layers in measured.items()
        }
    except ValueError as error:
        return Failed(explain(Reason.REPORT_INVALID, what=error))
    measured_bytes = tuple(ProcessBytes(*item) for item in process_bytes.items())
    links = replace(findings.links, runtime=replace(findings.links.runtime, process_bytes=measured_bytes))
    reused = describe_reuse(stored for run in needed for stored in stored_profiles(context, findings.discovery, run))
    remarks = _describe_slow_formats(speedups) + reused + _describe_unchecked(unchecked)
    return _store_profiles(context, replace(findings, links=links), profiles, remarks, measured_at)


def needed_runs(context: ReconcileContext, discovery: DiscoveredDevices) -> list[ProfilingRun]:
    """Return the profiling runs of every number format that may win, in order."""
    spec = context.spec
    needed: list[tuple[Dtype, RequiredProfile]] = []
    for choice in formats_to_profile(spec, discovery):
        nodes = [node for node in discovery.nodes if node.accelerator in choice.accelerators]
        model = model_from_spec(spec, choice.dtype)
        runs = required_profiles(nodes, model, spec.training.global_batch_size, spec.search.limits.max_tensor_degree)
        needed.extend((choice.dtype, run) for run in runs)
    return [ProfilingRun(f"profile-{number}", dtype, run) for number, (dtype, run) in enumerate(needed, start=1)]


def stored_profiles(
    context: ReconcileContext, discovery: DiscoveredDevices, run: ProfilingRun
) -> tuple[StoredConfigMap, ...]:
    """Return the ConfigMaps with the run's result, of this revision or of one before; none before it is whole.

    Two where a part was reused.
    """
    accelerator = next(accelerator for accelerator in discovery.accelerators if accelerator.name == run.run.accelerator)
    former = former_revision(context).profile_maps(run.dtype, accelerator, run.run)
    names = former or (context.names.result(run.gang), context.names.result(partial_result(run.gang)))
    config_maps = [context.snapshot.find(name) for name in names]
    return tuple(stored for stored in config_maps if stored is not None) if config_maps[0] is not None else ()


def _advance_runs(
    context: ReconcileContext, discovery: DiscoveredDevices, open_runs: list[ProfilingRun], *, total: int
) -> Waiting:
    """Advance the running profiles and start new ones up to the limit, each on the least used node.

    Those that wait for their next attempt take the place of none that may start.
    """
    tasks = {run.gang: context.snapshot.find(context.names.task(run.gang)) for run in open_runs}
    begun = [run for run in open_runs if tasks[run.gang] is not None]
    early = {run.gang: retry for run in open_runs if tasks[run.gang] is None
             and (retry := find_retry(context, run.gang)) is not None and context.now < retry.due_at}  # fmt: skip
    new = [run for run in open_runs if tasks[run.gang] is None and run.gang not in early]
    reused = {run.gang: creation for run in new if (creation := _reuse(context, discovery, run)) is not None}
    new = [run for run in new if run.gang not in reused]
    # Started runs keep their nodes, pinned or not, unless only another node has a free device.
    node_of = {gang: _node_of(stored) for gang, stored in tasks.items() if stored is not None}
    runs_by_node = Counter(node_of.values())
    steps = [(run, GangStep(reason=Reason.RUNNING, activity="reusing kept profiles", actions=(reused[run.gang],)))
             for run in open_runs if run.gang in reused]  # fmt: skip
    for profiling_run in (*begun, *new[: max(MAX_CONCURRENT_PROFILES - len(begun), 0)]):
        node = _best_node(context, discovery, profiling_run.run.accelerator, runs_by_node)
        if profiling_run.gang in node_of and _may_move(context, profiling_run.gang, node_of[profiling_run.gang], node):
            # The task and its pods are deleted; the next pass creates them anew.
            moves = f"moving to node {node}, as {node_of[profiling_run.gang]} has no free device"
            steps.append((profiling_run, GangStep(activity=moves, is_moving=True)))
            runs_by_node[node] += 1
            continue
        if profiling_run.gang not in node_of:
            runs_by_node[node] += 1
        steps.append((profiling_run, advance_and_keep(context, _wanted_gang(context, discovery, profiling_run, node))))
    steps.extend((run, GangStep.of_retry(early[run.gang])) for run in open_runs if run.gang in early)
    done = total - len(open_runs)
    running = "; ".join(
        f"{run.run.accelerator} at tensor degree {run.run.tensor_degree}: {step.activity}" for run, step in steps
    )
    pauses = [step.again_at for _, step in steps if step.again_at is not None]
    is_lacking = all(step.is_lacking for _, step in steps)
    what = f"{done} of {total} profiles measured; {running}"
    return Waiting(
        explain_wait(steps[0][1].reason, what) if is_lacking else explain(Reason.RUNNING, what=what),
        actions=tuple(action for _, step in steps for action in step.actions),
        progress=Progress(done, total, "profiles"),
        live_gangs=frozenset(run.gang for run, step in steps if step.is_live),
        is_lacking=is_lacking,
        again_at=min(pauses) if len(pauses) == len(steps) else None,
    )


def _node_of(task_map: StoredConfigMap) -> str:
    """Return the node of a profiling task. Raise DocumentError if it was modified."""
    task: ProfilingTask = parse_strict(task_map.data.get(TASK_FILE, ""), ProfilingTask, task_map.name)
    return task.gang.nodes[0].name


def _best_node(context: ReconcileContext, discovery: DiscoveredDevices, accelerator: str, taken: Counter[str]) -> str:
    """Return the accelerator's node with a free device, drifted, with the fewest of our profiles, then the most free devices."""
    drifted = former_revision(context).drifted

    def order(name: str) -> tuple[bool, bool, int, int, str]:
        free = _free_devices(context, name)
        return free <= 0, name not in drifted, taken[name], -free, name

    return min((node.name for node in discovery.nodes if node.accelerator == accelerator), key=order)


def _may_move(context: ReconcileContext, gang: str, node: str, better: str) -> bool:
    """Return whether the gang waits at a node without a free device while a better one has some.

    Kueue does not admit a job that names such a node.
    """
    pods = context.snapshot.pods_of(gang)
    launcher = launcher_of(context.snapshot.find(context.names.task(gang)))
    is_named = isinstance(launcher, JobSetLauncher) and node in launcher.named_nodes
    is_suspended = any(job.suspended for job in context.snapshot.jobs_of(gang))
    waits = is_suspended if is_named else bool(pods) and all(is_gated(pod) for pod in pods)
    return waits and _free_devices(context, node) <= 0 < _free_devices(context, better)


def _free_devices(context: ReconcileContext, name: str) -> int:
    """Return how many devices of a node are free; 0 where it is gone, not ready or cordoned."""
    node = context.nodes.get(name)
    if node is None or not node.ready or not node.schedulable:
        return 0
    return node.devices(context.spec.devices.resource_name) - context.snapshot.used_devices.get(name, 0)


def _reuse(context: ReconcileContext, discovery: DiscoveredDevices, run: ProfilingRun) -> CreateConfigMap | None:
    node = next(node.name for node in discovery.nodes if node.accelerator == run.run.accelerator)
    return reuse_layers(context, discovery, run.gang, _task(context, discovery, run, node))


def _wanted_gang(context: ReconcileContext, discovery: DiscoveredDevices, run: ProfilingRun, node: str) -> GangSpec:
    """Return the gang that measures a run on a node, without the layers that are known."""
    task, seconds = _task(context, discovery, run, node), context.spec.profiling.deadline_seconds
    partial = stored_result(context, partial_result(run.gang))
    if partial is not None and isinstance(partial.report, ProfilingReport):
        task = replace(task, kinds=missing_kinds(task, partial.report))
    return GangSpec(run.gang, task, pending_seconds=seconds, run_seconds=seconds)


def _task(context: ReconcileContext, discovery: DiscoveredDevices, run: ProfilingRun, node: str) -> ProfilingTask:
    limits = context.spec.profiling
    return ProfilingTask(
        gang=discovery.make_gang(_places(discovery, node), run_seconds=limits.deadline_seconds),
        model=model_from_spec(context.spec, run.dtype),
        tensor_degree=run.run.tensor_degree,
        rows=run.run.rows,
        optimizer=context.spec.training.optimizer,
        warmup_iterations=limits.warmup_iterations,
        iterations=limits.iterations,
    )


def _places(discovery: DiscoveredDevices, node: str) -> list[tuple[str, tuple[int, ...]]]:
    """Return the device to profile on; on a CPU also the others, which compute the same, so that it is as busy as in trials."""
    accelerator = next(each.accelerator for each in discovery.nodes if each.name == node)
    further = [each.name for each in discovery.nodes if each.name != node and is_cpu(accelerator)]
    return [(name, (0,)) for name in (node, *further)]


def _store_profiles(
    context: ReconcileContext,
    findings: Findings,
    profiles: Mapping[Dtype, Profiles],
    remarks: str,
    measured_at: datetime | None,
) -> PhaseResult:
    """Store the profiles of each number format in a ConfigMap, the first one's under the name of all former versions.

    `remarks`: clauses on how they were measured; `measured_at`: when the oldest of them was.
    """
    names = {dtype: context.names.profiles_in(dtype) if number else context.names.profiles
             for number, dtype in enumerate(profiles)}  # fmt: skip
    stored = {dtype: context.stored_document(name, Profiles) for dtype, name in names.items()}
    kept = tuple((dtype, profiles) for dtype, profiles in stored.items() if profiles is not None)
    if len(kept) < len(profiles):
        creations = tuple(
            CreateConfigMap(names[dtype], StoredRole.DOCUMENT, {DOCUMENT_KEY: documents.dumps(profiles[dtype])})
            for dtype, stored_profile in stored.items()
            if stored_profile is None
        )
        return Waiting(actions=creations, progress=Progress(0, 1, "storing profiles"))
    layers = [layer for _, profiles in kept for layer in profiles.layers]
    accelerators = ", ".join(dict.fromkeys(layer.accelerator for layer in layers)) or "no accelerator"
    chosen = f" in {' and '.join(profiles)}" if context.spec.training.dtype == AUTO else ""
    lacking = "".join(_describe_too_large(profiles) for _, profiles in kept)
    return Done(
        replace(findings, profiles=kept),
        explain(
            Reason.PROFILED,
            profiles=len(layers),
            accelerators=accelerators + chosen,
            lacking=lacking,
            slow="".join(_describe_slow_layers(profiles) for _, profiles in kept),
            remarks=remarks,
        ),
        status=TrainingPlanStatus(
            profiles_ref=ConfigMapReference(config_map=context.names.profiles), profiles_measured_at=measured_at
        ),
    )


def _describe_slow_formats(speedups: Mapping[tuple[Dtype, str], float]) -> str:
    """Return a clause on the half formats that measured devices do not compute natively, or an empty string."""
    return "".join(
        f"; matrix products in {dtype} are {speedup:.1f} times as fast as in float32 on {accelerator}, which emulates them"
        for (dtype, accelerator), speedup in speedups.items()
        if speedup < _MIN_SPEEDUP
    )


def _describe_unchecked(sentences: list[str]) -> str:
    """Return a clause on what of a user's model neither its description nor a gang checked, or an empty string."""
    first, *others = dict.fromkeys(sentences) or ("",)
    more = f", and {len(others)} more" if others else ""
    return f"; not checked: {first}{more}" if first else ""


def _describe_slow_layers(kept: Profiles) -> str:
    """Return clauses on the layers whose attention stores all scores and on those that the host bounds, or an empty string."""
    stored = [
        f"; attention of {' and '.join(kinds)} stores all scores on {name}"
        for name, kinds in kept.kinds_that_store_scores().items()
    ]
    bound = [
        f"; the host, not the GPU, bounds {' and '.join(kinds)} on {name}"
        for name, kinds in kept.host_bound_kinds().items()
    ]
    return "".join([*stored, *bound])


def _describe_too_large(kept: Profiles) -> str:
    """Return a clause on the layers that did not fit into memory, or an empty string."""
    if not kept.too_large:
        return ""
    descriptions = [
        f"{layer.kind} on {layer.accelerator} from {layer.rows} rows at tensor degree {layer.tensor_degree}"
        for layer in kept.too_large[:_MAX_NAMED]
    ]
    more = len(kept.too_large) - _MAX_NAMED
    also = f" and {more} more" if more > 0 else ""
    unused = kept.accelerators_without_memory()
    spared = f", so no plan uses {', '.join(unused)}" if unused else ""
    return f"; out of memory: {', '.join(descriptions)}{also}{spared}"
