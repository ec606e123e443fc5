"""Phase `Profiled`: every distinct layer on every accelerator at every tensor degree that a plan may use."""

from __future__ import annotations

from collections import Counter
from typing import Final

from trainwright import documents
from trainwright.profiles import LayerProfile, LayerTooLarge, Profiles
from trainwright.search import RequiredProfile, required_profiles
from trainwright.worker_api import ProfilingReport, ProfilingTask
from trainwright_operator.api.conditions import ConditionType
from trainwright_operator.api.status import ConfigMapReference, Phase
from trainwright_operator.flow.actions import StoredRole
from trainwright_operator.flow.gangs.lifecycle import GangStep, advance, stored_result
from trainwright_operator.flow.gangs.manifests import GangSpec
from trainwright_operator.flow.gangs.outcome import OutcomeState
from trainwright_operator.flow.gangs.pod_template import TASK_FILE
from trainwright_operator.flow.gangs.worker_log import parse_strict
from trainwright_operator.flow.phases.acceptance import model_from_spec
from trainwright_operator.flow.phases.discovery import DOCUMENT_KEY, DiscoveredDevices
from trainwright_operator.flow.reasons import Reason
from trainwright_operator.flow.status_update import Book, PhaseFailed

MAX_CONCURRENT_PROFILES: Final = 2
"""Limit on concurrent runs: more would barely save time and would occupy devices that others could use."""
_MAX_NAMED: Final = 3


def profile(book: Book, discovery: DiscoveredDevices) -> Profiles | None:
    """Return the profiles once all are stored. Raise PhaseFailed where a run fails."""
    limits = book.spec.search.limits
    model = model_from_spec(book.spec)
    batch = book.spec.training.global_batch_size
    needed = required_profiles(discovery.nodes, model, batch, limits.max_tensor_degree)
    measured: list[LayerProfile] = []
    too_large: list[LayerTooLarge] = []
    open_runs: list[tuple[str, RequiredProfile]] = []
    for number, run in enumerate(needed, start=1):
        gang = f"profile-{number}"
        result = stored_result(book.context, gang)
        if result is None:
            open_runs.append((gang, run))
        elif result.outcome.state is not OutcomeState.SUCCEEDED or not isinstance(result.report, ProfilingReport):
            where = f"profiling {run.accelerator} at tensor degree {run.tensor_degree}"
            raise PhaseFailed(result.outcome.reason, f"{where}: {result.outcome.message}")
        else:
            measured.extend(result.report.layers)
            too_large.extend(result.report.out_of_memory)
    if open_runs:
        _advance(book, discovery, open_runs, total=len(needed))
        return None
    return _store_profiles(book, Profiles(tuple(measured), too_large=tuple(too_large)))


def _advance(
    book: Book, discovery: DiscoveredDevices, open_runs: list[tuple[str, RequiredProfile]], *, total: int
) -> None:
    """Advance the running profiles and start new ones up to the limit, each on the least used node."""
    begun = [
        (gang, run) for gang, run in open_runs if book.snapshot.find(book.names.task(gang)) is not None
    ]  # started runs keep their nodes
    new_runs = [pair for pair in open_runs if pair not in begun][: max(MAX_CONCURRENT_PROFILES - len(begun), 0)]
    runs_by_node = Counter(_begun_nodes(book, begun))
    views: list[tuple[RequiredProfile, GangStep]] = []
    for gang, run in (*begun, *new_runs):
        node = _least_used_node(book, discovery, run.accelerator, runs_by_node)
        if (gang, run) in new_runs:
            runs_by_node[node] += 1
        step = advance(book.context, _wanted_gang(book, discovery, gang, run, node))
        views.append((run, book.take(gang, step)))
    done = total - len(open_runs)
    running = "; ".join(
        f"{run.accelerator} at tensor degree {run.tensor_degree}: {view.activity}" for run, view in views
    )
    book.tell_progress(Phase.PROFILING, "profiles", done, total)
    waits = all(view.reason is Reason.WAITING_FOR_CAPACITY for _, view in views)
    reason = Reason.WAITING_FOR_CAPACITY if waits else Reason.RUNNING
    book.say(ConditionType.PROFILED, "Unknown", reason, what=f"{done} of {total} profiles measured; {running}")


def _begun_nodes(book: Book, begun: list[tuple[str, RequiredProfile]]) -> list[str]:
    """Return the node of each started run, pinned or not."""
    orders = (book.snapshot.find(book.names.task(gang)) for gang, _ in begun)
    texts = (stored.data.get(TASK_FILE, "") for stored in orders if stored is not None)
    return [parse_strict(text, ProfilingTask, "order").gang.nodes[0].name for text in texts]


def _least_used_node(book: Book, discovery: DiscoveredDevices, accelerator: str, taken: Counter[str]) -> str:
    """Return the accelerator's node with the fewest of our profiles, then the most free devices."""

    def use(name: str, devices: int) -> tuple[int, int, str]:
        return taken[name], book.snapshot.used_devices.get(name, 0) - devices, name

    return min(use(node.name, node.devices) for node in discovery.nodes if node.accelerator == accelerator)[2]


def _wanted_gang(book: Book, discovery: DiscoveredDevices, gang: str, run: RequiredProfile, node: str) -> GangSpec:
    seconds = book.spec.profiling.deadline_seconds
    order = ProfilingTask(
        gang=discovery.make_gang([(node, (0,))], run_seconds=seconds),
        model=model_from_spec(book.spec),
        tensor_degree=run.tensor_degree,
        rows=run.rows,
        optimizer=book.spec.training.optimizer,
        warmup_iterations=book.spec.profiling.warmup_iterations,
        iterations=book.spec.profiling.iterations,
    )
    return GangSpec(gang, order, pending_seconds=seconds, run_seconds=seconds, deadline_seconds=seconds)


def _store_profiles(book: Book, profiles: Profiles) -> Profiles | None:
    name = book.names.profiles
    stored = book.snapshot.find(name)
    if stored is None:
        book.store(name, {DOCUMENT_KEY: documents.dumps(profiles)}, role=StoredRole.DOCUMENT)
        book.tell_progress(Phase.PROFILING, "profiles kept", 0, 1)
        return None
    kept: Profiles = parse_strict(stored.data.get(DOCUMENT_KEY, ""), Profiles, name)
    accelerators = ", ".join(dict.fromkeys(layer.accelerator for layer in kept.layers)) or "no accelerator"
    book.fields["profiles_ref"] = ConfigMapReference(config_map=name)
    book.say(
        ConditionType.PROFILED,
        "True",
        Reason.PROFILED,
        profiles=len(kept.layers),
        accelerators=accelerators,
        lacking=_describe_too_large(kept),
    )
    return kept


def _describe_too_large(kept: Profiles) -> str:
    """Return a clause on the layers that did not fit into memory, or an empty string."""
    if not kept.too_large:
        return ""
    told = [
        f"{one.kind} on {one.accelerator} from {one.rows} rows on at tensor degree {one.tensor_degree}"
        for one in kept.too_large[:_MAX_NAMED]
    ]
    more = len(kept.too_large) - _MAX_NAMED
    also = f" and {more} more" if more > 0 else ""
    unused = kept.accelerators_without_memory()
    spared = f", so no plan uses {', '.join(unused)}" if unused else ""
    return f"; too large for the memory are {', '.join(told)}{also}{spared}"
