"""Measurements that outlive a plan: what a second plan of the same namespace takes over, and what it measures anew."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from flow_api import MemoryApi
from flow_harm import running
from flow_reports import report_of
from flow_world import EMULATION, START, World, node, spec_of

from trainwright import documents
from trainwright.profiles import Profiles
from trainwright.worker_api import CheckedLayer, ProfilingTask, TrialSeriesTask, TrialTask
from trainwright_operator.api.installation import InstallationRules, PodTemplateRule
from trainwright_operator.api.spec import TrainingPlanSpec
from trainwright_operator.api.status import RefutedStatus
from trainwright_operator.flow.actions import CreateConfigMap, StoredRole
from trainwright_operator.flow.measurements.obsolete_measurements import MAX_KEPT_BYTES
from trainwright_operator.flow.names import EXPIRES_ANNOTATION, MEASUREMENT_LABEL
from trainwright_operator.flow.nodes import device_types
from trainwright_operator.kube.apply import Applier
from trainwright_operator.kube.client import ApiError
from trainwright_operator.kube.object_cache import ObjectCache
from trainwright_operator.kube.snapshot_reader import ReadCache

TAG = "registry.example/worker:1"
FIRST, SECOND = (f"sha256:{digit * 64}" for digit in "12")
GPT = {"layers": 4, "hiddenSize": 64, "heads": 4, "sequenceLength": 64, "vocabularySize": 512}
DRIVER = "nvidia.com/cuda.driver-version.full"
LINKS, PROFILES = ["links"], ["profile-1", "profile-2", "profile-3", "profile-4"]


def registry(digest: str) -> Any:
    """Return what nodes report: this digest for every tag, and its own for an image that is named by digest."""
    return lambda node, image: f"registry.example/worker@{image.partition('@')[2] or digest}"


def spec(**changes: Any) -> TrainingPlanSpec:
    """Return a spec whose plan is quickly found, and not tried."""
    search = {"planner": "Megatron", "limits": {"maxTensorDegree": 2}}
    return spec_of(**{"search": search, "trials": {"topK": 0}} | changes)


def world(**changes: Any) -> World:
    return World(**{"image": TAG, "image_id": registry(FIRST), "spec": spec()} | changes)


def later(first: World, name: str = "second", days: float = 1.0, **changes: Any) -> World:
    """Return another plan of the same namespace that begins some days after the first one's end."""
    second = NamedWorld(
        name=name, **{"image": TAG, "image_id": first.image_id, "nodes": first.nodes, "spec": spec()} | changes
    )
    second.measurements = dict(first.measurements)
    second.now = first.now + timedelta(days=days)
    return second


class NamedWorld(World):
    """World of a plan with a name, and so a uid, of its own."""

    def __init__(self, name: str, **fields: Any) -> None:
        super().__init__(**fields)
        self.name = name

    def snapshot(self) -> Any:
        found = super().snapshot()
        return replace(found, plan=replace(found.plan, name=self.name, uid=f"uid-{self.name}", created_at=self.now))


def measured_gangs(world: World) -> list[str]:
    """Return the gangs that measured links or layers, in order."""
    orders = [name.removesuffix("-order").split("-", 2)[2] for name in world.created if name.endswith("-order")]
    return [gang for gang in orders if not gang.startswith(("candidate", "baseline"))]


@cache
def measured() -> World:
    """Return the world of a plan that measured everything, which no test changes."""
    return ran()


def ran(**changes: Any) -> World:
    found = world(**changes)
    found.run()
    assert found.succeeded == "True", found.condition("Succeeded")
    return found


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


def test_what_was_reused_is_measured_anew_once_a_pod_runs_another_image() -> None:
    second = later(measured(), image_id=registry(SECOND), spec=spec(trials={"topK": 1}))
    second.run()
    assert second.succeeded == "True", second.condition("Succeeded")
    assert measured_gangs(second) == LINKS + PROFILES
    assert second.status.cluster.revision == 2
    assert any(event.reason == "MeasurementsOutdated" and SECOND in event.message for event in second.events)
    assert second.status.cluster.refuted == RefutedStatus(images=1, speeds=0)
    third = later(second, "third", spec=second.spec)
    third.run()
    assert measured_gangs(third) == []
    assert third.status.cluster.revision == 1


def gpus() -> tuple[Any, ...]:
    names = {"n1": "Tesla-V100-SXM2-16GB", "n2": "Tesla-V100-SXM2-16GB", "n3": "Tesla-T4"}
    return tuple(replace(node(name, product), uid=f"uid-{name}") for name, product in names.items())


def slowed(world: World, **slow: float) -> World:
    """Multiply the seconds of layers on these nodes, in profiles and in checks."""

    def report(task: Any) -> Any:
        found = report_of(task)
        if isinstance(task, ProfilingTask):
            ratio = slow.get(task.gang.nodes[0].name, 1.0)
            layers = (replace(one, forward_seconds=ratio * one.forward_seconds, backward_seconds=ratio * one.backward_seconds)
                      for one in found.layers)  # fmt: skip
            return replace(found, layers=tuple(layers))
        if isinstance(task, TrialTask):
            checked = []
            for one in task.gang.nodes:
                base = next((check for check in task.checks if check.accelerator == one.accelerator), None)
                if base is not None:
                    seconds = 0.03 * base.rows * slow.get(one.name, 1.0)
                    checked.append(CheckedLayer(one.name, task.model.dtype, base.kind, base.rows, seconds))
            return replace(found, checked=tuple(checked))
        return found

    world.report = report
    return world


def speeds(world: World) -> dict[str, float]:
    """Return seconds over kept ones of nodes that differ."""
    ratios = {one.name: one.relative_seconds for one in world.status.cluster.nodes}
    return {name: round(ratio, 2) for name, ratio in ratios.items() if ratio is not None and abs(ratio - 1) > 0.01}


def test_node_whose_speed_drifted_is_noticed_and_measured_anew() -> None:
    tried = spec(trials={"topK": 1})
    first = slowed(world(nodes=gpus()))
    first.run()
    same = slowed(later(first, "same", spec=tried), n1=1.1, n2=0.9)
    same.run()
    assert measured_gangs(same) == []
    assert (same.succeeded, same.status.cluster.revision) == ("True", 1)
    other = slowed(later(first, "other", spec=spec(model={"gpt": GPT | {"hiddenSize": 128}})), n1=1.4, n2=1.4)
    other.run()  # its layers have the same names
    second = slowed(later(first, spec=tried), n2=1.4)
    second.run()
    assert (second.succeeded, second.status.cluster.revision) == ("True", 2)
    assert measured_gangs(second) == ["profile-1", "profile-2"], "links and the other type are as they were"
    assert second.status.cluster.refuted == RefutedStatus(images=0, speeds=1)
    assert same.status.cluster.refuted is None
    assert speeds(second) == {"n2": 1.4}
    assert speeds(same).items() >= {"n1": 1.1, "n2": 0.9}.items()
    told = next(event.message for event in second.events if event.reason == "MeasurementsOutdated")
    assert "n2 takes 1.40 times as long for block" in told
    nodes = [
        json.loads(one.data["key.json"])["node"][0] for name, one in second.measurements.items() if "profile-" in name
    ]
    assert nodes.count("n2") >= 2, "on that node"
    third = slowed(later(second, "third", spec=tried), n2=1.4)
    third.run()
    assert measured_gangs(third) == [], "each node is compared with itself"
    repaired = slowed(later(third, "repaired", spec=tried))
    repaired.run()
    assert measured_gangs(repaired) == ["profile-1", "profile-2"]


def test_drift_of_several_nodes_is_found_once() -> None:
    """One of them is measured anew; of the others nothing is kept, so that they are compared with that one."""
    tried = spec(trials={"topK": 1})
    first = slowed(world(nodes=gpus()))
    first.run()
    measured_on_both = slowed(later(first, "measured", spec=tried), n2=1.4)
    measured_on_both.run()
    second = slowed(later(measured_on_both, spec=tried), n1=2.0, n2=2.0)
    second.run()
    assert measured_gangs(second) == ["profile-1", "profile-2"]
    third = slowed(later(second, "third", spec=tried), n1=2.0, n2=2.0)
    third.run()
    assert measured_gangs(third) == []


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


def test_series_checks_nodes_once_and_emulated_devices_are_not_checked() -> None:
    asked: list[Any] = []

    def reused(first: World) -> World:
        second = later(first, spec=spec(trials={"perGang": 3}))
        second.report = lambda task: (asked.append(task), report_of(task))[1]
        second.run()
        return second

    first = world(nodes=gpus())
    first.run()
    reused(first)
    series = asked[0]
    assert isinstance(series, TrialSeriesTask)
    assert {(one.accelerator, one.kind) for one in series.checks} == {
        (name, "block") for name in {node.accelerator for node in series.gang.nodes}
    }
    assert [bool(series.trial_task(number).checks) for number in range(3)] == [True, False, False]
    asked.clear()
    reused(measured())
    assert not any(task.checks for task in asked)


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
