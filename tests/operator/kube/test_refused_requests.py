"""Refused requests: none is repeated without back-off, and the plan goes on within a minute of the refusal's end."""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import Coroutine
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import pytest
from flow_clock import run_jumping
from flow_requests import PLANS, CountingApi, JumpingTime, Operation, by_minute, clock
from flow_world import RESOURCE, node
from hypothesis import given
from hypothesis import strategies as st

from trainwright_operator.api.spec import LauncherKind
from trainwright_operator.kube.client import ApiError
from trainwright_operator.kube.requests.back_off import FIRST_SECONDS, LONGEST_SECONDS, BackOff

MAX_TRIES = 4
MAX_REQUESTS = 12
MINUTES = 8
"""Minutes of a refusal that are counted, from its second one on."""
UNTIL_ANOTHER = 4
"""Minutes until the plan gives the gang up that is refused, and goes on to another."""
WITHIN_SECONDS = 60.0


@dataclass(frozen=True)
class Refused:
    """Requests that are refused: a method and a pattern of the object.

    Attributes:
        quiet_minutes: how long the plan has nothing else to do; 0 where it goes on without them.
        spec: fields of the plan that leads there.
    """

    method: str
    pattern: str
    quiet_minutes: int = MINUTES
    spec: dict[str, Any] = field(default_factory=dict)


JOBS = "/(pytorchjobs|jobsets)"
JOB_SET = {"launcher": LauncherKind.JOB_SET.value}
QUEUED = {"queueName": "research"}
HANDED = {"image": "lab/train:7", "command": ["python", "train.py"]}
REFUSED = {
    "plan": Refused("GET", "/trainingplans/demo$"),
    "list of pods": Refused("GET", "/default/pods$"),
    "list of PyTorchJobs": Refused("GET", "/pytorchjobs$"),
    "list of JobSets": Refused("GET", "/jobsets$"),
    "list of ConfigMaps": Refused("GET", "/configmaps$"),
    "nodes": Refused("GET", "/nodes$"),
    "pods of all namespaces": Refused("GET", "^/api/v1/pods$"),
    "claim of the namespace": Refused("GET", "/leases/"),
    "ResourceSlices": Refused("GET", "/resourceslices$", spec={"devices": {"products": ["another"]}}),
    "queue": Refused("GET", "/localqueues$", spec=QUEUED),
    "ClusterQueue": Refused("GET", "/clusterqueues$", spec=QUEUED),
    "flavors of the queue": Refused("GET", "/resourceflavors$", spec=QUEUED),
    "Workload": Refused("GET", "/workloads$", spec=QUEUED),
    "log": Refused("GET", "/log$", UNTIL_ANOTHER),
    "dry run": Refused("DRYRUN", JOBS),
    "document": Refused("POST", "/configmaps/.*-cluster$"),
    "task": Refused("POST", "/configmaps/.*-order$"),
    "result": Refused("POST", "/configmaps/.*-result$"),
    "measurement": Refused("POST", "/configmaps/(links|profile)-", quiet_minutes=0),
    "handed-over ConfigMap": Refused("POST", "/configmaps/demo-.*-job$", spec={"apply": "Run", "job": HANDED}),
    "handed-over job": Refused("POST", f"{JOBS}/demo-.*-job$", spec={"apply": "Run", "job": HANDED}),
    "PyTorchJob": Refused("POST", "/pytorchjobs/.+"),
    "JobSet": Refused("POST", "/jobsets/.+", spec=JOB_SET),
    "job of a trial": Refused("POST", f"{JOBS}/.*candidate", UNTIL_ANOTHER),
    "NetworkPolicy": Refused("POST", "/networkpolicies/", quiet_minutes=0),
    "Event": Refused("POST", "/events/", quiet_minutes=0),
    "annotation": Refused("PATCH", "/configmaps/"),
    "pin": Refused("PATCH", "/pods/"),
    "pin of a JobSet's pod": Refused("PATCH", "/pods/", spec=JOB_SET),
    "status": Refused("PATCH", "/status$", quiet_minutes=0),
    "deletion of a task": Refused("DELETE", "/configmaps/.*-order$"),
    "deletion of a PyTorchJob": Refused("DELETE", "/pytorchjobs/"),
    "deletion of a JobSet": Refused("DELETE", "/jobsets/", spec=JOB_SET),
    "deletion of the plan": Refused("DELETE", "/trainingplans/demo$", spec={"ttlSecondsAfterFinished": 1}),
}


NO_REFUSALS = {("dry run", 422), ("list of PyTorchJobs", 404), ("list of JobSets", 404)}
"""Answers: the template is invalid, which ends the plan; the cluster does not have the launcher."""


@pytest.mark.parametrize(
    ("what", "status"),
    [
        pytest.param(what, status, marks=() if status in (403, 409) else pytest.mark.slow)
        for what in REFUSED
        for status in (403, 409, 404, 422, 429, 500, 0)
        if (what, status) not in NO_REFUSALS
    ],
)
def test_refusal_is_tried_again_rarely_and_its_end_noticed_soon(
    what: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = REFUSED[what]
    product = "Tesla-T4" if what == "measurement" else "emulated-v100"  # measurements of emulated devices are not kept
    api = CountingApi(tuple(node(name, product) for name in ("n1", "n2")))
    wanted = re.compile(refused.pattern)
    logging.getLogger("trainwright_operator").setLevel(logging.CRITICAL)

    def refuses(method: str, target: str) -> ApiError | None:
        is_meant = method == refused.method and wanted.search(target) is not None
        return ApiError(status, f"{status}: refused by the test") if is_meant else None

    async def story() -> None:
        api.add_plan(**refused.spec)
        api.add_queue("research")
        api.refuses = refuses
        operation = Operation(api, monkeypatch)
        await operation.until(lambda: bool(api.refused), 600)
        began = clock()
        await operation.for_seconds(60.0 * (MINUTES + 1))
        tries = list(by_minute(api.refused, began + 60.0, MINUTES))
        own = [one for one in api.asked if "/leases/" not in one[2]]  # the claim is the namespace's
        requests = list(by_minute(own, began + 60.0, refused.quiet_minutes))
        assert max(tries) <= MAX_TRIES
        if requests:
            worst = began + 60.0 * (1 + requests.index(max(requests)))
            asked = "\n".join(f"{at:.1f} {verb} {target}" for at, verb, target in own if worst <= at < worst + 60.0)
            assert max(requests) <= MAX_REQUESTS, f"{requests}\n{asked}"
        api.forgive()
        done = len(api.asked)

        def has_ended() -> bool:
            is_deleted = f"{PLANS}/demo" not in api.objects
            return is_deleted or (
                api.condition("Succeeded")["status"] == "True" and "ttlSeconds" not in str(refused.spec)
            )

        def has_gone_on() -> bool:
            return any(method == refused.method and wanted.search(target) for _, method, target in api.asked[done:])

        if has_ended():
            return
        await operation.until(has_gone_on, WITHIN_SECONDS)
        if refused.spec != QUEUED and "devices" not in refused.spec:  # nobody admits it; no node is of that product
            await operation.until(has_ended, 1800)
        await operation.reconciler.stop()

    run_jumping(story())


@pytest.mark.parametrize("what", ["PyTorchJob", "pin", "annotation", "document"])
def test_wait_for_what_is_refused_ends_at_the_deadline_of_waits(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gang that waits is deleted then, and is not begun anew by the next decision."""
    api, refused = CountingApi(), REFUSED[what]
    wanted = re.compile(refused.pattern)

    def refuses(method: str, target: str) -> ApiError | None:
        return ApiError(403, "no") if method == refused.method and wanted.search(target) else None

    async def story() -> None:
        api.add_plan(waitDeadlineSeconds=60)
        api.refuses = refuses
        operation = Operation(api, monkeypatch)
        await operation.until(lambda: bool(api.refused), 600)
        took = await operation.until(lambda: api.condition("Succeeded")["status"] == "False", 90)
        assert took >= 55.0
        assert api.condition("Succeeded")["reason"] == "WaitDeadlineExceeded"
        await operation.for_seconds(60.0)
        assert not [name for name in api.objects if name.endswith("-order") or "/pods/" in name]
        await operation.reconciler.stop()

    run_story(story())


def test_gang_that_runs_does_not_count_as_waiting_while_a_deletion_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    api, running = CountingApi(run_seconds=150.0), re.compile("/pytorchjobs/demo-.*-profile-1$")

    def refuses(method: str, target: str) -> ApiError | None:
        return ApiError(403, "no") if method == "DELETE" and "/pytorchjobs/" in target else None

    async def story() -> None:
        api.add_plan(waitDeadlineSeconds=60)
        api.refuses = refuses
        operation = Operation(api, monkeypatch)
        await operation.until(lambda: any(map(running.search, api.objects)), 400)
        await operation.for_seconds(120.0)
        assert api.condition("Profiled")["reason"] == "RequestFailed"
        assert api.condition("Succeeded")["status"] == "Unknown"
        assert api.plan["status"]["waiting"]["earlierSeconds"] < 30
        await operation.reconciler.stop()

    run_story(story())


def run_story(story: Coroutine[Any, Any, None]) -> None:
    logging.getLogger("trainwright_operator").setLevel(logging.CRITICAL)
    run_jumping(story)


@pytest.mark.parametrize(
    ("kind", "other"),
    [(LauncherKind.PYTORCH_JOB, LauncherKind.JOB_SET), (LauncherKind.JOB_SET, LauncherKind.PYTORCH_JOB)],
)
def test_definition_that_was_removed_is_named_until_it_is_back(
    kind: LauncherKind, other: LauncherKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = CountingApi()

    def refuses(method: str, target: str) -> ApiError | None:
        is_meant = f"/{kind.lower()}s" in target and method != "DRYRUN"
        return ApiError(404, "404: 404 page not found") if is_meant else None

    async def story() -> None:
        api.add_plan(launcher=kind.value)
        api.refuses = refuses
        operation = Operation(api, monkeypatch)
        await operation.for_seconds(60.0)
        told = api.condition("Succeeded")
        words = f"the definition {kind} was removed: install it, or set launcher: {other}"
        assert (told["reason"], told["message"]) == (f"{kind}CRDMissing", words)
        api.forgive()
        await operation.until(lambda: api.condition("Succeeded")["status"] == "True", 600)
        await operation.reconciler.stop()

    run_story(story())


def test_pods_in_place_of_one_whose_pin_is_held_wait_for_free_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody deletes the pods of a gang while they are pinned, and the nodes are taken meanwhile."""
    api, pods = CountingApi(), "/api/v1/namespaces/default/pods"

    def replace_pods() -> None:
        for path, one in list(api.objects.items()):
            if path.startswith(f"{pods}/"):
                name = f"{one['metadata']['name']}-next"
                api._delete(path)
                meta = {key: one["metadata"][key] for key in ("labels", "annotations", "ownerReferences")}
                api._store(f"{pods}/{name}", {"metadata": {**meta, "name": name}, "spec": one["spec"]})
        asked = {"resources": {"requests": {RESOURCE: "2"}}}
        for number in ("1", "2"):
            spec = {"nodeName": f"n{number}", "containers": [asked], "schedulingGates": [{"name": "not run here"}]}
            api._store(f"/api/v1/namespaces/other/pods/{number}", {"metadata": {"labels": {}}, "spec": spec})

    def refuses(method: str, target: str) -> ApiError | None:
        if method != "PATCH" or not target.startswith(pods) or api.refused:
            return None
        asyncio.get_running_loop().call_soon(replace_pods)
        return ApiError(404, "404: no such pod")

    async def story() -> None:
        api.add_plan(**JOB_SET)
        api.refuses = refuses
        operation = Operation(api, monkeypatch)
        await operation.until(lambda: bool(api.refused), 60)
        await operation.for_seconds(90.0)
        pinned = [target for _, method, target in api.asked if method == "PATCH" and target.endswith("-next")]
        assert not pinned
        assert api.condition("Succeeded")["reason"] == "WaitingForCapacity"
        await operation.reconciler.stop()

    run_story(story())


def test_words_of_events_tell_why_a_job_has_no_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    api, words = CountingApi(), 'pods "demo" is forbidden: exceeded quota: gpus'
    api.makes_pods = False

    async def story() -> None:
        api.add_plan()
        operation = Operation(api, monkeypatch)
        await operation.until(lambda: any("/pytorchjobs/" in name for name in api.objects), 60)
        job = next(name for name in api.objects if "/pytorchjobs/" in name).rsplit("/", 1)[1]
        for number, (name, message) in enumerate(((job, "an older one"), ("another", "of another"), (job, words))):
            stamp = f"2026-01-01T00:01:0{number}Z"
            event = {"metadata": {}, "involvedObject": {"name": name}, "message": message, "lastTimestamp": stamp}
            api.objects[f"/api/v1/namespaces/default/events/{number}"] = event
        await operation.for_seconds(240.0)
        told = api.condition("Succeeded")
        assert told["reason"] == "PodsNotCreated"
        found = re.fullmatch(
            rf"0 of 2 pods created: {re.escape(words)}; tried again meanwhile, and after (2026-01-01 00:0\d:\d\d) UTC with a new "
            rf"PyTorchJob; `kubectl describe PyTorchJob {job}` says why",
            told["message"],
        )
        assert found, told["message"]
        await operation.until(lambda: api.condition("Succeeded")["message"] != told["message"], 240)
        late = JumpingTime.now() - datetime.fromisoformat(f"{found[1]}+00:00")
        assert -5 <= late.total_seconds() <= 60, "that is when this job is given up"
        reads = [
            at
            for at, method, target in api.asked
            if at < 300.0 and (method, target.rsplit("/", 1)[1]) == ("GET", "events")
        ]
        assert 3 <= len(reads) <= 12, "one read after another, ever more rarely"
        await operation.reconciler.stop()

    run_story(story())


def test_pause_is_as_long_as_the_server_asks_up_to_the_longest() -> None:
    async def story() -> None:
        for asked, expected in ((0.0, FIRST_SECONDS), (7.0, 7.0), (3600.0, LONGEST_SECONDS)):
            back_off = BackOff()
            back_off.refuse("CreateJob a", ApiError(429, "slow down", asked))
            pause = back_off.pause()
            assert pause is not None
            assert 0.75 * expected <= pause <= expected

    run_jumping(story())


def test_requests_of_one_kind_share_the_pause_and_take_turns() -> None:
    async def story() -> None:
        back_off, sent = BackOff(), []
        for _ in range(600):
            for name in "abcdefgh":
                if back_off.held(f"DeleteJob {name}") is None:
                    sent.append(name)
                    back_off.refuse(f"DeleteJob {name}", ApiError(409, "no"))
            await asyncio.sleep(1.0)
        assert set(sent[-16:]) == set("abcdefgh"), "none is forgotten"
        assert len(sent) <= 8 + 4 * 10 + 8

    run_jumping(story())


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_something_may_be_sent_after_each_pause(passes: list[int], chance: random.Random) -> None:
    async def story() -> None:
        back_off = BackOff()
        names = [f"DeleteJob {name}" for name in "abcd"]
        for left_out in passes * 3:
            for turn in range(3):
                back_off.begin_pass()
                wanted = [name for number, name in enumerate(names) if number != left_out]
                sent = [name for name in wanted if back_off.held(name) is None]
                for name in sent:
                    back_off.refuse(name, ApiError(403, "no"))
                if sent:
                    break
                assert turn < 2, "passes follow one another without a pause, and send nothing"
                pause = back_off.pause()
                assert pause is not None
                await asyncio.sleep(pause)
            await asyncio.sleep(chance.uniform(0.0, 20.0))

    run_jumping(story())
