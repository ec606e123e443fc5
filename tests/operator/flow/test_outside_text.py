"""Text from outside: whatever it holds, what the operator tells and logs stays readable and on one line."""

from __future__ import annotations

import copy
import json
import logging
import sys
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
from flow_harm import fail_pods, running
from flow_reports import report_of
from flow_world import RESOURCE, World, node, spec_of
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from property_tests import examples

from trainwright.outside.plain_text import find_control, plain_line, plain_text, without_controls
from trainwright.worker_api import PROGRESS_MARKER, REPORT_MARKER, LinkTask
from trainwright_operator import device_resource, plan_resource
from trainwright_operator.api.installation import InstallationRules, PodTemplateRule
from trainwright_operator.api.spec import LauncherKind
from trainwright_operator.flow.gangs.launchers.registry import LAUNCHERS
from trainwright_operator.flow.nodes.published_devices import PublishedDevices
from trainwright_operator.flow.snapshot import JobFacts, Snapshot
from trainwright_operator.kube import object_facts, queue_reader
from trainwright_operator.kube.client import ApiError
from trainwright_operator.kube.main import PlainFormatter
from trainwright_operator.kube.requests import pod_refusals
from trainwright_operator.node_resource import node_facts

NASTY = (
    "\x1b[31m", "\x1b]0;owned\x07", "\x9b2J", "\a", "\0", "\x7f", "\x85", "\r", "\n", "\v", "\u2028", "\u2029", "\u200b",
    "\u200d", "\u200f", "\u202e", "\u2066", "\u2069", "\ufeff", "\ud800", "\U000e0041",
)  # fmt: skip
KEPT = "Grüße 日本語 🚀 é ñ – “x”"
CONTROLS = {"Cc", "Cf", "Cs", "Zl", "Zp"}
HARM = examples(300, quick=12, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def nasty() -> st.SearchStrategy[str]:
    """Return texts of nasty and normal characters, with words at both ends."""
    parts = st.one_of(st.sampled_from(NASTY), st.characters(), st.sampled_from(KEPT.split()))
    return st.lists(parts, max_size=8).map(lambda found: f"begin{''.join(found)}end")


def texts(value: Any) -> Iterator[str]:
    """Yield every text in a value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from (*texts(key), *texts(one))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from texts(one)
    elif is_dataclass(value) and not isinstance(value, type):
        for one in fields(value):
            yield from texts(getattr(value, one.name))


def controls(text: str, allowed: str = "") -> list[str]:
    return [one for one in text if unicodedata.category(one) in CONTROLS and one not in allowed]


def test_every_control_character_is_one_and_every_other_stays() -> None:
    for number in range(sys.maxunicode + 1):
        character = chr(number)
        category = unicodedata.category(character)
        if category in CONTROLS and character not in "\t\n":
            assert controls(plain_text(f"a{character}b")) in ([], ["\n"]), hex(number)
        elif category != "Cn":
            assert plain_text(character) == character, hex(number)


def test_escape_sequences_go_whole_and_words_stay_apart() -> None:
    assert plain_text("\x1b[31mred\x1b[0m \x1b]8;;http://x\x1b\\link\x1b]8;;\x07 \x9b1mb\x1b(Bc") == "red link bc"
    assert plain_line("one\u2028two\r\nthree\x85four") == "one two three four"
    assert plain_text("no end \x1b]0;title\nnext") == "no end 0;title\nnext"
    assert plain_text(KEPT) == plain_line(KEPT) == KEPT


@given(nasty())
def test_plain_text_is_stable(text: str) -> None:
    assert plain_text(plain_text(text)) == plain_text(text)
    assert controls(plain_line(text)) == []
    assert find_control(plain_text(text)) is None


META = {"name": "n", "namespace": "d", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z", "resourceVersion": "1"}
TIME = "2026-01-01T00:00:00Z"
LABELS = {"trainwright.dev/gang": "links", "training.kubeflow.org/job-name": "j", "other": "?"}
OBJECTS: dict[str, tuple[dict[str, Any], Any]] = {
    "node": (
        {
            "metadata": {**META, "labels": {"nvidia.com/gpu.product": "?"}, "annotations": {"a": "?"}},
            "spec": {"taints": [{"key": "k", "value": "?", "effect": "?"}]},
            "status": {"allocatable": {RESOURCE: "?"}},
        },
        node_facts,
    ),
    "slice": (
        {
            "spec": {
                "nodeName": "n",
                "devices": [
                    {
                        "attributes": {"productName": {"string": "?"}, "driverVersion": {"version": "?"}},
                        "capacity": {"memory": {"value": "?"}},
                    }
                ],
            }
        },
        lambda one: PublishedDevices.of([device_resource.pool_part(one, {})], {}).slice_devices(),
    ),
    "device class": (
        {
            "metadata": META,
            "spec": {"extendedResourceName": RESOURCE, "selectors": [{"cel": {"expression": "?"}}]},
        },
        device_resource.device_class,
    ),
    "job": (
        {
            "metadata": {**META, "labels": LABELS},
            "status": {
                "conditions": [{"type": "Failed", "status": "True", "message": "?", "lastTransitionTime": TIME}]
            },
        },
        lambda one: object_facts.job_facts(one, LAUNCHERS[LauncherKind.PYTORCH_JOB]),
    ),
    "pod": (
        {
            "metadata": {**META, "labels": LABELS},
            "spec": {},
            "status": {
                "phase": "Failed",
                "reason": "?",
                "message": "?",
                "containerStatuses": [
                    {"name": "pytorch", "imageID": "?", "state": {"waiting": {"reason": "?", "message": "?"}}},
                    {"name": "x", "state": {"terminated": {"exitCode": 1, "reason": "?", "message": "?"}}},
                ],
            },
        },
        object_facts.pod_facts,
    ),
    "ConfigMap": (
        {"metadata": {**META, "annotations": {"a": "?"}}, "data": {}},
        object_facts.stored_config_map,
    ),
    "plan": (
        {
            "metadata": {**META, "annotations": {"a": "?"}},
            "spec": {"worker": {"image": "?"}, **json.loads(spec_of().model_dump_json(by_alias=True, include={"model", "training"}, exclude_none=True))},
            "status": {
                "conditions": [
                    {"type": "Accepted", "status": "True", "reason": "Accepted", "lastTransitionTime": TIME, "message": "?"}
                ],
                "cluster": {"excludedNodes": [{"name": "n", "reason": "?"}], "nodes": [{"name": "n", "accelerator": "?", "devices": 1}]},
            },
        },
        lambda one: plan_resource.plan_facts(one, "worker:1"),
    ),
    "queue": (
        {
            "metadata": META,
            "spec": {"resourceGroups": [{"coveredResources": [RESOURCE], "flavors": [{"name": "?"}]}]},
        },
        lambda one: without_controls(queue_reader.queue_facts("q", one, [], [], RESOURCE)),
    ),
    "event": (
        {"metadata": {}, "involvedObject": {"name": "j"}, "message": "?", "lastTimestamp": TIME},
        lambda one: pod_refusals.newest_warnings([one], LauncherKind.PYTORCH_JOB),
    ),
    "workload": (
        {"status": {"conditions": [{"type": "QuotaReserved", "status": "False", "message": "?"}]}},
        lambda one: queue_reader.with_workload(JobFacts("j", "links", World().now), one),
    ),
}  # fmt: skip


def filled(value: Any, text: str) -> Any:
    if isinstance(value, dict):
        return {key: filled(one, text) for key, one in value.items()}
    if isinstance(value, list):
        return [filled(one, text) for one in value]
    return text if value == "?" else value


@pytest.mark.parametrize("kind", OBJECTS)
@given(nasty())
def test_object_of_the_api_server_is_read_without_control_characters(kind: str, text: str) -> None:
    raw, convert = OBJECTS[kind]
    found = convert(filled(raw, text))
    if kind == "plan":
        assert found.spec.worker.image == plain_text(text)
        assert all(controls(one) == [] for one in texts(found.status.dump()))
        found = (found.image, found.annotations)
    told = list(texts(found))
    assert all(controls(one, allowed="\n\t") == [] for one in told)
    # An escape sequence may take the next letter for its own.
    assert kind in ("ConfigMap", "queue") or any("begin" in one and "nd" in one for one in told)


@given(nasty())
def test_error_of_the_api_server_is_one_plain_line(text: str) -> None:
    assert controls(str(ApiError(400, text))) == []


@given(nasty(), nasty())
def test_record_of_the_log_cannot_pass_for_several(message: str, error: str) -> None:
    record = logging.LogRecord(
        "kopf", logging.ERROR, "", 0, "told: %s", (message,), (RuntimeError, RuntimeError(error), None)
    )
    first, *others = PlainFormatter("%(levelname)s %(message)s").format(record).split("\n")
    assert first.startswith("ERROR told: begin")
    assert all(one.startswith("    ") for one in others)
    assert all(controls(one, allowed="\t") == [] for one in (first, *others))


class OutsideWorld(World):
    """World whose objects are read as the adapters read them."""

    def snapshot(self) -> Snapshot:
        found = super().snapshot()
        outside = ("nodes", "jobs", "pods", "slice_devices", "planner", "queue", "refusals", "dry_run", "failing")
        return replace(found, **{name: without_controls(getattr(found, name)) for name in outside})


def harm(world: World, place: str, text: str) -> None:  # noqa: C901, PLR0912 - a place each
    """Put a text into one place outside of the operator, and run."""
    pods = world.pods
    if place in ("termination", "failure", "waiting", "pod", "progress", "image", "job"):
        world.run(until=lambda: running(world, "links"))
    failure = json.dumps({"document": "Failure", "reason": "Hang", "message": text, "doing": text})
    match place:
        case "termination":
            fail_pods(world, "links", termination_message=text)
        case "failure":
            fail_pods(world, "links", termination_message=failure)
        case "waiting":
            for name, pod in pods.items():
                waiting = replace(
                    pod.containers[0], running_since=None, waiting_reason="ErrImagePull", waiting_message=text
                )
                pods[name] = replace(pod, phase="Pending", containers=(waiting,))
            world.pass_time(60)
        case "pod":
            world.pods = {
                name: replace(pod, phase="Failed", containers=(), reason="Evicted", message=text)
                for name, pod in pods.items()
            }
        case "progress":
            line = f"{PROGRESS_MARKER} {json.dumps({'done': 1, 'total': 2, 'what': text})}\n"
            world.pods = {name: replace(pod, log=line) for name, pod in pods.items()}
        case "image":
            world.image_id = lambda node, image: f"sha256:{text}{node}"
        case "job":
            world.pods = {}
            world.jobs = {name: replace(job, failed_at=world.now, message=text) for name, job in world.jobs.items()}
            world.pass_time(60)
        case "report":
            world.log = lambda task: (
                f"{REPORT_MARKER} {json.dumps({'document': text})}\n" if isinstance(task, LinkTask) else None
            )
        case "unreadable":
            world.log = lambda task: f"{REPORT_MARKER} {text}\n" if isinstance(task, LinkTask) else None
        case "product":
            world.nodes = tuple(
                replace(one, labels={**one.labels, "nvidia.com/gpu.product": f"{one.name}{text}"})
                for one in world.nodes
            )
        case "annotation":
            world.nodes = tuple(replace(one, annotations={"trainwright.dev/emulation": text}) for one in world.nodes)
        case "memory":
            world.nodes = tuple(
                replace(one, labels={**one.labels, "nvidia.com/gpu.memory": text}) for one in world.nodes
            )
        case "refusal":
            world.refuse_jobs = text
        case "template":
            world.template_error = ("PodTemplateInvalid", text)
        case "search":

            def search(request: object) -> str:
                raise ValueError(text)

            world.search = search  # type: ignore[assignment]
        case "ConfigMap":
            world.run(until=lambda: bool(world.stored))
            name = next(iter(world.stored))
            world.stored[name] = replace(
                world.stored[name], data={"document.json": json.dumps({"nodes": text, text: 1})}
            )
        case "spec":
            world.spec_error = text


PLACES = (
    "termination", "failure", "waiting", "pod", "progress", "image", "job", "report", "unreadable", "product", "annotation",
    "memory", "refusal", "template", "search", "ConfigMap", "spec",
)  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@HARM
@given(nasty())
def test_text_from_outside_is_told_without_control_characters(place: str, text: str) -> None:
    small = spec_of(search={"planner": "Megatron", "limits": {"maxTensorDegree": 1}}, trials={"topK": 1})
    world = OutsideWorld(spec=small, nodes=(node("n1"), node("n2", devices=1)), report=report_of)
    harm(world, place, text)
    for _ in range(12):
        world.step()
        json.dumps(world.status.dump()).encode()
        assert all(controls(one) == [] for one in texts(world.status.dump()))
    assert world.status.conditions
    assert all(controls(one.message) == [] for one in world.events)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (
            {"spec": {"containers": [{"name": "pytorch", "env": [{"name": "A", "value": "x\x1b[8m"}]}]}},
            "spec.worker.podTemplate.spec.containers[pytorch].env[A].value: holds the control or invisible character U+001B",
        ),
        ({"metadata": {"annotations": {"a\u202eb": "c"}}}, "metadata.annotations: the name 'ab': holds the control or"),
    ],
)
def test_pod_template_with_a_control_character_is_not_accepted(template: dict[str, Any], words: str) -> None:
    world = World(
        spec=spec_of(worker={"podTemplate": template}), rules=InstallationRules(pod_template=PodTemplateRule.ANY)
    )
    world.run()
    found = world.condition("Accepted")
    assert (found.status, found.reason) == ("False", "SpecInvalid")
    assert words in found.message
    assert controls(found.message) == []


def test_accepted_plan_of_before_with_a_control_character_goes_on() -> None:
    template = {"spec": {"containers": [{"name": "pytorch", "env": [{"name": "A", "value": "line 1\n\tline 2"}]}]}}
    world = World(spec=spec_of(worker={"podTemplate": template}))
    world.run(until=lambda: running(world, "links"))
    value = template["spec"]["containers"][0]["env"][0]
    value["value"] += "\x1b[8m"
    world.spec = spec_of(worker={"podTemplate": template})  # as an earlier version accepted it
    assert world.run().winner is not None


@pytest.mark.parametrize("place", ["termination", "failure", "pod", "refusal", "template", "search"])
def test_normal_letters_of_every_script_are_told(place: str) -> None:
    world = OutsideWorld(spec=spec_of(trials={"topK": 1}))
    harm(world, place, KEPT)
    told: list[str] = []
    for _ in range(40):
        world.step()
        told += [one.message for one in copy.copy(world.events)]
    assert any(KEPT in one for one in told)
