"""Whatever copies, compares, stores or exports plans tells two apart that differ in any one of their own fields, or says why not."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import fields, replace
from typing import Any

import pytest

from trainwright import documents
from trainwright.cluster import Device
from trainwright.exports import TARGETS, Capabilities, ExportRequest, is_expressible, nearest_plan
from trainwright.exports.plan_shorthand import plan_of_shorthand
from trainwright.exports.uniform_shape import shape_of
from trainwright.layer import Dtype
from trainwright.plan import LayerRun, Pipeline, Plan, Schedule, Stage
from trainwright.search import Problem
from trainwright.search.candidates import DeviceSymmetry, plan_shape
from trainwright.search.preference.plan_adaptation import adapt_plan
from trainwright.strategy import Strategy
from trainwright_operator.flow.documents.planned_trials import plan_digest

LAYERS = 14
DEVICES = tuple(Device("node-1", slot) for slot in range(2))


def plan_of(layers: int = LAYERS, micro_batches: int = 4, **others: Any) -> Plan:
    """Return a plan of two stages, one device each."""
    ends = (0, 5, layers)
    stages = tuple(
        Stage(
            DEVICES[number : number + 1],
            (LayerRun(ends[number], ends[number + 1] - ends[number], Strategy(1, 1), (2,)),),
        )
        for number in (0, 1)
    )
    return Plan(layers, 2 * micro_batches, (Pipeline(micro_batches, 2, stages),), **others)


BASE = plan_of(dtype=Dtype.FLOAT16)
OTHERS: dict[str, Plan] = {
    "model_layers": plan_of(LAYERS + 1, dtype=Dtype.FLOAT16),
    "global_batch_size": plan_of(micro_batches=8, dtype=Dtype.FLOAT16),
    "pipelines": plan_of(micro_batches=8, dtype=Dtype.FLOAT16),
    "schedule": plan_of(schedule=Schedule.GPIPE, dtype=Dtype.FLOAT16),
    "dtype": plan_of(dtype=Dtype.BFLOAT16),
}
"""Plans that differ from the base in each field; the batch is that of the pipelines, so these two change together."""
FIELDS = [field.name for field in fields(Plan)]


def changed(field: str) -> Plan:
    assert field in OTHERS, f"add a change of {field} to this test, and look at what fails"
    return OTHERS[field]


@pytest.mark.parametrize("field", FIELDS)
def test_documents_keep_the_field(field: str) -> None:
    plan = changed(field)
    loaded = documents.loads(documents.dumps(plan), Plan)
    assert (loaded, hash(loaded)) == (plan, hash(plan))
    assert documents.dumps(plan) != documents.dumps(BASE)


def test_a_plan_without_a_number_format_has_the_document_and_the_digest_of_former_versions() -> None:
    plan = plan_of()
    assert set(documents.dump(plan)) == {
        "apiVersion", "document", "model_layers", "global_batch_size", "pipelines", "schedule",
    }  # fmt: skip
    assert plan_digest(plan) == "301a4e226760d881"
    assert plan_digest(BASE.in_any_format) == plan_digest(plan)


KEYS: dict[str, tuple[Callable[[Plan], Hashable], set[str]]] = {
    "digest of a trial": (plan_digest, set()),
    "plan itself": (lambda plan: plan, set()),
    "plan in any number format": (lambda plan: plan.in_any_format, {"dtype"}),
    # The plans of one search are in its number format, and a trial of the one says what the other takes.
    "shape of a plan": (plan_shape, {"model_layers", "dtype"}),
    "shape for trainers": (shape_of, set()),
}


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("key", KEYS)
def test_key_tells_plans_apart(key: str, field: str) -> None:
    key_of, indifferent = KEYS[key]
    assert (key_of(changed(field)) == key_of(BASE)) == (field in indifferent)


def test_interchangeable_devices_hide_the_number_format_alone(make_problem: Callable[..., Problem]) -> None:
    """The plans of one search, which alone are compared so, are in its number format."""
    key = DeviceSymmetry(make_problem(layers=LAYERS - 2).cluster).canonical_key
    assert {field for field in FIELDS if key(changed(field)) == key(BASE)} == {"dtype"}


@pytest.mark.parametrize("field", FIELDS)
def test_shape_for_trainers_is_the_plan_again(field: str) -> None:
    shape = shape_of(changed(field))
    assert shape is not None
    assert shape.plan() == changed(field)


def supports(capabilities: Capabilities, field: str) -> bool:
    """Return whether a trainer has uneven stages, and the schedule where plans differ in that; else `losses` says so."""
    has_stages = capabilities.pipelines and capabilities.uneven_stages
    return capabilities.every_plan or (has_stages and (field != "schedule" or Schedule.GPIPE in capabilities.schedules))


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("name", TARGETS)
def test_export_says_the_field_unless_the_trainer_lacks_it(name: str, field: str) -> None:
    target, pairs = TARGETS[name], [(BASE, changed(field))]
    if field == "dtype":
        stage = Stage(DEVICES, (LayerRun(0, LAYERS, Strategy(1, 2), (1, 1)),))
        whole = Plan(LAYERS, 8, (Pipeline(4, 2, (stage,)),))
        pairs += [(replace(whole, dtype=Dtype.FLOAT32), replace(whole, dtype=Dtype.BFLOAT16))]
    said = {
        target.files(ExportRequest(first)) != target.files(ExportRequest(second))
        for first, second in pairs
        if all(is_expressible(plan, target.capabilities) for plan in (first, second))
    }
    assert said == ({True} if field == "dtype" or supports(target.capabilities, field) else set())


@pytest.mark.parametrize("name", TARGETS)
def test_nearest_plan_keeps_the_number_format(name: str) -> None:
    assert nearest_plan(replace(BASE, schedule=Schedule.GPIPE), TARGETS[name].capabilities).dtype is Dtype.FLOAT16


SHORTHAND = {
    "global_batch_size": ("pp2 mb2×8 [5 9] fp16", LAYERS, 16),
    "model_layers": ("pp2 mb2×4 [5 10] fp16", LAYERS + 1, 8),
    "pipelines": ("pp2 mb2×8 [5 9] fp16", LAYERS, 16),
    "schedule": ("pp2 mb2×4 [5 9] fp16 gpipe", LAYERS, 8),
    "dtype": ("pp2 mb2×4 [5 9] bfloat16", LAYERS, 8),
}


@pytest.mark.parametrize("field", FIELDS)
def test_shorthand_says_the_field(field: str) -> None:
    words, layers, batch = SHORTHAND[field]
    assert plan_of_shorthand(words, DEVICES, layers, batch) == changed(field)


def test_plans_adapted_to_other_devices_are_in_the_number_format_of_the_search(
    make_problem: Callable[..., Problem],
) -> None:
    problem = make_problem(layers=LAYERS - 2, batch=8)
    running = plan_of(dtype=Dtype.FLOAT16)
    adapted = adapt_plan(running, problem)
    assert adapted
    assert {plan.dtype for plan in adapted} == {None}
    kept = replace(problem, preference=replace(problem.preference, keep=running))
    assert kept.is_running(running.in_any_format)
    assert kept.is_running(replace(running, dtype=Dtype.BFLOAT16))
