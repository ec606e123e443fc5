"""Plans that need little memory: whether any plan fits on given devices, without a search."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Final

from trainwright.cluster import Cluster, Node, Port
from trainwright.cost.estimate import memory_by_device, rows_refusal
from trainwright.exports import UniformShape, is_expressible
from trainwright.exports.capabilities import EVERY_SHARDING
from trainwright.exports.uniform_shape import even_ends
from trainwright.plan import Plan, Schedule, divisors
from trainwright.search import Problem
from trainwright.search.auto.memory_first_starts import least_memory_plans
from trainwright.search.degrees import is_open
from trainwright.search.plan_defaults import with_runtime_choices
from trainwright.search.uniform.layer_partition import even_split
from trainwright.search.uniform.plan_space import exceeds_all_memory
from trainwright.strategy import Sharding, Strategy

MAX_DEVICES: Final = 4096
"""Maximum number of devices that is tried."""
_STAGES: Final = (
    1,
    2,
    3,
    4,
    5,
    6,
    7,
    8,
    10,
    12,
    14,
    16,
    20,
    24,
    28,
    32,
    40,
    48,
    56,
    64,
    80,
    96,
    112,
    128,
    160,
    192,
    256,
)
"""Numbers of stages that are tried."""
_ANY: Final = Port(1e-6, 1e9)
"""Links of devices of which only the memory is asked."""


@dataclass(frozen=True, slots=True)
class Savings:
    """Ways to save memory that plans may use."""

    recompute: bool = True
    sharding: bool = True


ALL_SAVINGS: Final = Savings()


def fits(problem: Problem, savings: Savings = ALL_SAVINGS, verdicts: dict[Hashable, bool] | None = None) -> bool:
    """Return whether one of the plans that need least memory fits. Others may fit where none of these does, but hardly.

    `verdicts`: of uniform plans by their degrees and rows, which are kept from call to call; only where all devices are alike.
    """
    if exceeds_all_memory(problem):
        return False
    verdicts = {} if verdicts is None else verdicts
    for shape in _uniform_shapes(problem, savings):
        key = (len(shape.ends), shape.strategy, shape.rows)
        if key not in verdicts:
            verdicts[key] = _fits(with_runtime_choices(shape.plan(), problem.cost_context), problem)
        if verdicts[key]:
            return True
    return savings.recompute and any(_fits(plan, problem) for plan in least_memory_plans(problem))


def lean_plan(problem: Problem) -> Plan | None:
    """Return a plan that fits with little memory, of few stages; None if none of them fits."""
    uniform = (
        with_runtime_choices(shape.plan(), problem.cost_context) for shape in _uniform_shapes(problem, ALL_SAVINGS)
    )
    return next((plan for plan in chain(uniform, least_memory_plans(problem)) if _fits(plan, problem)), None)


def _fits(plan: Plan, problem: Problem) -> bool:
    """Return whether a plan fits, of those that the trainer of the limits supports."""
    context, capabilities = problem.cost_context, problem.capabilities
    if capabilities is not None and not is_expressible(plan, capabilities):
        return False
    if rows_refusal(plan, context) is not None:
        return False
    memory = context.memory_of_node
    return all(size <= memory[device.node] for device, size in memory_by_device(plan, context))


def _uniform_shapes(problem: Problem, savings: Savings) -> Iterator[UniformShape]:
    """Yield replicas that shard all state, then pipelines of ever more stages."""
    devices, batch = len(problem.devices), problem.global_batch_size
    capabilities, layers = problem.capabilities, len(problem.model.layers)
    in_node = min(problem.cluster.node(name).devices for name in problem.nodes)
    tensors = [
        tensor
        for tensor in divisors(problem.model.max_tensor_degree)
        if tensor <= in_node and is_open(problem, Strategy(tensor, 1), problem.accelerators)
    ]
    most = problem.limits.max_stages(min(layers, devices))
    for stages, tensor in product((stages for stages in _STAGES if stages <= most), tensors):
        ends = _ends(problem, stages)
        if ends is None or (capabilities is not None and not capabilities.can_split(stages, tensor)):
            continue
        for data, rows in _batches(batch, devices // (stages * tensor), problem.least_rows):
            strategy = Strategy(tensor, data, sharding=_strongest(problem, savings, stages, tensor, data))
            if problem.limits.allows(strategy):
                yield UniformShape(
                    ends,
                    strategy,
                    rows,
                    batch // data // rows,
                    layers if savings.recompute else 0,
                    Schedule.ONE_FORWARD_ONE_BACKWARD,
                    problem.devices[: stages * strategy.width],
                )


def _ends(problem: Problem, stages: int) -> tuple[int, ...] | None:
    """Return the ends of stages with equal numbers of blocks, or of layers where the trainer divides these; None for too many."""
    capabilities, layers = problem.capabilities, len(problem.model.layers)
    if capabilities is None or capabilities.uneven_stages:
        return even_split(problem.model, stages)
    return even_ends(layers, stages) if stages <= layers else None


def _batches(batch: int, most: int, least_rows: int) -> Iterator[tuple[int, int]]:
    """Yield replicas and rows of each: as many replicas as there may be, one row at a time, or all at once.

    Gradients of a single micro-batch are sharded as soon as they are there.
    """
    data = max((data for data in divisors(batch) if data <= most and batch // data >= least_rows), default=0)
    if not data:
        return
    share = batch // data
    fewest = min(rows for rows in divisors(share) if rows >= least_rows)
    yield from dict.fromkeys(((data, fewest), (data, share)))


def _strongest(problem: Problem, savings: Savings, stages: int, tensor: int, data: int) -> Sharding:
    """Return the sharding that saves most of those that the trainer has."""
    if data == 1 or not savings.sharding:
        return Sharding.NONE
    capabilities = problem.capabilities
    shardings = EVERY_SHARDING if capabilities is None else capabilities.shardings_of(stages, tensor, data)
    return max(shardings, key=list(Sharding).index, default=Sharding.NONE)


def first_that(is_enough: Callable[[int], bool], first: int, end: int) -> int | None:
    """Return the smallest number from `first` to `end` - 1 that is enough, where all above one that is are; None if none is."""
    low, step, high = first, 1, first
    while high < end and not is_enough(high):
        low, high, step = high + 1, high + step, 2 * step
    if high >= end:
        if low >= end or not is_enough(end - 1):
            return None
        high = end - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle + 1, high)
    return low


def enough_words(problem: Problem) -> str:
    """Return how many of the problem's machines, more than it has, would hold the model, as an end of a refusal."""
    nodes = [problem.cluster.node(name) for name in problem.nodes]
    is_alike = len({(node.accelerator, node.devices) for node in nodes}) == 1
    machine_set = nodes[:1] if is_alike else nodes
    devices = sum(node.devices for node in machine_set)
    sets = first_that(
        lambda count: fits(_of_sets(problem, machine_set, count)),
        len(nodes) // len(machine_set) + 1,
        MAX_DEVICES // devices + 1,
    )
    if sets is None:
        return f"no number of these machines up to {MAX_DEVICES:,} devices would hold the model"
    if is_alike:
        return f"{sets:,} of these machines would do, {sets * devices:,} {nodes[0].accelerator}"
    return f"{sets:,} of each of these machines would do, {sets * devices:,} devices"


def _of_sets(problem: Problem, nodes: list[Node], sets: int) -> Problem:
    """Return the problem on several sets of nodes, whose links do not count."""
    every = tuple(
        replace(node, name=f"{node.name}#{number}", network=_ANY, inside=_ANY if node.devices > 1 else None)
        for number in range(sets)
        for node in nodes
    )
    accelerators = tuple(
        accelerator
        for accelerator in problem.cluster.accelerators
        if any(node.accelerator == accelerator.name for node in nodes)
    )
    limits = replace(problem.limits, use_nodes=(), spare=())
    return replace(problem, cluster=Cluster(accelerators, every), limits=limits)
