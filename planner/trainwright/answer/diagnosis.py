"""Diagnosis of a slow run: the same plan estimated again with each cause, and the plan's choices estimated without them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Final, TypeVar

from trainwright.answer.formats import in_format
from trainwright.cluster import Cluster, Link, Node, Port, stream_bytes_per_second
from trainwright.cost.estimate import iteration_seconds
from trainwright.exports.uniform_shape import UniformShape, even_ends, shape_of
from trainwright.layer import Dtype
from trainwright.plan import Plan, Stage, divisors
from trainwright.search import Candidate, Problem
from trainwright.search.candidates import band_of_estimates, candidate_if_feasible, candidate_of
from trainwright.strategy import Sharding

SLOW: Final = 1.1
"""Ratio of measured to predicted seconds from which a run is slow where no error band is wider."""
LEAST_SHARE: Final = 0.1
"""Share of the gap below which a circumstance is left out, and of the iteration below which a choice of the plan is."""
TCP_BYTES_PER_SECOND: Final = (1.25e9, 5e9)
"""Bandwidth of a node by TCP, as NCCL has it where EFA, InfiniBand or RoCE are unused: 10 to 40 Gbit/s."""
HOST_BYTES_PER_SECOND: Final = 6e9
"""Bandwidth between GPUs without peer-to-peer access, whose messages go through the host's memory (PCIe 3.0)."""
_SECOND_CAUSE: Final = math.log(1.25)
"""Factor in seconds by which two causes must come nearer to the measured ones than one does."""
_SLOWEST_LINKS: Final = 1e-4
_STEPS: Final = 24
"""Halvings of the search for a bandwidth, which is known to .01 % after them."""

Speed = TypeVar("Speed", Link, Port)


@dataclass(frozen=True, slots=True)
class Circumstance:
    """One or two causes that the prediction does not count, and the iteration with them.

    Attributes:
        seconds: predicted for the same plan with this cause, and no other.
        explained: share of the gap between predicted and measured seconds that it explains; at most 1.
    """

    names: tuple[str, ...]
    seconds: float
    explained: float

    @property
    def name(self) -> str:
        return " and ".join(self.names)


@dataclass(frozen=True, slots=True)
class Choice:
    """Choice of the plan that costs time, and the plan without it.

    Attributes:
        what: is different in the other plan.
        seconds: predicted for the other plan.
        saved_seconds: that it takes less than the plan that ran, as predicted.
    """

    name: str
    what: str
    plan: Plan
    seconds: float
    saved_seconds: float


@dataclass(frozen=True)
class Diagnosis:
    """Run that was measured, and why it takes as long as it does.

    Attributes:
        expected: the least and the greatest seconds that the estimate lets expect.
        circumstances: that explain some of the gap, the best one first; empty if the run is as fast as expected.
        links_bytes_per_second: of a node's links to others together, with which the gap is explained; None if none does.
        choices: of the plan, the most expensive first, whether the run is slow or not.
    """

    problem: Problem
    candidate: Candidate
    measured_seconds: float
    expected: tuple[float, float]
    circumstances: tuple[Circumstance, ...] = ()
    links_bytes_per_second: float | None = None
    choices: tuple[Choice, ...] = ()

    @property
    def gap_seconds(self) -> float:
        """Seconds that an iteration takes longer than predicted; below 0 if it is faster."""
        return self.measured_seconds - self.candidate.estimate.iteration_seconds

    @property
    def likely(self) -> tuple[Circumstance, ...]:
        """Circumstances that come about as near to the measured seconds as the first one: seconds alone do not tell them apart."""
        least = min(map(self.distance, self.circumstances), default=0.0)
        return tuple(cause for cause in self.circumstances if self.distance(cause) <= least + math.log(SLOW))

    def distance(self, cause: Circumstance) -> float:
        """Return how far the seconds with a cause are from the measured ones, as a logarithm; two causes have to come nearer."""
        return abs(math.log(cause.seconds / self.measured_seconds)) + _SECOND_CAUSE * (len(cause.names) - 1)

    @property
    def is_slow(self) -> bool:
        """Return whether the run is slower than the error of the estimate lets expect."""
        return self.measured_seconds > self.expected[1]


def diagnose(
    problem: Problem, plan: Plan, measured_seconds: float, excluded: Collection[str] = frozenset()
) -> Diagnosis:
    """Return why an iteration of the plan takes as long as it was measured.

    Circumstances are what the prediction does not count: each is switched on, and what it adds is compared with the gap. Choices
    are of the plan itself: each is undone, where memory allows, and what that saves is predicted. `excluded`: names of causes that
    are known not to be.
    """
    candidate = candidate_of(problem, plan)
    diagnosis = Diagnosis(
        problem, candidate, measured_seconds, _expected(candidate, problem), choices=tuple(_choices(problem, candidate))
    )
    if not diagnosis.is_slow:
        return diagnosis
    diagnosis = replace(diagnosis, links_bytes_per_second=_links_that_explain(problem, plan, measured_seconds))
    return replace(diagnosis, circumstances=tuple(circumstances(diagnosis, excluded)))


def _expected(candidate: Candidate, problem: Problem) -> tuple[float, float]:
    predicted, band = candidate.estimate.iteration_seconds, band_of_estimates(candidate, problem)
    least, greatest = (predicted, predicted) if band is None else band.range_of(predicted)
    return min(least, predicted / SLOW), max(greatest, predicted * SLOW)


FLOAT32: Final = "float32 weights"
TCP: Final = "EFA, InfiniBand or RoCE unused between nodes"
NO_NVLINK: Final = "NVLink unused inside nodes"
NOT_OVERLAPPED: Final = "gradient sums that are not overlapped"
EVERY_MICRO_BATCH: Final = "gradient sums in every micro-batch"

Switch = Callable[[Problem], Problem | None]
"""From a problem to the one with a cause; None where it cannot be the cause."""


def _in_float32(problem: Problem) -> Problem | None:
    if problem.model.dtype is Dtype.FLOAT32:
        return None
    with suppress(ValueError):  # of an accelerator without a data sheet
        return in_format(problem, Dtype.FLOAT32)
    return None


def _over_tcp(problem: Problem, bandwidth: float = TCP_BYTES_PER_SECOND[0]) -> Problem | None:
    cluster = problem.cluster
    names = problem.nodes
    if len(names) < 2 or cluster.link(names[0], names[1]).bandwidth_bytes_per_second <= TCP_BYTES_PER_SECOND[1]:
        return None
    return replace(problem, cluster=with_links(cluster, most=bandwidth))


def _over_pcie(problem: Problem) -> Problem | None:
    cluster = problem.cluster

    def limited(node: Node) -> Node:
        return replace(node, inside=node.inside and _changed(node.inside, most=HOST_BYTES_PER_SECOND))

    fast = [node for node in cluster.nodes if node.devices > 1 and _inside(cluster, node) > 2 * HOST_BYTES_PER_SECOND]
    if not fast:
        return None
    links = tuple(
        _changed(link, most=HOST_BYTES_PER_SECOND) if link.source == link.target else link for link in cluster.links
    )
    return replace(problem, cluster=replace(cluster, links=links, nodes=tuple(map(limited, cluster.nodes))))


def _inside(cluster: Cluster, node: Node) -> float:
    return stream_bytes_per_second(cluster.link(node.name, node.name))


def _without_overlap(problem: Problem) -> Problem | None:
    runtime = problem.runtime
    return replace(problem, runtime=replace(runtime, overlaps_gradients=False)) if runtime.overlaps_gradients else None


def _sums_every_micro_batch(problem: Problem) -> Problem | None:
    runtime = problem.runtime
    if runtime.syncs_every_micro_batch:
        return None
    changed = replace(runtime, syncs_every_micro_batch=True, reduces_every_micro_batch=True)
    return replace(problem, runtime=changed)


SWITCHES: Final[dict[str, Switch]] = {
    FLOAT32: _in_float32,
    TCP: _over_tcp,
    NO_NVLINK: _over_pcie,
    NOT_OVERLAPPED: _without_overlap,
    EVERY_MICRO_BATCH: _sums_every_micro_batch,
}


def circumstances(diagnosis: Diagnosis, excluded: Collection[str] = frozenset()) -> list[Circumstance]:
    """Return the causes that explain some of the gap: first those with which an iteration is nearest to the measured one.

    Where none alone comes within the error of the estimate, pairs are tried, too.
    """
    single = [(name,) for name in SWITCHES if name not in excluded]
    likely = [*_possible(diagnosis, single)]
    error = diagnosis.expected[1] / diagnosis.candidate.estimate.iteration_seconds
    if not any(cause.seconds * error >= diagnosis.measured_seconds for cause in likely):
        likely += _possible(diagnosis, [*combinations([cause.names[0] for cause in likely], 2)])
    return sorted(likely, key=diagnosis.distance)


def _possible(diagnosis: Diagnosis, causes: Iterable[tuple[str, ...]]) -> Iterator[Circumstance]:
    """Yield those of the causes that explain some of the gap, and with which the run would not be slower than it is."""
    predicted, plan = diagnosis.candidate.estimate.iteration_seconds, diagnosis.candidate.plan
    for names in causes:
        switched = _switched(diagnosis, names)
        if switched is None:
            continue
        seconds = iteration_seconds(plan, switched.cost_context)
        explained = (seconds - predicted) / diagnosis.gap_seconds
        is_too_slow = seconds * diagnosis.expected[0] / predicted > diagnosis.measured_seconds
        if explained >= LEAST_SHARE and not is_too_slow:
            yield Circumstance(names, seconds, min(explained, 1.0))


def _switched(diagnosis: Diagnosis, names: tuple[str, ...]) -> Problem | None:
    """Return the problem with these causes together; None where one of them cannot be."""
    least, greatest = TCP_BYTES_PER_SECOND
    bandwidth = min(max(diagnosis.links_bytes_per_second or least, least), greatest)
    switched: Problem | None = diagnosis.problem
    for name in names:
        if switched is not None:
            switched = _over_tcp(switched, bandwidth) if name == TCP else SWITCHES[name](switched)
    return switched


def _links_that_explain(problem: Problem, plan: Plan, measured_seconds: float) -> float | None:
    """Return the bandwidth between nodes with which the plan takes as long as measured; None if there is none."""
    nodes = [*dict.fromkeys(device.node for device in plan.devices)]
    if len(nodes) < 2:
        return None

    def seconds(factor: float) -> float:
        cluster = with_links(problem.cluster, factor)
        return iteration_seconds(plan, replace(problem, cluster=cluster).cost_context)

    least, greatest = math.log(_SLOWEST_LINKS), 0.0
    if seconds(_SLOWEST_LINKS) < measured_seconds or seconds(1.0) > measured_seconds:
        return None
    for _ in range(_STEPS):
        middle = (least + greatest) / 2
        if seconds(math.exp(middle)) > measured_seconds:
            least = middle
        else:
            greatest = middle
    slowest = min(
        problem.cluster.link(source, target).bandwidth_bytes_per_second
        for source, target in zip(nodes, [*nodes[1:], nodes[0]], strict=True)
    )
    return slowest * math.exp(greatest)


def with_links(cluster: Cluster, factor: float = 1.0, most: float = math.inf) -> Cluster:
    """Return the cluster with links between nodes of other bandwidths: `factor` times as high, and at most `most`."""
    links = tuple(link if link.source == link.target else _changed(link, factor, most) for link in cluster.links)
    nodes = tuple(
        replace(node, network=node.network and _changed(node.network, factor, most)) for node in cluster.nodes
    )
    return replace(cluster, links=links, nodes=nodes)


def _changed(link: Speed, factor: float = 1.0, most: float = math.inf) -> Speed:
    def bandwidth(stated: float) -> float:
        return min(max(stated * factor, 1.0), most)

    flow = link.flow_bytes_per_second
    return replace(
        link,
        bandwidth_bytes_per_second=bandwidth(link.bandwidth_bytes_per_second),
        flow_bytes_per_second=None if flow is None else bandwidth(flow),
    )


TENSOR_BETWEEN_NODES: Final = "tensor groups over links between nodes"
TENSOR_DEGREE: Final = "a larger tensor degree than the plan needs"
FEW_MICRO_BATCHES: Final = "too few micro-batches"
NEEDLESS_RECOMPUTE: Final = "recompute that memory does not ask for"
SHARDED_OVER_SLOW_LINKS: Final = "weights that are gathered over slow links"


def _choices(problem: Problem, candidate: Candidate) -> list[Choice]:
    """Return the choices of the plan that cost time, of each name the one without which the plan is fastest."""
    predicted = candidate.estimate.iteration_seconds
    best: dict[str, Choice] = {}
    for name, what, other_plan in _other_plans(candidate.plan):
        plan = replace(other_plan, dtype=candidate.plan.dtype)
        other = candidate_if_feasible(problem, plan)
        if other is None:
            continue
        seconds = other.estimate.iteration_seconds
        saved = predicted - seconds
        if saved >= LEAST_SHARE * predicted and (name not in best or seconds < best[name].seconds):
            best[name] = Choice(name, what, plan, seconds, saved)
    return sorted(best.values(), key=lambda choice: choice.seconds)


def _other_plans(plan: Plan) -> Iterator[tuple[str, str, Plan]]:
    """Yield plans without a choice of this one, each with the choice's name and what is different."""
    if any(run.strategy.recompute for stage in plan.stages for run in stage.layers):
        yield NEEDLESS_RECOMPUTE, "no recompute", plan.map_stages(_without_recompute)
    shape = shape_of(plan)
    if shape is None:
        return
    yield from _other_tensor_degrees(shape)
    stages = len(shape.ends)
    for rows in divisors(shape.rows)[:-1] if stages > 1 else ():
        micro_batches = shape.micro_batches * shape.rows // rows
        changed = replace(shape, rows=rows, micro_batches=micro_batches)
        yield FEW_MICRO_BATCHES, f"{micro_batches} micro-batches of {rows} rows", changed.plan()
    if shape.strategy.sharding is Sharding.ZERO3 and len({device.node for device in shape.devices}) > 1:
        for sharding in (Sharding.ZERO1, Sharding.ZERO2):
            yield SHARDED_OVER_SLOW_LINKS, f"{sharding}", shape.with_strategy(sharding=sharding).plan()


def _without_recompute(stage: Stage) -> Stage:
    layers = tuple(replace(run, strategy=run.strategy.replace(recompute=False)) for run in stage.layers)
    return replace(stage, layers=layers)


def _other_tensor_degrees(shape: UniformShape) -> Iterator[tuple[str, str, Plan]]:
    """Yield plans of smaller tensor degrees, with as many more stages or replicas."""
    tensor, data, stages = *shape.strategy.degrees, len(shape.ends)
    nodes = [device.node for device in shape.devices]
    crosses = any(len({*nodes[start : start + tensor]}) > 1 for start in range(0, len(nodes), tensor))
    name = TENSOR_BETWEEN_NODES if crosses else TENSOR_DEGREE
    batch = shape.rows * shape.micro_batches
    for smaller in divisors(tensor)[:-1]:
        factor = tensor // smaller
        deeper = stages * factor
        if deeper <= shape.layers:
            strategy = shape.strategy.replace(tensor=smaller).effective
            yield (
                name,
                f"tp{smaller} pp{deeper}",
                replace(shape, strategy=strategy, ends=even_ends(shape.layers, deeper)).plan(),
            )
        if batch % factor == 0:
            strategy = shape.strategy.replace(tensor=smaller, data=data * factor).effective
            for rows in divisors(batch // factor):
                if rows <= shape.rows:
                    changed = replace(shape, strategy=strategy, rows=rows, micro_batches=batch // factor // rows)
                    yield name, f"tp{smaller} dp{data * factor} mb{rows}", changed.plan()
