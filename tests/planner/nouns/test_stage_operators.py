"""A stage holds the shardings of its operators; whatever copies, compares or exports plans keeps them, or says why not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from trainwright import documents
from trainwright.cluster import Device
from trainwright.exports import TARGETS
from trainwright.exports.capabilities import losses
from trainwright.exports.plan_shorthand import plan_of_shorthand
from trainwright.exports.uniform_shape import shape_of
from trainwright.operator_shardings import (
    LayerSpecs,
    Loop,
    OperatorSpecs,
    SpanSpecs,
    format_algorithm,
    parse_algorithm,
    parse_spec,
)
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.search import Limits, Problem
from trainwright.search.candidates import DeviceSymmetry, plan_shape
from trainwright.search.preference.simplicity import Complexity
from trainwright.strategy import Strategy
from trainwright_operator.flow.documents.planned_trials import plan_digest

DEVICES = tuple(Device(f"node-{node}", slot) for node in (1, 2) for slot in (0, 1))


def specs_of(
    algorithm: str = "batch→0 out→1", first: int = 0, count: int = 2, mesh: tuple[int, int] = (2, 2)
) -> SpanSpecs:
    operator = OperatorSpecs("feed_forward_in", algorithm, "S0 R S1", ("S0 R R",), "R S1")
    return SpanSpecs(mesh, (LayerSpecs(first, "block", (operator,), count),))


def stage_of(operators: SpanSpecs | None, rows: tuple[int, ...] = (2, 2)) -> Stage:
    return Stage(DEVICES, (LayerRun(0, 2, Strategy(2, 2), rows),), operators)


def plan_of(operators: SpanSpecs | None) -> Plan:
    return Plan(2, 8, (Pipeline(2, 4, (stage_of(operators),)),))


DEGREES, OPERATORS = plan_of(None), plan_of(specs_of())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: stage_of(specs_of(mesh=(2, 4))), "a mesh of 2 × 4 has 8 devices, but the stage has 4"),
        (lambda: stage_of(specs_of(count=1)), "expected each of the stage's layers once, got layers 0…0"),
        (lambda: stage_of(specs_of(first=1)), "got layers 1…2"),
        (lambda: stage_of(specs_of(), rows=(3, 1)), r"as many rows on every replica, got rows \[3, 1\]"),
        (
            lambda: stage_of(specs_of("batch→01"), rows=(1, 1)),
            "layers 0…1, operator feed_forward_in: batch→01 divides the batch by 4, which does not divide a micro-batch of 2",
        ),
        (lambda: specs_of("rows→0"), "operator feed_forward_in: algorithm: expected loops .* got 'rows→0'"),
        (
            lambda: replace(specs_of().layers[0].operators[0], output="S2 R"),
            "feed_forward_in: output: expected R, S0, S1 or S01 .* got 'S2 R'",
        ),
        (
            lambda: replace(specs_of().layers[0].operators[0], operands=("R", "S")),
            r"feed_forward_in: operands\[1\]: expected R, S0, S1 or S01 .* got 'S'",
        ),
        (lambda: replace(specs_of(), mesh_shape=(0, 4)), "mesh_shape: expected at least one device"),
        (lambda: replace(specs_of(), layers=specs_of().layers * 2), "layers: layer 2 must follow, got 0"),
        (lambda: specs_of(count=0), "layer 0: count: expected at least 1, got 0"),
    ],
)
def test_shardings_that_do_not_fit_their_stage_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_documents_keep_the_shardings_and_have_none_without() -> None:
    assert documents.loads(documents.dumps(OPERATORS), Plan) == OPERATORS
    assert documents.loads(documents.dumps(DEGREES), Plan) == DEGREES
    assert set(documents.dump(DEGREES)["pipelines"][0]["stages"][0]) == {"devices", "layers"}


def test_shardings_listed_layer_by_layer_are_those_of_equal_neighbours() -> None:
    (both,) = specs_of().layers
    singly = tuple(replace(both, layer=layer, count=1) for layer in (0, 1))
    assert replace(specs_of(), layers=singly) == specs_of()
    assert list(specs_of().each_layer()) == [(0, both), (1, both)]
    other = replace(singly[1], kind="expert_block")
    assert replace(specs_of(), layers=(singly[0], other)).layers == (singly[0], other)


def test_document_that_lists_every_layer_is_the_same_plan_with_the_same_digest() -> None:
    data = documents.dump(OPERATORS)
    (both,) = data["pipelines"][0]["stages"][0]["operators"]["layers"]
    assert both.pop("count") == 2
    data["pipelines"][0]["stages"][0]["operators"]["layers"] = [both, {**both, "layer": 1}]
    assert documents.parse(data, Plan) == OPERATORS
    assert plan_digest(OPERATORS) == "971e2441f7c0fef7"  # of the first version with shardings, which listed every layer


def test_document_with_a_wrong_word_is_refused_with_its_place() -> None:
    data = documents.dump(OPERATORS)
    data["pipelines"][0]["stages"][0]["operators"]["layers"][0]["operators"][0]["weight_held"] = "half"
    with pytest.raises(documents.DocumentError, match="weight_held"):
        documents.parse(data, Plan)


@pytest.mark.parametrize("algorithm", ["replicated", "batch→0 out→1", "in→01", "heads→1"])
def test_algorithm_is_read_as_it_is_written(algorithm: str) -> None:
    assert format_algorithm(parse_algorithm(algorithm)) == algorithm


def test_words_name_loops_and_axes_by_mesh_dimension() -> None:
    assert parse_algorithm("batch→1") == (None, Loop.BATCH)
    assert parse_spec("S01 R S1") == ((0, 1), (), (1,))
    assert specs_of().parts(specs_of().layers[0].operators[0], Loop.OUT) == 2


def test_keys_tell_plans_apart_by_their_shardings(make_problem: Callable[..., Problem]) -> None:
    symmetry = DeviceSymmetry(make_problem(layers=2).cluster)
    for key in (plan_digest, plan_shape, symmetry.canonical_key, hash):
        assert len({key(plan) for plan in (DEGREES, OPERATORS, plan_of(specs_of("out→01")))}) == 3


def test_summary_names_the_shardings_and_shorthand_says_where_they_are_set() -> None:
    assert OPERATORS.summary() == "pp1 dp2 tp2 operators mb2×2 [2]"
    assert OPERATORS.without_operators == DEGREES
    assert DEGREES.without_operators is DEGREES
    with pytest.raises(ValueError, match=r"operators.* in a file"):
        plan_of_shorthand("dp2 tp2 mb2 operators", DEVICES, 2, 8)


def test_shardings_count_as_more_complex_than_degrees(make_problem: Callable[..., Problem]) -> None:
    cluster = make_problem(layers=2).cluster
    sharded, degrees = (Complexity.of(plan, cluster) for plan in (OPERATORS, DEGREES))
    assert degrees < sharded
    assert sharded.describe_excess(degrees) == ("shardings of operators in 1 stage",)


def test_limits_bound_shardings_by_the_devices_of_their_stage() -> None:
    for limits in (Limits(max_tensor_degree=2), Limits(max_data_degree=2)):
        assert limits.allows_plan(DEGREES)
        assert not limits.allows_plan(OPERATORS)
    assert Limits(max_tensor_degree=4, max_data_degree=4).allows_plan(OPERATORS)


@pytest.mark.parametrize("name", TARGETS)
def test_trainer_that_does_not_read_plans_refuses_the_shardings(name: str) -> None:
    capabilities = TARGETS[name].capabilities
    lost = [phrase for phrase in losses(OPERATORS, capabilities) if "shardings of single operators" in phrase]
    assert len(lost) == (0 if capabilities.every_plan else 1)
    assert shape_of(OPERATORS) is None
