"""Winner as a job of the user's: created once, owned by nobody, whatever happens to the operator or to the spec."""

from __future__ import annotations

import asyncio
import copy
import json
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

import pytest
from flow_handover import ASKED, JOB, RUN, record_of, world_of
from flow_harm import running
from flow_jobs import pods_of_job
from flow_world import RESOURCE, START, World, spec_of

from trainwright import documents
from trainwright.plan import Plan
from trainwright_operator.api.spec import LauncherKind
from trainwright_operator.api.status import WaitingStatus
from trainwright_operator.flow import actions as a
from trainwright_operator.flow.actions import StoredRole
from trainwright_operator.flow.names import HANDED_OVER_ANNOTATION, PLAN_UID_LABEL
from trainwright_operator.flow.snapshot import PlanFacts
from trainwright_operator.kube.apply import Applier
from trainwright_operator.kube.client import ApiError
from trainwright_operator.kube.object_cache import ObjectCache
from trainwright_operator.kube.requests.manifests import config_map
from trainwright_operator.kube.snapshot_reader import ReadCache


def templates(world: World) -> list[dict[str, Any]]:
    return [template for one in world.handed_over.values() for _, template in pods_of_job(one)]


def test_job_has_a_pod_on_each_node_of_the_winner(each_launcher: LauncherKind) -> None:
    world = world_of()
    winner: Plan = documents.parse(world.run().winner.plan, Plan)  # type: ignore[union-attr]
    devices = {name: sum(device.node == name for device in winner.devices) for name in winner.nodes}
    found = {}
    masters = set()
    for template in templates(world):
        spec, (container,) = template["spec"], template["spec"]["containers"]
        (term,) = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
            "nodeSelectorTerms"
        ]
        found[term["matchFields"][0]["values"][0]] = int(container["resources"]["limits"][RESOURCE])
        masters |= {part for part in container["command"] if part.startswith("MASTER_ADDR=")}
        assert container["image"] == "lab/train:7"
        assert {"name": "DATA", "value": "c4"} in container["env"]
        assert not any("TRAINWRIGHT_ITERATIONS" in part for part in container["command"])
        assert "schedulingGates" not in spec
    assert found == devices
    assert len(masters) == 1
    assert world.status.job is not None
    assert world.status.job.kind is each_launcher
    assert list(world.handed_over) == list(world.status.job.names)
    assert (
        f"the job of this plan is the {each_launcher} {world.status.job.names[0]}"
        in world.condition("Succeeded").message
    )
    stored = world.stored[world.status.job.config_map]
    assert "torchrun" in stored.data["launch.sh"]
    assert documents.loads(stored.data["plan.json"], Plan) == winner
    mounted = {
        volume["configMap"]["name"]
        for one in templates(world)
        for volume in one["spec"]["volumes"]
        if "configMap" in volume
    }
    assert mounted == {stored.name}


@pytest.mark.usefixtures("each_launcher")
def test_job_is_the_users() -> None:
    world = world_of()
    world.run()
    record = record_of(world)
    for manifest in world.handed_over.values():
        assert "ownerReferences" not in manifest["metadata"]
        assert PLAN_UID_LABEL not in manifest["metadata"]["labels"]
    assert not any(PLAN_UID_LABEL in template["metadata"]["labels"] for template in templates(world))
    plan = PlanFacts("demo", "default", "uid-1", 1, START, world.spec, world.status, "worker:1")
    written = config_map(plan, a.CreateConfigMap(record.name, StoredRole.HANDOVER, record.data))
    assert "ownerReferences" not in written["metadata"]
    assert "ownerReferences" in config_map(plan, a.CreateConfigMap("x", StoredRole.DOCUMENT, {}))["metadata"]


@pytest.mark.usefixtures("each_launcher")
def test_suspended_job_waits_for_its_user() -> None:
    running, suspended = world_of(), world_of(apply="Suspended")
    for world in (running, suspended):
        world.run()
    assert all('"suspend": true' in json.dumps(one) for one in suspended.handed_over.values())
    is_queued = running.spec.queue_name is not None  # then Kueue starts it
    assert all(is_queued == ('"suspend": true' in json.dumps(one)) for one in running.handed_over.values())


def test_nothing_is_handed_over_unless_the_spec_asks_for_it() -> None:
    world = World(spec=spec_of(**ASKED, job=JOB))
    world.run()
    assert not world.handed_over
    assert "job" not in world.status.dump()
    measured = list(world.created)
    world.change(**RUN)
    world.run()
    assert world.status.job is not None
    assert world.created == [*measured, world.status.job.config_map, *world.status.job.names]


def test_winner_of_the_planner_alone_is_handed_over_too() -> None:
    world = world_of(trials={"topK": 0})
    world.run()
    assert world.handed_over


@pytest.mark.usefixtures("each_launcher")
def test_operator_that_is_killed_before_any_action_makes_one_job() -> None:
    undisturbed = world_of()
    undisturbed.run()
    world = world_of()
    world.run(until=lambda: running(world, "candidate-1"))
    boundaries = 0
    while world.succeeded == "Unknown":
        todo = world.decide()
        for number in range(len(todo)):
            killed = copy.deepcopy(world)
            killed.apply(todo[:number])
            killed.restart()
            killed.run()
            assert killed.handed_over == undisturbed.handed_over
            assert sorted(killed.created) == sorted(undisturbed.created)
            assert killed.status.job == undisturbed.status.job
            boundaries += 1
        world.apply(todo)
        world.pass_time(2.0)
    assert boundaries >= 4


def test_edits_never_change_a_job_that_was_handed_over() -> None:
    world = world_of()
    world.run()
    job, handed_over, record = (
        world.status.job,
        copy.deepcopy(world.handed_over),
        world.stored[world.status.job.config_map],
    )  # type: ignore[union-attr]
    edits = (
        {"job": JOB | {"image": "lab/train:8"}},
        {"apply": "Suspended"},
        {"trials": {"topK": 2, "baseline": "None"}},
        {"profiling": {"iterations": 11}},
        {"launcher": "JobSet"},
        {"apply": "Never", "job": None},
    )
    for edit in edits:
        world.change(**(RUN | edit))
        for _ in range(3):
            world.step()
            assert world.status.job == job
        world.run()
        assert (world.status.job, world.handed_over) == (job, handed_over)
        assert world.stored[record.name] == record


def test_edit_between_the_record_and_the_job_does_not_change_it() -> None:
    undisturbed = world_of()
    undisturbed.run()
    world = world_of()
    record_of(world)
    assert not world.handed_over
    world.change(
        **(RUN | {"job": JOB | {"image": "lab/train:8"}, "apply": "Suspended", "profiling": {"iterations": 11}})
    )
    world.run()
    assert world.handed_over == undisturbed.handed_over


def test_job_that_the_api_server_refuses_is_tried_again_with_the_winner_shown() -> None:
    world = world_of()
    world.fails = {a.HandOverJob: "403 forbidden: exceeded quota"}
    world.run(
        until=lambda: (
            world.condition("Succeeded") is not None and "exceeded quota" in world.condition("Succeeded").message
        )
    )
    assert world.succeeded == "Unknown"
    assert world.status.winner is not None
    named = world.status.job
    assert named is not None  # of several objects, those before the refused one may exist
    assert not world.handed_over
    world.fails = {}
    world.run()
    assert world.status.job == named
    assert list(world.handed_over) == list(named.names)


def test_job_that_a_dry_run_refuses_can_be_edited() -> None:
    world = world_of()
    world.run(until=lambda: running(world, "candidate-1"))
    world.template_error = ("JobRefused", "env[0].value: expected string")
    told = "the API server rejected the PyTorchJob: env[0].value: expected string; edit spec.job, or set apply: Never"
    world.run(until=lambda: world.condition("Succeeded") is not None and told in world.condition("Succeeded").message)
    assert world.status.winner is not None
    assert not any(one.role == StoredRole.HANDOVER for one in world.stored.values())
    world.template_error = ("", "")
    world.change(**(RUN | {"job": JOB | {"image": "lab/train:8"}}))
    world.run()
    assert {one["spec"]["containers"][0]["image"] for one in templates(world)} == {"lab/train:8"}


@pytest.mark.parametrize("refused_by", ["the dry run", "the creation"])
def test_plan_that_may_wait_no_longer_for_its_job_keeps_its_answer(refused_by: str) -> None:
    world = world_of(waitDeadlineSeconds=60)
    world.run(until=lambda: running(world, "candidate-1"))
    if refused_by == "the dry run":
        world.template_error = ("JobRefused", "exceeded quota")
    else:
        world.fails = {a.HandOverJob: "403 forbidden: exceeded quota"}
    world.run(until=lambda: world.status.waiting is not None)
    assert (world.succeeded, world.status.waiting.reason is not None) == ("Unknown", True)
    world.run()
    assert world.succeeded == "True"
    assert world.status.winner is not None
    told = world.condition("Succeeded").message
    words = "; no job of it was created: " if refused_by == "the dry run" else "-job, which may be incomplete: "
    assert words in told
    assert "exceeded quota" in told
    assert not world.handed_over


@pytest.mark.parametrize("trouble", ["a refusal", "a failed request"])
def test_trouble_of_a_moment_leaves_the_job_to_be_created_after_long_waits(trouble: str) -> None:
    world = world_of(waitDeadlineSeconds=60)
    world.run(until=lambda: running(world, "candidate-1"))
    world.status = world.status.model_copy(update={"waiting": WaitingStatus(earlier_seconds=70)})
    if trouble == "a refusal":
        world.template_error = ("JobRefused", "exceeded quota")
    else:
        world.fails = {a.DryRunJob: "500 Internal Server Error"}
    world.run(until=lambda: world.condition("Succeeded").reason in ("JobRefused", "RequestFailed"))
    world.template_error, world.fails = ("", ""), {}
    world.run()
    assert world.succeeded == "True"
    assert list(world.handed_over) == list(world.status.job.names)


def test_job_that_was_created_is_named_after_a_wait_that_is_over() -> None:
    world = world_of(waitDeadlineSeconds=60)
    record_of(world)
    world.fails = {a.AnnotateConfigMap: "403 forbidden"}
    world.run()
    assert world.succeeded == "True"
    assert (
        f"; the job of this plan is the PyTorchJob {next(iter(world.handed_over))}"
        in world.condition("Succeeded").message
    )


@pytest.mark.parametrize("text", ["", "[]", "{", "[1]", '[{"kind":"Secret","metadata":{"name":"x"}}]'])
def test_record_that_was_modified_creates_nothing(text: str) -> None:
    world = world_of()
    record = record_of(world)
    world.stored[record.name] = replace(record, data={**record.data, "manifests.json": text})
    world.run()
    assert not world.handed_over
    assert world.condition("Succeeded").reason == "StoredDocumentInvalid"
    assert f"ConfigMap {record.name}: manifests.json is no list of jobs; delete" in world.condition("Succeeded").message


class Taken:
    """API server that has an object of every name, of the plan with that uid."""

    def __init__(self, uid: str) -> None:
        self.found = {"metadata": {"annotations": {HANDED_OVER_ANNOTATION: uid}}}

    async def create(self, path: str, body: dict[str, Any]) -> Any:
        raise ApiError(409, f"{body['metadata']['name']} already exists")

    async def get(self, path: str) -> Any:
        return self.found


@pytest.mark.parametrize(("uid", "accepted"), [("uid-1", True), ("uid-2", False)])
def test_job_of_that_name_is_accepted_if_this_plan_handed_it_over(uid: str, accepted: bool) -> None:
    world = world_of()
    world.run()
    applier = Applier(cast("Any", Taken(uid)), cast("Any", None), ObjectCache())
    todo = [a.HandOverJob(manifest) for manifest in world.handed_over.values()]
    expected = nullcontext() if accepted else pytest.raises(ApiError, match="already exists with another owner")
    with expected:
        asyncio.run(applier.apply(world.snapshot(), todo, ReadCache())).check()
