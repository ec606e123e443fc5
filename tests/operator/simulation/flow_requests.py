"""Simulated API server that counts requests and refuses some: the real reconciler works on it, by a clock that jumps."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import pytest
from flow_jobs import pods_of_job
from flow_reports import log_of, report_of
from flow_world import RESOURCE, START, found_before, node, spec_of
from prometheus_client import CollectorRegistry

from trainwright.worker_api import WorkerTask
from trainwright_operator import plan_resource
from trainwright_operator.flow.actions import PageRequest, PlanningRequest
from trainwright_operator.flow.documents.stored_documents import parse_strict
from trainwright_operator.flow.gangs.launchers.registry import LAUNCHERS
from trainwright_operator.flow.gangs.scheduling import pinned_node
from trainwright_operator.flow.names import GANG_LABEL, PLAN_UID_LABEL
from trainwright_operator.flow.snapshot import NodeFacts, PlannerFacts, PlannerState
from trainwright_operator.kube import apply, namespace_claims, object_facts, reconciler, snapshot_reader
from trainwright_operator.kube.client import JSON_PATCH, Api, ApiError
from trainwright_operator.kube.health import Liveness
from trainwright_operator.kube.object_cache import ObjectCache
from trainwright_operator.kube.reconciler import Reconciler
from trainwright_operator.kube.requests import pod_refusals
from trainwright_operator.kube.search_pool import SearchPool
from trainwright_operator.kube.watch import watch_event
from trainwright_operator.kube.write_guard import WriteGuard
from trainwright_operator.metrics import Metrics
from trainwright_operator.settings import Settings

PLANS = "/apis/trainwright.dev/v1alpha1/namespaces/default/trainingplans"
KUEUE = "/apis/kueue.x-k8s.io/v1beta2"
KINDS = {launcher.kind.value: launcher for launcher in LAUNCHERS.values()}
Asked = tuple[float, str, str]
"""Time, method and object of a request."""


def clock() -> float:
    return asyncio.get_running_loop().time()


async def at_once(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


class JumpingTime(datetime):
    """Time of day by the loop's clock."""

    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        return START + timedelta(seconds=clock())


class Searches(SearchPool):
    """Searches that are answered and pages that are drawn at once."""

    def start(self, uid: str, request: PlanningRequest | PageRequest) -> None:
        is_page = isinstance(request, PageRequest)
        answer = "<p>page</p>" if isinstance(request, PageRequest) else found_before(request)
        self._facts[uid] = PlannerFacts(PlannerState.DONE, request.key, START, answer, is_page=is_page)


class CountingApi(Api):
    """API server of one plan with its launchers, its kubelets and the watch.

    `refuses`: the answer to a request by method and object, or None; a dry run has the method DRYRUN.
    """

    def __init__(self, nodes: tuple[NodeFacts, ...] = (node("n1"), node("n2")), run_seconds: float = 5.0) -> None:
        super().__init__(None, None, WriteGuard())  # type: ignore[arg-type]
        self.objects: dict[str, dict[str, Any]] = {}
        self.asked: list[Asked] = []
        self.refused: list[Asked] = []
        self.refuses: Callable[[str, str], ApiError | None] = lambda method, target: None
        self.waiting: dict[str, str] = {}
        """State in which the containers of all pods stay."""
        self.reconciler: Reconciler | None = None
        self.makes_pods = True
        self.run_seconds = run_seconds
        self._version = 0
        for one in nodes:
            self.objects[f"/api/v1/nodes/{one.name}"] = {
                "metadata": {"name": one.name, "labels": one.labels, "annotations": one.annotations},
                "status": {
                    "allocatable": one.allocatable,
                    "conditions": [{"type": "Ready", "status": "True"}],
                },
            }

    def add_plan(self, **spec: Any) -> None:
        body = spec_of(**spec).model_dump(mode="json", by_alias=True, exclude_none=True)
        self._store(f"{PLANS}/demo", {"metadata": {"name": "demo", "generation": 1}, "spec": body})

    def add_queue(self, name: str) -> None:
        """Add a queue with room for everything. Nobody admits what is put into it."""
        flavor = {"name": "any", "resources": [{"name": RESOURCE, "nominalQuota": "100"}]}
        group = {"coveredResources": [RESOURCE], "flavors": [flavor]}
        self._store(f"{KUEUE}/namespaces/default/localqueues/{name}", {"metadata": {}, "spec": {"clusterQueue": "all"}})
        self._store(f"{KUEUE}/clusterqueues/all", {"metadata": {}, "spec": {"resourceGroups": [group]}})
        self._store(f"{KUEUE}/resourceflavors/any", {"metadata": {}, "spec": {}})

    @property
    def plan(self) -> dict[str, Any]:
        return self.objects[f"{PLANS}/demo"]

    def condition(self, kind: str) -> dict[str, Any]:
        conditions = self.plan.get("status", {}).get("conditions", [])
        return next(
            (one for one in conditions if one["type"] == kind), {"status": "Unknown", "reason": "", "message": ""}
        )

    async def _request(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        query: dict[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        asked = query or {}
        named = method == "POST" and f"{path}/{body['metadata'].get('name', '')}"
        target, verb = named or path, "DRYRUN" if "dryRun" in asked else method
        self._answer(verb, target)
        if method == "GET":
            return json.dumps(self._listed(path, asked) if self._is_list(path) else self._found(path)).encode()
        if verb == "DRYRUN":
            return b"{}"
        if method == "POST":
            return json.dumps(self._create(path, body)).encode()
        found = self._found(path.removesuffix("/status"))
        if method == "DELETE":
            self._delete(path)
            return b"{}"
        if method == "PATCH" and (headers or {}).get("Content-Type") == JSON_PATCH:
            found = patched(found, body)
        else:
            meta = {**found["metadata"], **(body["metadata"] if method == "PATCH" else {})}
            meta["annotations"] = {**found["metadata"].get("annotations", {}), **meta.get("annotations", {})}
            found = {**(found if method == "PATCH" else body), "metadata": meta}
        self._store(path.removesuffix("/status"), found)
        return json.dumps(found).encode()

    async def get_text(self, path: str, **query: str) -> str:
        self._answer("GET", path)
        pod = self.objects[path.removesuffix("/log")]
        task = self._task(pod) if pod["status"]["phase"] == "Succeeded" else None
        return log_of(report_of(task)) if task is not None else ""

    def _answer(self, verb: str, target: str) -> None:
        """Count a request, and raise what it is refused with."""
        self.asked.append((clock(), verb, target))
        error = self.refuses(verb, target)
        if error is None:
            return
        self.refused.append((clock(), verb, target))
        if error.is_conflict and verb == "POST":
            foreign = {"metadata": {"name": target.rsplit("/", 1)[1], "ownerReferences": [{"uid": "another"}]}}
            self.objects.setdefault(target, foreign)  # and it stays, of no label that the plan's lists ask for
        raise error

    def _is_list(self, path: str) -> bool:
        *_, last = path.split("/")
        return path not in self.objects and re.fullmatch(r"[a-z]+s", last) is not None

    def _listed(self, path: str, query: Mapping[str, str]) -> dict[str, Any]:
        labels = dict(part.split("=") for part in query.get("labelSelector", "").split(",") if part)
        kind = path.rsplit("/", 1)[1]
        inside = path if "/namespaces/" in path else path.removesuffix(f"/{kind}")
        found = [
            one
            for name, one in self.objects.items()
            if name.startswith(f"{inside}/") and name.split("/")[-2] == kind
            and labels.items() <= one["metadata"].get("labels", {}).items()
        ]  # fmt: skip
        return {"metadata": {"resourceVersion": str(self._version)}, "items": found}

    def _found(self, path: str) -> dict[str, Any]:
        if path not in self.objects:
            raise ApiError(404, f"{path} not found")
        return self.objects[path]

    def _create(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        meta = body["metadata"]
        name = meta.get("name") or f"{meta['generateName']}{self._version}"
        if f"{path}/{name}" in self.objects:
            raise ApiError(409, f"{name} already exists")
        made = self._store(f"{path}/{name}", {**body, "metadata": {**meta, "name": name}})
        if body["kind"] in KINDS and PLAN_UID_LABEL in meta["labels"] and self.makes_pods:
            asyncio.get_running_loop().call_later(0.5, self._make_pods, made)
        return made

    def _store(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self._version += 1
        kind, name = path.split("/")[-2:]
        meta = {"namespace": "default", "uid": f"{self._version:08}", "creationTimestamp": _stamp(), **body["metadata"]}
        self.objects[path] = {**body, "metadata": {**meta, "name": name, "resourceVersion": str(self._version)}}
        self._tell(kind, self.objects[path], "MODIFIED")
        return self.objects[path]

    def _delete(self, path: str) -> None:
        """Delete an object with its dependents."""
        self._version += 1
        gone = self.objects.pop(path)
        self._tell(path.split("/")[-2], gone, "DELETED")
        for name, one in list(self.objects.items()):
            if any(owner["uid"] == gone["metadata"].get("uid") for owner in one["metadata"].get("ownerReferences", [])):
                self._delete(name)

    def _tell(self, kind: str, resource: dict[str, Any], what: str) -> None:
        """Tell the reconciler of a change, as the watch does."""
        launcher = next((one for one in LAUNCHERS.values() if one.api.plural == kind), None)
        found: Any = None
        if kind == "trainingplans":
            found = plan_resource.plan_facts(resource, "worker:1")
        elif launcher is not None:
            found = object_facts.job_facts(resource, launcher)
        elif kind == "pods":
            found = object_facts.pod_facts(resource)
        if found is not None and self.reconciler is not None:
            event = watch_event(resource, found, what, is_owned=True)
            asyncio.get_running_loop().call_later(0.05, self.reconciler.observe, event)

    def _make_pods(self, job: dict[str, Any]) -> None:
        if not any(one is job for one in self.objects.values()) or job["spec"].get("suspend"):
            return
        for pod, template in pods_of_job(job):
            meta, own, launcher = job["metadata"], template["metadata"], KINDS[job["kind"]]
            place = launcher.read_place(pod["labels"])
            assert place is not None
            kind, owner = launcher.pod_owner(place)
            owners = [
                {"kind": kind, "name": owner, "uid": meta["uid"]}
            ]  # also of a JobSet's Job, which is not made here
            made = {**own, "name": pod["name"], "labels": {**own["labels"], **pod["labels"]}, "ownerReferences": owners}
            self._store(f"/api/v1/namespaces/default/pods/{pod['name']}", {"metadata": made, "spec": template["spec"]})

    def forgive(self) -> None:
        """Refuse nothing any more, and delete what others own."""
        self.refuses = lambda method, target: None
        for path, one in list(self.objects.items()):
            if one["metadata"].get("ownerReferences") == [{"uid": "another"}]:
                del self.objects[path]

    def run_pods(self) -> None:
        """Let pods run, which are pinned, and succeed after a while."""
        for path, pod in list(self.objects.items()):
            if path.split("/")[-2] != "pods" or pod["spec"].get("schedulingGates"):
                continue
            status = pod.get("status", {"phase": "Pending"})
            started = status.get("startTime")
            where = pinned_node(pod["spec"]["affinity"])
            state: dict[str, Any] = {"running": {"startedAt": started or _stamp()}}
            phase = "Running"
            if self.waiting:
                state, phase = {"waiting": self.waiting}, "Pending"
            elif started and (JumpingTime.now() - datetime.fromisoformat(started)).total_seconds() >= self.run_seconds:
                ended = {"exitCode": 0, "startedAt": started, "finishedAt": _stamp()}
                state, phase = {"terminated": ended}, "Succeeded"
            if status["phase"] == phase:
                continue
            told = {"phase": phase, "startTime": started or _stamp()}
            told |= {"containerStatuses": [{"name": "pytorch", "imageID": f"worker@sha256:{'1' * 64}", "state": state}]}
            self._store(path, {**pod, "spec": {**pod["spec"], "nodeName": where}, "status": told})

    def _task(self, pod: dict[str, Any]) -> WorkerTask | None:
        gang = pod["metadata"]["labels"][GANG_LABEL]
        maps = self._listed("/api/v1/namespaces/default/configmaps", {"labelSelector": f"{GANG_LABEL}={gang}"})["items"]
        text = next((one["data"]["order.json"] for one in maps if "order.json" in one["data"]), None)
        return parse_strict(text, WorkerTask, "order") if text is not None else None


class Operation:
    """Reconciler of the plan on such a server, by the clock that jumps."""

    def __init__(self, api: CountingApi, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (reconciler, apply, namespace_claims, pod_refusals):
            monkeypatch.setattr(module, "datetime", JumpingTime)
        monkeypatch.setattr(asyncio, "to_thread", at_once)  # the loop waits for no threads
        monkeypatch.setattr(random, "random", random.Random(1).random)  # pauses are drawn alike in each run
        monkeypatch.setattr(snapshot_reader, "ObjectCache", partial(ObjectCache, clock=clock))
        monkeypatch.setattr(reconciler, "NamespaceClaims", partial(namespace_claims.NamespaceClaims, clock=clock))
        monkeypatch.setattr(reconciler, "SearchPool", Searches)
        self.api = api
        self.reconciler = Reconciler(api, Settings(worker_image="worker:1"), Metrics(CollectorRegistry()), Liveness())
        self.reconciler._claims.expect(())
        api.reconciler = self.reconciler

    async def until(self, reached: Callable[[], bool], seconds: float) -> float:
        """Let the cluster live until something is reached; return how long that took."""
        self.reconciler.wake("default", "demo")
        began = clock()
        while not reached():
            assert clock() - began < seconds, f"not within {seconds} s: {self.api.condition('Succeeded')}"
            await asyncio.sleep(1.0)
            self.api.run_pods()
        return clock() - began

    async def for_seconds(self, seconds: float) -> None:
        ends = clock() + seconds
        await self.until(lambda: clock() >= ends, seconds + 1.0)


def by_minute(asked: list[Asked], since: float, minutes: int) -> Iterator[int]:
    """Yield the number of requests in each minute from then on."""
    for number in range(minutes):
        begins = since + 60.0 * number
        yield sum(begins <= at < begins + 60.0 for at, _, _ in asked)


def patched(target: dict[str, Any], operations: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the object after a JSON patch: all of its operations or none."""
    changed: dict[str, Any] = json.loads(json.dumps(target))
    for one in operations:
        *parents, last = one["path"].strip("/").split("/")
        place: Any = changed
        for name in parents:
            place = place[int(name)] if isinstance(place, list) else place[name]
        at: Any = int(last) if isinstance(place, list) and last != "-" else last
        if one["op"] == "test" and place[at] != one["value"]:
            raise ApiError(422, f"testing {one['path']} failed")
        if one["path"] == "/metadata/resourceVersion" and place[at] != one["value"]:
            raise ApiError(409, "the object has been modified")
        if one["op"] == "remove":
            del place[at]
        elif one["op"] == "add" and at == "-":
            place.append(one["value"])
        elif one["op"] == "add":
            place[at] = one["value"]
    return changed


def _stamp() -> str:
    return JumpingTime.now().strftime("%Y-%m-%dT%H:%M:%SZ")
