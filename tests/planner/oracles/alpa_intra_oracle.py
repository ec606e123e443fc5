"""Reference of Alpa's intra-operator pass: enumeration of assignments, and simulated devices that hold their shards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import permutations, product

import numpy as np
from numpy.typing import NDArray

from trainwright.cost.operators.integer_program import EdgeCosts, IntegerProgram, NodeChoices, WeightedObjective
from trainwright.cost.operators.parallel_algorithms import OperatorAlgorithms
from trainwright.cost.operators.sharding_specs import LogicalMesh, divided_axes
from trainwright.loop_nests.operations import Axis, IndexedTensor, Loop, Operation

Array = NDArray[np.float64]


def drawn(seed: int, *, max_nodes: int = 5, most_algorithms: int = 3) -> IntegerProgram:
    """Draw a small program: nodes of a few algorithms, some of which cannot shard weights, and some edges."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, most_algorithms + 1, int(rng.integers(1, max_nodes + 1)))
    nodes = []
    for count in counts:
        seconds = rng.integers(0, 20, (2, count)).astype(float)
        seconds[1, rng.random(count) < 0.4] = np.inf
        others = [rng.integers(0, 20, (2, count)).astype(float) for _ in range(3)]
        nodes.append(NodeChoices(seconds, *others))
    pairs = [(a, b) for a in range(len(counts)) for b in range(len(counts)) if a != b and rng.random() < 0.35]
    edges = []
    for a, b in pairs:
        seconds = rng.integers(0, 15, (counts[a], counts[b])).astype(float)
        if rng.random() < 0.2 and seconds.size > 1:
            seconds[rng.random(seconds.shape) < 0.3] = np.inf
        edges.append(EdgeCosts(a, b, seconds))
    return IntegerProgram(tuple(nodes), tuple(edges))


def brute_force(programme: IntegerProgram, goal: WeightedObjective, memory_bytes: float = math.inf) -> float:
    """Return the minimum objective of all assignments that fit; infinite if none does."""
    options = [list(product((0, 1), range(node.seconds.shape[1]))) for node in programme.nodes]
    best = math.inf
    for assignment in product(*options):
        seconds = sum(float(node.seconds[one]) for node, one in zip(programme.nodes, assignment, strict=True))
        seconds += sum(
            float(edge.seconds[assignment[edge.source][1], assignment[edge.target][1]]) for edge in programme.edges
        )
        iteration = sum(
            float(node.iteration_seconds[one]) for node, one in zip(programme.nodes, assignment, strict=True)
        )
        state = sum(float(node.state_bytes[one]) for node, one in zip(programme.nodes, assignment, strict=True))
        kept = sum(float(node.activation_bytes[one]) for node, one in zip(programme.nodes, assignment, strict=True))
        held = state + goal.in_flight * kept
        if held <= memory_bytes:
            best = min(best, goal.micro_batches * seconds + iteration + goal.memory_price * held)
    return best


def part(length: int, axis: Axis, layout: int, device: tuple[int, int], shape: tuple[int, int]) -> slice:
    """Return a device's slice of an axis: mesh dimension 0 splits it first, dimension 1 splits each part (S01)."""
    start, stop = 0, length
    for dimension, held in enumerate(divided_axes(layout)):
        if held == axis:
            size = (stop - start) // shape[dimension]
            start = start + device[dimension] * size
            stop = start + size
    return slice(start, stop)


def local(tensor: Array, axes: Sequence[Axis], layout: int, device: tuple[int, int], shape: tuple[int, int]) -> Array:
    """Return one device's shard of a tensor."""
    return tensor[tuple(part(tensor.shape[i], axis, layout, device, shape) for i, axis in enumerate(axes))]


def devices(shape: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the coordinates of all devices of a mesh."""
    return list(product(range(shape[0]), range(shape[1])))


def summed(parts: dict[tuple[int, int], Array], bits: int) -> dict[tuple[int, int], Array]:
    """All-reduce along the mesh dimensions whose bits are set."""
    found = parts
    for dimension in (0, 1):
        if bits >> dimension & 1:
            groups: dict[int, Array] = {}
            for device, values in found.items():
                other = device[1 - dimension]
                groups[other] = groups.get(other, 0.0) + values
            found = {device: groups[device[1 - dimension]] for device in found}
    return found


def contracted(
    operation: Operation, found: OperatorAlgorithms, algorithm: int, sizes: dict[Loop, int], shape: tuple[int, int]
) -> None:
    """Run a product on every device by its layouts, forward and backward, and compare with the whole; raises if it differs.

    The operator is an einsum over its loops of all operands and the weight. Every device computes with what its specs
    give it, partial results are summed over the dimensions that the algorithm names, and the outcome has to be what the
    output's (or operand's) layout says the device holds.
    """
    rng = np.random.default_rng(1)
    read = [*operation.operands, *([operation.weight] if operation.weight is not None else [])]
    layouts = [
        *(one[algorithm] for one in found.operand_layouts),
        *([found.weight_layouts[algorithm]] if found.weight_layouts is not None else []),
    ]
    sums = [
        *(one[algorithm] for one in found.operand_sums),
        *([found.weight_sums[algorithm]] if found.weight_layouts is not None else []),
    ]
    values = [rng.integers(-3, 4, [sizes[loop] for loop, _ in tensor.axes]).astype(float) for tensor in read]
    upstream = rng.integers(-3, 4, [sizes[loop] for loop, _ in operation.output.axes]).astype(float)
    output = (operation.output, int(found.output_layouts[algorithm]))
    _compare(read, values, output, layouts, int(found.output_sums[algorithm]), shape)
    for number, tensor in enumerate(read):
        others = [operation.output, *(one for i, one in enumerate(read) if i != number)]
        held = [upstream, *(one for i, one in enumerate(values) if i != number)]
        where = [output[1], *(one for i, one in enumerate(layouts) if i != number)]
        _compare(others, held, (tensor, int(layouts[number])), where, int(sums[number]), shape)


def _compare(  # noqa: PLR0917 - a product and where its parts are
    read: Sequence[IndexedTensor],
    values: Sequence[Array],
    made: tuple[IndexedTensor, int],
    layouts: Sequence[int],
    bits: int,
    shape: tuple[int, int],
) -> None:
    letters = {loop: chr(ord("a") + number) for number, loop in enumerate(Loop)}
    words = ["".join(letters[loop] for loop, _ in tensor.axes) for tensor in read]
    target = "".join(letters[loop] for loop, _ in made[0].axes)
    formula = f"{','.join(words)}->{target}"
    whole = np.einsum(formula, *values)
    partial = {
        device: np.einsum(
            formula,
            *(
                local(value, [axis for _, axis in tensor.axes], int(layout), device, shape)
                for tensor, value, layout in zip(read, values, layouts, strict=True)
            ),
        )
        for device in devices(shape)
    }
    for device, result in summed(partial, bits).items():
        np.testing.assert_array_equal(result, local(whole, [axis for _, axis in made[0].axes], made[1], device, shape))


def resharding_seconds(mesh: LogicalMesh, source: int, target: int, size_bytes: float) -> float:
    """Return the costs of a conversion that slices, exchanges or gathers each mesh axis once, in the better order.

    Slices come first in any order; what is exchanged or gathered costs by what is held then.
    """
    best = math.inf
    for order in permutations((0, 1)):
        held, wanted, total = list(divided_axes(source)), divided_axes(target), 0.0
        for d in order:
            if held[d] == Axis.NOTHING:
                held[d] = wanted[d]
        for d in order:
            if held[d] == wanted[d]:
                continue
            n, latency, per_byte = mesh.shape[d], mesh.latency_seconds[d], mesh.seconds_per_byte[d]
            exchanged = wanted[d] != Axis.NOTHING
            held[d] = wanted[d]
            parts = math.prod(mesh.shape[i] for i in (0, 1) if held[i] != Axis.NOTHING)
            assert exchanged or wanted[d] == Axis.NOTHING
            total += (n - 1) * latency + (n - 1) / n * size_bytes / parts * per_byte
        best = min(best, total)
    return best
