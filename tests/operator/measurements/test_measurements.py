"""Measurements that outlive a plan: what a second plan of the same namespace takes over, and what it measures anew."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
from flow_api import MemoryApi
from flow_harm import running
from flow_measurements import (
    FIRST,
    GPT,
    LINKS,
    PROFILES,
    SECOND,
    TAG,
    later,
    measured,
    measured_gangs,
    ran,
    registry,
    spec,
    world,
)
from flow_world import EMULATION, START, node

from trainwright import documents
from trainwright.profiles import Profiles
from trainwright.worker_api import ProfilingTask
from trainwright_operator.api.installation import InstallationRules, PodTemplateRule
from trainwright_operator.flow.actions import CreateConfigMap, StoredRole
from trainwright_operator.flow.measurements.obsolete_measurements import MAX_KEPT_BYTES
from trainwright_operator.flow.names import EXPIRES_ANNOTATION, MEASUREMENT_LABEL
from trainwright_operator.flow.nodes import device_types
from trainwright_operator.kube.apply import Applier
from trainwright_operator.kube.client import ApiError
from trainwright_operator.kube.object_cache import ObjectCache
from trainwright_operator.kube.snapshot_reader import ReadCache

DRIVER = "nvidia.com/cuda.driver-version.full"


def labelled(driver: str) -> tuple[Any, ...]:
    nodes = (node("n1"), node("n2"), node("n3", "emulated-t4"))
    return tuple(replace(one, labels={**one.labels, DRIVER: driver}) for one in nodes)


def test_second_plan_of_the_same_model_starts_no_profiling_and_no_links() -> None:
    first = measured()
    assert measured_gangs(first) == LINKS + PROFILES
    second = later(first)
    second.run()
    assert second.succeeded == "True"
    assert measured_gangs(second) == []
    assert second.status.links == first.status.links
    assert second.status.winner.predicted_seconds == first.status.winner.predicted_seconds
    for kind in ("LinksMeasured", "Profiled"):
        assert "; reused from " in second.condition(kind).message
        assert "measurement" in second.condition(kind).message
        assert f"of {START:%Y-%m-%d}" in second.condition(kind).message
        assert "reused" not in first.condition(kind).message


@pytest.mark.parametrize(
    ("changes", "again"),
    [
        ({"training": {"globalBatchSize": 8, "dtype": "bfloat16"}}, LINKS + PROFILES),
        ({"training": {"globalBatchSize": 8, "dtype": "float32", "optimizer": "sgd"}}, PROFILES),
        ({"profiling": {"iterations": 20}}, PROFILES),
        ({"links": {"collectives": False}}, LINKS),
        ({"worker": {"podTemplate": {"spec": {"hostNetwork": True}}}}, LINKS + PROFILES),
        (
            {"worker": {"podTemplate": {"metadata": {"annotations": {"k8s.v1.cni.cncf.io/networks": "fast"}}}}},
            LINKS + PROFILES,
        ),
        ({"worker": {"podTemplate": {"metadata": {"labels": {"team": "a"}}}}}, []),
        ({"trials": {"topK": 1}}, []),
        ({"profiling": {"maxAgeSeconds": 0}}, PROFILES),
        ({"profiling": {"maxAgeSeconds": 86_000}, "links": {"maxAgeSeconds": 86_000}}, LINKS + PROFILES),
        ({"profiling": {"maxAgeSeconds": 87_000}, "links": {"maxAgeSeconds": 87_000}}, []),
    ],
)
def test_what_a_measurement_depends_on_is_measured_anew(changes: dict[str, Any], again: list[str]) -> None:
    second = later(measured(), spec=spec(**changes), rules=InstallationRules(pod_template=PodTemplateRule.ANY))
    second.run()
    assert second.succeeded == "True"
    assert measured_gangs(second) == again


def test_another_driver_is_measured_anew() -> None:
    first = ran(nodes=labelled("550.1"))
    same, updated = later(first, "same"), later(first, "updated", nodes=labelled("560.2"))
    for second in (same, updated):
        second.run()
    assert measured_gangs(same) == []
    assert measured_gangs(updated) == LINKS + PROFILES


def test_another_device_table_is_profiled_anew_on_that_accelerator_alone() -> None:
    table = {"trainwright.dev/emulation": EMULATION.replace("1e9", "2e9")}
    nodes = (node("n1"), node("n2"), replace(node("n3", "emulated-t4"), annotations=table))
    second = later(measured(), nodes=nodes)
    second.run()
    assert measured_gangs(second) == ["profile-3", "profile-4"]


def test_links_that_were_measured_before_an_nvlink_domain_was_known_are_measured_anew() -> None:
    first = measured()
    labels = {"nvidia.com/gpu.clique": "f81d4fae-7dec.1"}
    nodes = tuple(replace(one, labels={**one.labels, **labels}) for one in first.nodes)
    connected = later(first, "connected", nodes=nodes)
    connected.run()
    assert measured_gangs(connected) == LINKS
    again = later(connected, "again")
    again.run()
    assert measured_gangs(again) == []


def test_links_over_network_devices_are_measured_apart_from_those_without() -> None:
    def offering(cards: int) -> tuple[Any, ...]:
        return tuple(replace(one, allocatable={**one.allocatable, "vpc.amazonaws.com/efa": str(cards)})
                     for one in measured().nodes)  # fmt: skip

    over_efa = later(measured(), "efa", nodes=offering(4))
    over_efa.run()
    assert measured_gangs(over_efa) == LINKS
    for name, changes, again in (
        ("same", {}, []),
        ("more", {"nodes": offering(8)}, LINKS),
        ("tcp", {"spec": spec(devices={"network": "None"})}, []),
    ):
        second = later(over_efa, name, **changes)
        second.run()
        assert (name, measured_gangs(second)) == (name, again)
    bare = later(over_efa, "bare", nodes=measured().nodes)
    bare.run()
    assert measured_gangs(bare) == []  # what the first plan measured without them


def test_links_of_a_part_of_the_nodes_are_known_and_those_of_a_new_one_are_not() -> None:
    first = measured()
    fewer, more = later(first, "fewer", nodes=first.nodes[1:]), later(first, "more", nodes=(*first.nodes, node("n4")))
    replaced = later(first, "replaced", nodes=(replace(first.nodes[0], uid="another machine"), *first.nodes[1:]))
    for second in (fewer, more, replaced):
        second.run()
        assert second.succeeded == "True"
    assert measured_gangs(fewer) == []
    assert measured_gangs(more) == LINKS
    assert measured_gangs(replaced) == LINKS


def test_only_layers_that_are_not_known_are_profiled() -> None:
    first = measured()
    second = later(first, spec=spec(model={"gpt": GPT | {"vocabularySize": 1024, "layers": 6}}))
    asked: list[ProfilingTask] = []
    report = second.report
    second.report = lambda task: (asked.append(task) if isinstance(task, ProfilingTask) else None, report(task))[1]
    second.run()
    assert second.succeeded == "True"
    assert measured_gangs(second) == [*LINKS, *PROFILES]
    assert {task.kinds for task in asked} == {("embedding", "head")}
    profiles = [documents.loads(one.stored[one.status.profiles_ref.config_map].data["document.json"], Profiles)
                for one in (first, second)]  # fmt: skip
    blocks = [[layer for layer in found.layers if layer.kind == "block"] for found in profiles]
    assert blocks[0] == blocks[1]
    assert len(profiles[0].layers) == len(profiles[1].layers)
    third = later(second, "third", spec=second.spec)
    third.run()
    assert measured_gangs(third) == []


def test_more_rows_than_are_known_are_profiled() -> None:
    second = later(
        ran(spec=spec(training={"globalBatchSize": 2, "dtype": "float32"})),
        spec=spec(training={"globalBatchSize": 8, "dtype": "float32"}),
    )
    second.run()
    assert [gang for gang in measured_gangs(second) if gang != "links"] == PROFILES
    third = later(second, "third", spec=spec(training={"globalBatchSize": 2, "dtype": "float32"}))
    third.run()
    assert measured_gangs(third) == []


@pytest.mark.parametrize("image", [TAG, f"registry.example/worker@{FIRST}"])
def test_same_image_is_known_by_its_tag_or_digest(image: str) -> None:
    second = later(measured(), image=image)
    second.run()
    assert measured_gangs(second) == []


def test_image_of_another_tag_is_measured_anew() -> None:
    second = later(measured(), image="registry.example/worker:2", image_id=registry(SECOND))
    second.run()
    assert measured_gangs(second) == LINKS + PROFILES


def test_oldest_measurements_go_where_too_many_are_kept() -> None:
    first = measured()
    second = later(first)
    kept = next(one for name, one in first.measurements.items() if name.startswith("links-"))
    large = replace(kept, name="links-large", data={**kept.data, "other": "x" * (MAX_KEPT_BYTES - 10_000)})
    second.measurements["links-large"] = replace(large, created_at=START - timedelta(days=1))
    second.run()
    assert (second.succeeded, measured_gangs(second)) == ("True", [])
    assert second.measurements.keys() == first.measurements.keys()


def test_gang_whose_image_is_not_known_keeps_nothing() -> None:
    assert not ran(image_id=lambda *_: "").measurements


def test_reused_measurements_stay_with_a_plan_whatever_becomes_of_them() -> None:
    second = later(measured(), spec=spec(trials={"topK": 1}))
    second.run(until=lambda: running(second, "candidate-1"))
    second.measurements.clear()
    second.restart()
    second.run()
    assert second.succeeded == "True"
    assert measured_gangs(second) == []
    assert not second.measurements


def test_two_plans_at_once_both_end_and_keep_one_measurement_each() -> None:
    first = world()
    second = later(first, days=0)
    second.measurements = first.measurements
    for _ in range(2000):
        first.step()
        second.step()
        if first.succeeded == second.succeeded == "True":
            break
    assert (first.succeeded, second.succeeded) == ("True", "True")
    kinds = Counter(name.partition("-")[0] for name in first.measurements)
    assert kinds["links"] == 1
    assert len(PROFILES) <= kinds["profile"] <= 2 * len(PROFILES), "one of each node that measured"


def test_kept_measurements_expire_by_the_age_that_their_plan_gave() -> None:
    first = ran(spec=spec(profiling={"maxAgeSeconds": 3600}))
    assert len(first.measurements) == 5
    second = later(first, days=0.5, spec=spec(profiling={"maxAgeSeconds": 1_000_000}))
    second.run(until=lambda: len(second.measurements) < 5)
    assert sorted(name.partition("-")[0] for name in second.measurements) == ["links"]


def test_plan_that_keeps_nothing_leaves_nothing() -> None:
    first = ran(spec=spec(profiling={"maxAgeSeconds": 0}, links={"maxAgeSeconds": 0}))
    assert not first.measurements


@pytest.mark.parametrize("key", ["key.json", "report.json", "image.json"])
@pytest.mark.parametrize("text", ["", "{", '{"apiVersion": "trainwright.dev/v9"}'])
def test_measurement_that_cannot_be_read_is_taken_anew(key: str, text: str) -> None:
    second = later(measured())
    for name, kept in second.measurements.items():
        second.measurements[name] = replace(kept, data={**kept.data, key: text})
    second.run()
    assert second.succeeded == "True"
    assert measured_gangs(second) == LINKS + PROFILES
    assert all(EXPIRES_ANNOTATION in one.annotations for one in second.measurements.values())


class KeepingApi(MemoryApi):
    """API server that refuses to create what it has."""

    async def create(self, path: str, body: dict[str, Any], **query: str) -> Any:
        if f"{path}/{body['metadata']['name']}" in self.objects:
            raise ApiError(409, "AlreadyExists")
        return await super().create(path, body, **query)


@pytest.mark.parametrize("role", ["measurement", "", None])
def test_last_measurement_replaces_the_one_of_its_name_and_no_other_object(role: str | None) -> None:
    path, name = "/api/v1/namespaces/default/configmaps", "links-1-2"
    labels = {} if role is None else {"trainwright.dev/role": role}
    api = KeepingApi({f"{path}/{name}": {"metadata": {"name": name, "labels": labels, "uid": "1"}}})
    known = ObjectCache()
    known.store_measurements("default", ())
    creation = CreateConfigMap(
        name, StoredRole.MEASUREMENT, {"report.json": "new"}, labels={MEASUREMENT_LABEL: "links"}
    )
    snapshot = world().snapshot()
    asyncio.run(Applier(api, None, known).apply(snapshot, [creation], ReadCache())).check()  # type: ignore[arg-type]
    found = api.objects[f"{path}/{name}"]
    assert (found.get("data") == {"report.json": "new"}) is (role == "measurement")
    assert "ownerReferences" not in found["metadata"]
    assert known.measurements("default") is None, "listed again"


class FullApi(MemoryApi):
    """API server of a namespace without room for more ConfigMaps of kept measurements."""

    async def create(self, path: str, body: dict[str, Any], **query: str) -> Any:
        if body["metadata"]["name"].startswith("links-1"):
            raise ApiError(403, "exceeded quota")
        return await super().create(path, body, **query)


def test_measurement_that_the_api_server_refuses_holds_up_nothing() -> None:
    actions = [CreateConfigMap(name, StoredRole.MEASUREMENT, {}) for name in ("links-1-2", "links-2-3")]
    api = FullApi({})
    asyncio.run(Applier(api, None, ObjectCache()).apply(world().snapshot(), actions, ReadCache())).check()  # type: ignore[arg-type]
    assert [path.rpartition("/")[2] for path in api.objects] == ["links-2-3"]


def test_own_result_is_written_before_what_is_kept_of_it() -> None:
    first = world()
    kinds: list[str] = []
    apply = first.apply
    first.apply = lambda todo: (
        kinds.extend(one.role for one in todo if isinstance(one, CreateConfigMap)),
        apply(todo),
    )[1]  # type: ignore[method-assign]
    first.run()
    assert {before for before, role in pairwise(kinds) if role is StoredRole.MEASUREMENT} == {StoredRole.RESULT}


def test_measurements_kept_under_a_devices_former_name_are_taken_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their key has the name, and another version may have meant another device by it."""
    nodes = (node("n1", "V100-SXM2-16GB"), node("n2", "V100-SXM2-16GB"))
    with monkeypatch.context() as former:
        former.setattr(device_types, "sheet_name", lambda product, memory_bytes: product)
        first = world(nodes=nodes)
        first.run()
    second = later(first)
    second.run()
    third = later(second, "third")
    third.run()
    assert [one.succeeded for one in (first, second, third)] == ["True"] * 3
    assert measured_gangs(second) == measured_gangs(first)
    assert measured_gangs(third) == []
