"""Profiled: every distinct layer on every accelerator at every tensor degree that a plan may use."""

from __future__ import annotations

from collections import Counter
from typing import Final

from trainwright import documents
from trainwright.orders import ProfileOrder, ProfileReport
from trainwright.profiles import LayerProfile, LayerTooLarge, Profiles
from trainwright.search import NeededProfile, needed_profiles
from trainwright_operator.api.conditions import ConditionType
from trainwright_operator.api.status import ConfigMapReference, Phase
from trainwright_operator.flow.accept import model_of
from trainwright_operator.flow.actions import StoredRole
from trainwright_operator.flow.book import Book, Failed
from trainwright_operator.flow.discovery import DOCUMENT_KEY, Discovery
from trainwright_operator.flow.gang import WantedGang
from trainwright_operator.flow.gang_progress import GangView, advance, stored_result
from trainwright_operator.flow.outcome import OutcomeState
from trainwright_operator.flow.pod_template import ORDER_FILE
from trainwright_operator.flow.reasons import Reason
from trainwright_operator.flow.worker_log import strict

MAX_AT_ONCE: Final = 2
"""More profiles at a time end hardly sooner, and hold devices that others could use."""
_MAX_NAMED: Final = 3


def profile(book: Book, discovery: Discovery) -> Profiles | None:
    """The profiles once all are measured and kept; raises Failed where one cannot be."""
    limits = book.spec.search.limits
    model = model_of(book.spec)
    batch = book.spec.training.global_batch_size
    needed = needed_profiles(discovery.nodes, model, batch, limits.max_tensor_degree)
    measured: list[LayerProfile] = []
    too_large: list[LayerTooLarge] = []
    open_runs: list[tuple[str, NeededProfile]] = []
    for number, run in enumerate(needed, start=1):
        gang = f"profile-{number}"
        result = stored_result(book, gang)
        if result is None:
            open_runs.append((gang, run))
        elif result.outcome.state is not OutcomeState.SUCCEEDED or not isinstance(result.report, ProfileReport):
            where = f"profiling {run.accelerator} at tensor degree {run.tensor_degree}"
            raise Failed(result.outcome.reason, f"{where}: {result.outcome.message}")
        else:
            measured.extend(result.report.layers)
            too_large.extend(result.report.out_of_memory)
    if open_runs:
        _advance(book, discovery, open_runs, total=len(needed))
        return None
    return _keep(book, Profiles(tuple(measured), too_large=tuple(too_large)))


def _advance(book: Book, discovery: Discovery, open_runs: list[tuple[str, NeededProfile]], *, total: int) -> None:
    """Lead the runs that have begun, and begin further ones up to the bound, each on a node of its own."""
    begun = [
        (gang, run) for gang, run in open_runs if book.snapshot.find(book.names.order(gang)) is not None
    ]  # first come, first served: what holds a node already goes on
    fresh = [pair for pair in open_runs if pair not in begun][: max(MAX_AT_ONCE - len(begun), 0)]
    taken = Counter(_begun_nodes(book, begun))
    views: list[tuple[NeededProfile, GangView]] = []
    for gang, run in (*begun, *fresh):
        node = _least_used_node(book, discovery, run.accelerator, taken)
        if (gang, run) in fresh:
            taken[node] += 1
        views.append((run, advance(book, _wanted_gang(book, discovery, gang, run, node))))
    done = total - len(open_runs)
    running = "; ".join(f"{run.accelerator} at tensor degree {run.tensor_degree}: {view.what}" for run, view in views)
    book.tell_progress(Phase.PROFILING, "profiles", done, total)
    waits = all(view.reason is Reason.WAITING_FOR_CAPACITY for _, view in views)
    reason = Reason.WAITING_FOR_CAPACITY if waits else Reason.RUNNING
    book.say(ConditionType.PROFILED, "Unknown", reason, what=f"{done} of {total} profiles measured; {running}")


def _begun_nodes(book: Book, begun: list[tuple[str, NeededProfile]]) -> list[str]:
    """Nodes that runs were ordered on, bound or not."""
    orders = (book.snapshot.find(book.names.order(gang)) for gang, _ in begun)
    texts = (stored.data.get(ORDER_FILE, "") for stored in orders if stored is not None)
    return [strict(text, ProfileOrder, "order").gang.nodes[0].name for text in texts]


def _least_used_node(book: Book, discovery: Discovery, accelerator: str, taken: Counter[str]) -> str:
    """The node of that accelerator with the fewest profiles of ours, then with the most free devices."""

    def use(name: str, devices: int) -> tuple[int, int, str]:
        return taken[name], book.snapshot.used_devices.get(name, 0) - devices, name

    return min(use(node.name, node.devices) for node in discovery.nodes if node.accelerator == accelerator)[2]


def _wanted_gang(book: Book, discovery: Discovery, gang: str, run: NeededProfile, node: str) -> WantedGang:
    seconds = book.spec.profiling.deadline_seconds
    order = ProfileOrder(
        gang=discovery.gang([(node, (0,))], run_seconds=seconds),
        model=model_of(book.spec),
        tensor_degree=run.tensor_degree,
        rows=run.rows,
        optimizer=book.spec.training.optimizer,
        warmup_iterations=book.spec.profiling.warmup_iterations,
        iterations=book.spec.profiling.iterations,
    )
    return WantedGang(gang, order, pending_seconds=seconds, run_seconds=seconds, deadline_seconds=seconds)


def _keep(book: Book, profiles: Profiles) -> Profiles | None:
    name = book.names.profiles
    stored = book.snapshot.find(name)
    if stored is None:
        book.store(name, {DOCUMENT_KEY: documents.dumps(profiles)}, role=StoredRole.DOCUMENT)
        book.tell_progress(Phase.PROFILING, "profiles kept", 0, 1)
        return None
    kept: Profiles = strict(stored.data.get(DOCUMENT_KEY, ""), Profiles, name)
    accelerators = ", ".join(dict.fromkeys(layer.accelerator for layer in kept.layers)) or "no accelerator"
    book.fields["profiles_ref"] = ConfigMapReference(config_map=name)
    book.say(
        ConditionType.PROFILED,
        "True",
        Reason.PROFILED,
        profiles=len(kept.layers),
        accelerators=accelerators,
        lacking=_lacking(kept),
    )
    return kept


def _lacking(kept: Profiles) -> str:
    """What did not fit into memory, in a clause; empty where everything did."""
    if not kept.too_large:
        return ""
    told = [
        f"{one.kind} on {one.accelerator} from {one.rows} rows on at tensor degree {one.tensor_degree}"
        for one in kept.too_large[:_MAX_NAMED]
    ]
    more = len(kept.too_large) - _MAX_NAMED
    also = f" and {more} more" if more > 0 else ""
    unused = kept.without_room()
    spared = f", so no plan uses {', '.join(unused)}" if unused else ""
    return f"; too large for the memory are {', '.join(told)}{also}{spared}"
