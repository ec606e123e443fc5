"""Parallel algorithms of operators: Table 3 of Alpa's paper, and a simulation of devices that compute their shards."""

from __future__ import annotations

import alpa_intra_oracle as oracle
import pytest

from trainwright.cost.operators.parallel_algorithms import AlgorithmSpace, OperatorAlgorithms, mappings
from trainwright.layer import Operator, OperatorKind
from trainwright.loop_nests.operations import (
    Axis,
    FamilyShapes,
    IndexedTensor,
    Loop,
    Operation,
    build_operation,
    spec_of,
)

B, I, J, K = Loop.BATCH, Loop.SEQUENCE, Loop.OUT, Loop.IN  # noqa: E741 - the paper's letters
BATCHED_MATMUL = Operation(
    "C[b, i, j] = A[b, i, k] B[b, k, j]",
    ((B, 0), (I, 8), (J, 8), (K, 8)),
    IndexedTensor(((B, Axis.BATCH), (I, Axis.SEQUENCE), (J, Axis.WIDTH)), 64),
    (
        IndexedTensor(((B, Axis.BATCH), (I, Axis.SEQUENCE), (K, Axis.WIDTH)), 64),
        IndexedTensor(((B, Axis.BATCH), (K, Axis.SEQUENCE), (J, Axis.WIDTH)), 64),
    ),
    is_heavy=True,
)
SIZES = {B: 8, I: 8, J: 8, K: 8}


@pytest.mark.parametrize(
    ("mapping", "output", "operands", "summed"),
    [
        ((I, J), "R S0 S1", ("R S0 R", "R R S1"), 0),
        ((I, K), "R S0 R", ("R S0 S1", "R S1 R"), 2),
        ((J, K), "R R S0", ("R R S1", "R S1 S0"), 2),
        ((B, I), "S0 S1 R", ("S0 S1 R", "S0 R R"), 0),
        ((B, K), "S0 R R", ("S0 R S1", "S0 S1 R"), 2),
        ((I, I), "R S01 R", ("R S01 R", "R R R"), 0),
        ((K, K), "R R R", ("R R S01", "R S01 R"), 3),
    ],
)
def test_batched_matmul_has_the_algorithms_of_table_3(mapping, output, operands, summed):
    space = AlgorithmSpace((2, 2), 8, divides_sequences=True)
    found = mappings(BATCHED_MATMUL, space)
    assert mapping in found
    made = OperatorAlgorithms.of(BATCHED_MATMUL, [mapping])
    assert spec_of(BATCHED_MATMUL.output, mapping) == output
    assert tuple(spec_of(operand, mapping) for operand in BATCHED_MATMUL.operands) == operands
    assert made.output_sums[0] == summed


def matmul(name: str) -> Operation:
    operator = Operator(name, OperatorKind.MATMUL, 0.0, 64, 128, positions_per_row=8, weight_elements=128)
    return build_operation(operator, FamilyShapes(attention_parts=4, heads=4, experts=8))


@pytest.mark.parametrize("shape", [(1, 4), (2, 2), (2, 4), (4, 1)])
@pytest.mark.parametrize(
    "made", [BATCHED_MATMUL, matmul("projection"), matmul("experts_projection")], ids=lambda one: one.name
)
def test_every_algorithm_computes_the_product_and_both_gradients(made, shape):
    sizes = {loop: 8 if loop is B else size for loop, size in made.loops}
    found = mappings(made, AlgorithmSpace(shape, 8, divides_sequences=True))
    assert len(found) >= len(made.loops)
    algorithms = OperatorAlgorithms.of(made, found)
    for number in range(len(found)):
        oracle.contracted(made, algorithms, number, sizes, shape)


def test_heavy_operators_are_never_replicated():
    for mapping in mappings(matmul("projection"), AlgorithmSpace((2, 4), 8)):
        assert None not in mapping


def test_dimension_stays_whole_when_it_does_not_divide_evenly():
    found = mappings(matmul("projection"), AlgorithmSpace((2, 4), 6))
    assert (B, Loop.OUT) in found
    assert (Loop.OUT, B) not in found
    assert (B, B) not in found


def test_small_operator_is_sharded_as_far_as_possible():
    small = Operation("small", ((B, 0), (J, 2)), BATCHED_MATMUL.output, is_heavy=True)
    assert set(mappings(small, AlgorithmSpace((2, 8), 1))) == {(J, None)}


def test_sequences_are_sharded_only_when_enabled():
    plain = mappings(matmul("projection"), AlgorithmSpace((2, 4), 8))
    assert not any(I in mapping for mapping in plain)
    assert any(
        I in mapping for mapping in mappings(matmul("projection"), AlgorithmSpace((2, 4), 8, divides_sequences=True))
    )
