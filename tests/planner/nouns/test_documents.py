"""Documents: round trips, and refusals of anything else in one sentence."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from trainwright import documents
from trainwright.calibration import Trial, Trials
from trainwright.cluster import Cluster
from trainwright.families import Gpt
from trainwright.plan import Plan
from trainwright.profiles import Profiles
from trainwright.runtime import ComputeRatio, Runtime
from trainwright.search import Problem, run
from trainwright.training import RequestedDtype, Training

NOUNS = (Cluster, Plan, Profiles, Training, Runtime, Trials)

TRAINING = """
gpt: {layers: 24, hidden_size: 1024, heads: 16, sequence_length: 1024, vocabulary_size: 52256}
global_batch_size: 32
dtype: float16
"""


@pytest.fixture(scope="module")
def nouns(make_problem: Callable[..., Problem]) -> tuple[object, ...]:
    problem = make_problem()
    plan = run("amp", problem, top=1)[0].plan
    runtime = Runtime((ComputeRatio("emulated-fast", 1.1),), link_ratio=0.9)
    return (
        problem.cluster,
        plan,
        problem.profiles,
        Training(4, Gpt(2, 8, 2, 4, 10)),
        runtime,
        Trials((Trial(plan, 1.5),)),
    )


def test_every_document_round_trips_through_json_and_yaml(nouns: tuple[object, ...]) -> None:
    for noun in nouns:
        text = documents.dumps(noun)
        assert documents.loads(text, type(noun)) == noun
        assert documents.loads(yaml.safe_dump(json.loads(text)), type(noun)) == noun


def test_trials_accept_a_whole_plan_document(nouns: tuple[object, ...]) -> None:
    trials = next(noun for noun in nouns if isinstance(noun, Trials))
    document = documents.dump(trials)
    document["trials"][0]["plan"] = documents.dump(trials.trials[0].plan)
    assert documents.parse(document, Trials) == trials
    document["trials"][0]["plan"]["apiVersion"] = "trainwright.dev/v9"
    with pytest.raises(documents.DocumentError, match=r"trials\.0\.plan\.apiVersion"):
        documents.parse(document, Trials)


def test_minimal_model_file_is_read() -> None:
    training = documents.loads(TRAINING, Training)
    assert training == Training(32, Gpt(24, 1024, 16, 1024, 52256), RequestedDtype.FLOAT16, "adam")
    assert len(training.model.layers) == 26


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"global_batch_size": 0}, "model.yaml: global_batch_size must be 1 … 1000000, got 0"),
        (
            {"dtype": "float8"},
            "model.yaml: dtype: expected 'auto', 'float32', 'float16' or 'bfloat16', got 'float8'",
        ),
        ({"batch": 3}, "model.yaml: batch: there is no such field; there are global_batch_size, gpt, "),
        (
            {"gpt": {**yaml.safe_load(TRAINING)["gpt"], "depth": 3}},
            "model.yaml: gpt.depth: there is no such field; there are layers, hidden_size, ",
        ),
        ({"globalBatchSize": 3}, "there is no such field; did you mean global_batch_size?"),
        ({"gpt": 3}, "model.yaml: gpt: expected a mapping"),
        ({"dtype": "fp16"}, "'float16' or 'bfloat16', got 'fp16'; write float16"),
        ({"dtype": "BF16"}, "got 'BF16'; write bfloat16"),
        ({"dtype": "half"}, "got 'half'; write float16"),
        ({"dtype": "torch.float32"}, "got 'torch.float32'; write float32"),
        ({"dtype": "float8"}, "got 'float8'$"),
        ({"optimizer": "lion"}, "model.yaml: optimizer: expected 'adam' or 'sgd'"),
        ({"optimizer": None}, "model.yaml: optimizer: expected 'adam' or 'sgd', got nothing$"),
        (
            {"gpt": {**yaml.safe_load(TRAINING)["gpt"], "dropout": "perhaps"}},
            "model.yaml: gpt.dropout: expected true or false, got 'perhaps'$",
        ),
        ({"gpt": {"layers": 2}}, "model.yaml: gpt.hidden_size: Field required"),
        ({"apiVersion": "v2"}, "model.yaml: expected apiVersion"),
        ({"document": "Plan"}, "expected a document of kind Training, got 'Plan', which --plan takes"),
        ({"kind": "Training"}, "model.yaml: kind: there is no such field; write document: Training, or leave it out"),
        ({"kind": ["Plan"]}, "model.yaml: kind: there is no such field; there are"),
        ({"dtype": ["fp16"]}, "or 'bfloat16', got a list$"),
        ({"kind": "Plan"}, "expected a document of kind Training, got one of kind Plan, which --plan takes"),
        ({"document": []}, r"model.yaml: expected a document of kind Training, got a list"),
        (
            {"gpt": {**yaml.safe_load(TRAINING)["gpt"], "vocabulary_size": 10**30}},
            "model.yaml: gpt.vocabulary_size: must be at most",
        ),
        ({"gpt": {**yaml.safe_load(TRAINING)["gpt"], "layers": 1025}}, "model.yaml: gpt has 1027 layers"),
        ({1: 2}, "model.yaml: "),
    ],
)
def test_error_names_the_wrong_field(change: dict[Any, Any], message: str) -> None:
    data = {**yaml.safe_load(TRAINING), **change}
    with pytest.raises(documents.DocumentError, match=message):
        documents.parse(data, Training, source="model.yaml")


@pytest.mark.parametrize(
    ("field", "given", "told"),
    [
        ("name", 5, "name: expected a text, got 5; put it between quotes"),
        ("name", None, "name: expected a text, got nothing$"),
        ("name", ["x"], "name: expected a text, got a list$"),
        ("power_watts", "300W", "power_watts: expected a number of watts, got '300W'; write 300$"),
        (
            "emulation",
            {"flops_per_second": 1, "floor_seconds": 0, "updated_parameters_per_second": 0},
            "emulation: an emulation needs updated_parameters_per_second above 0, got 0$",
        ),
        (
            "emulation",
            {"flops_per_second": 1, "floor_seconds": -1, "updated_parameters_per_second": 1},
            "emulation: an emulation needs floor_seconds of at least 0, got -1$",
        ),
    ],
)
def test_error_of_an_accelerator_says_what_to_write(field: str, given: Any, told: str) -> None:
    data = {"accelerators": [{"name": "Tesla-T4", "memory_bytes": 2**34, field: given}], "nodes": [], "links": []}
    with pytest.raises(documents.DocumentError, match=told):
        documents.parse(data, Cluster)


@pytest.mark.parametrize(
    ("keys", "noun", "told"),
    [
        (("gpt", "global_batch_size"), Cluster, "Cluster, got one of kind Training, which --model takes"),
        (("nodes", "accelerators"), Training, "Training, got one of kind Cluster, which --cluster takes"),
        (("model_layers", "pipelines"), Profiles, "Profiles, got one of kind Plan, which --plan takes"),
        (("gpt", "nodes"), Cluster, "gpt: there is no such field"),
    ],
)
def test_document_without_its_kind_is_told_by_its_fields(keys: tuple[str, ...], noun: type, told: str) -> None:
    with pytest.raises(documents.DocumentError, match=told):
        documents.parse({key: [] for key in keys}, noun)


@pytest.mark.parametrize(
    "text",
    [
        b"\xff\xfe\x00",
        b"",
        b"[]",
        b"3",
        b"{",
        b"a: &a [*a]",
        b"? [1, 2]\n: 3",
        b"!!python/object:os.system {}",
        b"gpt: *nobody",
        b"\x00",
        b"a: 1\na: 2\n---\nb: 3",
        b'{"gpt": ' + b"[" * 1500,
        b"[" * 1500 + b"]" * 1500,
        b"global_batch_size: " + b"9" * 5000,
        b"global_batch_size: 2001-99-99",
        b"global_batch_size: 0001-01-01T00:00:00+23:59",
        b"global_batch_size: !!int ''",
        b"global_batch_size: !!float ''",
        b"global_batch_size: !!bool maybe",
        b"global_batch_size: !!timestamp soon",
        b"global_batch_size: '" + b"9" * 4000 + b"'",
        b"global_batch_size: 0x" + b"f" * 5000,
        b"- " * 2000,
        b"nodes: " + b"[" * 900 + b"]" * 900,
    ],
)
@pytest.mark.parametrize("noun", [Cluster, Training])
def test_odd_text_is_refused_in_one_sentence(text: bytes, noun: type) -> None:
    with pytest.raises(documents.DocumentError) as refusal:
        documents.loads(text, noun, source="file")
    assert str(refusal.value).startswith("file: ")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("text", "got"), [(b"", "nothing"), (b"[]", "a list"), (b"5", "one value")])
def test_document_that_is_no_mapping_is_refused_in_plain_words(text: bytes, got: str) -> None:
    with pytest.raises(documents.DocumentError, match=f"^file: expected a mapping at the top, got {got}$"):
        documents.loads(text, Cluster, source="file")


def test_yaml_error_names_the_line_and_not_the_library() -> None:
    with pytest.raises(documents.DocumentError, match=r"in line 2, column 1") as refusal:
        documents.loads(b'nodes: "x\n', Cluster, source="file")
    assert "string>" not in str(refusal.value)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=4)
anything = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            scalars.filter(lambda key: not (isinstance(key, float) and math.isnan(key))), inner, max_size=3
        )
    ),
    max_leaves=8,
)


@given(data=anything, noun=st.sampled_from(NOUNS))
@example(data={"\n": None}, noun=Cluster)
def test_any_data_is_read_or_refused(data: Any, noun: type) -> None:
    check(data, noun)


@given(text=st.binary(max_size=60), noun=st.sampled_from(NOUNS))
def test_any_bytes_are_refused_or_read(text: bytes, noun: type) -> None:
    refusal, _ = refused_or_read(lambda: documents.loads(text, noun))
    assert "\n" not in refusal


@given(data=st.data(), value=anything)
def test_a_good_document_with_one_odd_value_is_read_or_refused(
    nouns: tuple[object, ...], data: st.DataObject, value: Any
) -> None:
    noun = data.draw(st.sampled_from(nouns))
    document: Any = documents.dump(noun)
    place = document
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.booleans()):
            place[key] = value
            break
        place = place[key]
    check(document, type(noun))


def check(data: Any, noun: type) -> None:
    """Read and then the same after a round trip, or refused in one sentence."""
    refusal, found = refused_or_read(lambda: documents.parse(data, noun))
    assert "\n" not in refusal
    if not refusal:
        assert documents.loads(documents.dumps(found), noun) == found


def refused_or_read(read: Callable[[], Any]) -> tuple[str, Any]:
    """Return the error (empty if none) and the result; any other exception fails the test."""
    try:
        return "", read()
    except documents.DocumentError as refusal:
        return str(refusal), None


def doubled(document: dict[str, Any], member: str, **change: Any) -> dict[str, Any]:
    """Return the document with the second of these members repeated and changed."""
    return {**document, member: [*document[member], {**document[member][1], **change}]}


def test_contradictory_cluster_or_profiles_are_refused(nouns: tuple[object, ...]) -> None:
    cluster, profiles = documents.dump(nouns[0]), documents.dump(nouns[2])
    edge = "node-1 -> node-2"
    for bad, noun, message in (
        (doubled(cluster, "links"), Cluster, f"the link {edge} is given twice"),
        (doubled(cluster, "links", target="nowhere"), Cluster, "names nowhere, which is not among the nodes"),
        (
            doubled(cluster, "links", bandwidth_bytes_per_second=1e-300),
            Cluster,
            f"link {edge}: bandwidth_bytes_per_second must",
        ),
        (
            doubled(cluster, "links", latency_seconds=-1),
            Cluster,
            f"link {edge}: latency_seconds must be at least 0, got -1",
        ),
        (
            doubled(profiles, "layers", rows=3, forward_seconds=1e300),
            Profiles,
            "forward_seconds: must be at most",
        ),
        ({**cluster, "nodes": {"node-1": 2}}, Cluster, "nodes: expected a list"),
        (doubled(cluster, "nodes", name="many", devices=10**12), Cluster, "a cluster has at most 4096 devices"),
        (doubled(profiles, "layers"), Profiles, "is profiled 2 times for 2 rows; keep one"),
        (doubled(profiles, "layers", activation_bytes=-1), Profiles, "activation_bytes: must be at least 0, got -1"),
    ):
        with pytest.raises(documents.DocumentError, match=message):
            documents.parse(bad, noun)


@pytest.mark.parametrize("key", ["apiVersion", "document"])
def test_recursive_alias_is_refused(key: str) -> None:
    names = "abcdefgh"
    lists = "a: &a [1]\n" + "".join(f"{b}: &{b} [{', '.join(['*' + a] * 4)}]\n" for a, b in pairwise(names))
    with pytest.raises(documents.DocumentError) as refusal:
        documents.loads(f"{lists}{key}: *h\n", Training)
    assert len(str(refusal.value)) < 150


def test_expanding_aliases_are_refused_before_they_are_built() -> None:
    """Each level of the plan document is a list, so that every alias is a valid value there."""
    rows = "&rows [" + ", ".join(["1"] * 60) + "]"
    run = f"&run {{first: 0, count: 1, tensor: 1, data: 60, rows: {rows}}}"
    runs = f"&runs [{run}, " + ", ".join(["*run"] * 59) + "]"
    stage = f"&stage {{devices: [], layers: {runs}}}"
    stages = f"&stages [{stage}, " + ", ".join(["*stage"] * 59) + "]"
    pipeline = f"&pipeline {{micro_batches: 1, micro_batch_size: 1, stages: {stages}}}"
    pipelines = f"[{pipeline}, " + ", ".join(["*pipeline"] * 59) + "]"
    with pytest.raises(documents.DocumentError, match="expand to more than 1000000 values"):
        documents.loads(f"{{model_layers: 1, global_batch_size: 1, pipelines: {pipelines}}}", Plan)


def test_expanding_merge_keys_are_refused_before_they_are_built() -> None:
    levels = "a0: &a0 {x: 1}\n" + "".join(
        f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 9)
    )
    with pytest.raises(documents.DocumentError, match="expand to more than 1000000 values"):
        documents.loads(levels, Training)


def test_small_aliases_are_read() -> None:
    text = "gpt: &g {layers: 2, hidden_size: 8, heads: 2, sequence_length: 4, vocabulary_size: &v 10}\nglobal_batch_size: *v"
    assert documents.loads(text, Training) == Training(10, Gpt(2, 8, 2, 4, 10))


@pytest.mark.parametrize("noun", NOUNS)
def test_every_document_has_a_schema(noun: type) -> None:
    schema = documents.schema(noun)
    assert schema["type"] == "object"
    assert schema["additionalProperties"] is False
    json.dumps(schema)


def test_written_document_has_only_fields_of_its_schema(nouns: tuple[object, ...]) -> None:
    for noun in nouns:
        schema, document = documents.schema(type(noun)), documents.dump(noun)
        assert document.keys() <= schema["properties"].keys()
        assert document["apiVersion"] == schema["properties"]["apiVersion"]["const"]
        assert document["document"] == schema["properties"]["document"]["const"]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"globalBatchSize": 8}, "globalBatchSize: there is no such field; did you mean global_batch_size"),
        ({"kind": "TrainingPlan", "spec": {}}, "got a TrainingPlan, which the operator reads"),
        ({}, "global_batch_size: Field required: add it"),
    ],
)
def test_error_of_a_missing_field_names_what_was_given_instead(body, told):
    model = {"gpt": {"layers": 2, "hidden_size": 64, "heads": 4, "sequence_length": 64, "vocabulary_size": 512}}
    with pytest.raises(documents.DocumentError, match=re.escape(told)):
        documents.parse(model | body, Training)


def test_nan_is_refused_with_the_unit_of_its_field() -> None:
    text = "accelerators: [{name: a, memory_bytes: .nan}]\nnodes: [{name: n, accelerator: a, devices: 1}]\n"
    with pytest.raises(documents.DocumentError, match=r"memory_bytes: expected a number of bytes, got nan$"):
        documents.loads(text, Cluster)
