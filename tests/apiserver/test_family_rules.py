"""Rules of the model families: their CEL on the API server and the planner's check refuse the same sizes."""

from __future__ import annotations

import random
from dataclasses import MISSING, asdict, fields, is_dataclass
from types import SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from pydantic.alias_generators import to_camel

from trainwright.families import FAMILIES, CustomChecks, CustomKind
from trainwright.families.fields import Bounds, Doc, RotaryScaling, field_types
from trainwright_operator.api.model import in_camel_case

DRAWS = 60
SIZES = (1, 2, 3, 4, 6, 8, 32, 512, 513, 1024)
TEXTS = ("models:f", "package.models_2:make", "_m:_f", "models", ":f", "m:f:g", "2m:f", "m.:f", "m:f\n", "m-x:f")

PARTS: dict[type[Any], tuple[Any, ...]] = {
    CustomKind: (CustomKind("Stem", 1, 1.0, 1, 1.0),),
    CustomChecks: (CustomChecks(),),
    RotaryScaling: tuple(RotaryScaling("llama3", 2.0, low) for low in (0.5, 4.0)),
}


def drawn(hint: Any, generator: random.Random, least: int = 0, most: float = 4.0) -> Any:
    """Return a value of a field's type within its bounds; lists have up to three entries."""
    kind, members = get_origin(hint), get_args(hint)
    if kind is Annotated:
        bounds = next((note for note in members[1:] if type(note) is Bounds), None)
        return drawn(members[0], generator, *((bounds.least, bounds.most) if bounds else (least, most)))
    if kind in (Union, UnionType):
        return generator.choice([None, drawn(members[0], generator)])
    if kind is tuple:
        return tuple(drawn(members[0], generator) for _ in range(generator.randint(1, 3)))
    if hint in PARTS:
        return generator.choice(PARTS[hint])
    sizes = [size for size in (0, *SIZES) if least <= size <= most]
    return generator.choice(members if kind is Literal else {bool: (False, True), str: TEXTS}.get(hint, sizes))


def drawn_sizes(noun: type[Any], generator: random.Random) -> dict[str, Any]:
    """Return values of a family's fields that a TrainingPlan has, about half of those with a default left out."""
    sizes = {}
    for field in fields(noun):
        hint = field_types(noun)[field.name]
        is_offered = next(note for note in reversed(get_args(hint)) if isinstance(note, Doc)).is_offered
        if is_offered and field.name != "family" and (field.default is MISSING or generator.random() < 0.5):
            sizes[field.name] = drawn(hint, generator)
    return sizes


def in_resource(value: Any) -> Any:
    if isinstance(value, tuple):
        return [in_resource(member) for member in value]
    if is_dataclass(value) and not isinstance(value, type):
        return in_resource(asdict(value))
    if isinstance(value, dict):
        return {to_camel(name): in_resource(member) for name, member in value.items() if member is not None}
    return value


@pytest.mark.parametrize("tag", FAMILIES)
def test_the_api_server_and_the_planner_refuse_by_the_same_rules(api_server, training_plan, tag: str) -> None:
    generator, noun = random.Random(tag), FAMILIES[tag]
    defaults = {field.name: field.default for field in fields(noun)}
    plans, expected = [], []
    for number in range(DRAWS):
        sizes = drawn_sizes(noun, generator)
        plans.append(training_plan(f"plan-{number}", {"model": {in_camel_case(tag): in_resource(sizes)}}))
        whole = SimpleNamespace(**defaults | sizes)  # no rule but these: a family checks its stages, too
        expected.append({in_camel_case(rule.sentence) for rule in noun.rules if not rule.check(whole)})
    answer = api_server.try_kubectl("create", "--dry-run=server", document=plans).stderr
    refusals = {text.partition('"')[0]: text for text in answer.split('TrainingPlan.trainwright.dev "')[1:]}
    sentences = {in_camel_case(rule.sentence) for rule in noun.rules}
    for number, broken in enumerate(expected):
        refusal = refusals.get(f"plan-{number}", "")
        assert {sentence for sentence in sentences if sentence in refusal} == broken, (plans[number]["spec"], refusal)
        custom = plans[number]["spec"]["model"].get("custom", {})
        names = (*custom.get("layers", ()), *custom.get("keepFloat32", ()))
        has_line_end = any("\n" in name for name in names)
        assert bool(refusal) == (bool(broken) or has_line_end), refusal  # names of kinds and fields are of one line
    for sentence in sentences:
        assert 0 < sum(sentence in broken for broken in expected) < DRAWS, f"no draw tells: {sentence}"
