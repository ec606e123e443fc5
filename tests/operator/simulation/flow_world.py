"""Simulated cluster: applies actions, lets pods run and workers report, and makes snapshots; no threads, its own clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any
from unittest.mock import patch

from flow_jobs import pods_of_job
from flow_queue import SimulatedQueue
from flow_reports import log_of, report_of

from trainwright.search import NoFeasiblePlan
from trainwright.worker_api import TrialTask, WorkerTask
from trainwright_operator.api.installation import InstallationRules
from trainwright_operator.api.spec import LauncherKind, TrainingPlanSpec
from trainwright_operator.api.status import TrainingPlanStatus, TrialStatus
from trainwright_operator.flow import actions as a
from trainwright_operator.flow.decide import decide
from trainwright_operator.flow.documents.stored_documents import NeedsNewerVersion, parse_strict
from trainwright_operator.flow.gangs import scheduling
from trainwright_operator.flow.gangs.launchers.registry import LAUNCHERS
from trainwright_operator.flow.names import GANG_LABEL, LOG_LABEL, PLACEMENT_GATE, RENDEZVOUS_LABEL
from trainwright_operator.flow.snapshot import (
    ContainerFacts,
    DryRun,
    HandedOverObject,
    JobFacts,
    NodeFacts,
    PlanFacts,
    PlannerFacts,
    PlannerState,
    PodFacts,
    RequestFailure,
    Snapshot,
    StoredConfigMap,
)
from trainwright_operator.flow.winner_job.job_record import objects_to_read
from trainwright_operator.search_process import search

START = datetime(2026, 1, 1, tzinfo=UTC)
EMULATION = '{"flops_per_second": 1e9, "floor_seconds": 0.001, "updated_parameters_per_second": 1e8}'
RESOURCE = "nvidia.com/gpu"
ASKED: dict[str, Any] = {}
"""Further fields of every spec, for tests that run with each launcher."""


@cache
def found_before(request: a.PlanningRequest) -> str:
    """Search once for each request, since most tests ask for the same plans; the answer says that it took no time."""
    with patch("time.monotonic", return_value=0.0):
        return search(request)


def node(name: str, product: str = "emulated-v100", devices: int = 2, **changes: Any) -> NodeFacts:
    labels = {"nvidia.com/gpu.product": product, "nvidia.com/gpu.memory": "16384"}
    annotations = {"trainwright.dev/emulation": EMULATION} if product.startswith("emulated-") else {}
    facts = NodeFacts(name, labels, annotations, {RESOURCE: str(devices)})
    return replace(facts, **changes)


def spec_of(**changes: Any) -> TrainingPlanSpec:
    body: dict[str, Any] = {
        **ASKED,
        "model": {"gpt": {"layers": 4, "hiddenSize": 64, "heads": 4, "sequenceLength": 64, "vocabularySize": 512}},
        "training": {"globalBatchSize": 8, "dtype": "float32"},
        "search": {"planner": "Amp", "limits": {"maxTensorDegree": 2}},
    }
    return TrainingPlanSpec.model_validate(body | changes)


def owner(manifest: dict[str, Any]) -> str:
    """Return the uid of an object's one owner."""
    (found,) = manifest["metadata"]["ownerReferences"]
    return str(found["uid"])


def selects(policy: dict[str, Any], labels: dict[str, str]) -> bool:
    """Return whether a NetworkPolicy is about a pod with these labels."""
    return bool(policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items())


def devices_by_node(manifest: dict[str, Any]) -> Counter[str]:
    """Return the devices that the pods of a winner's job take."""
    found = Counter[str]()
    for _, template in pods_of_job(manifest):
        (container,) = (one for one in template["spec"]["containers"] if one["name"] == "pytorch")
        found[scheduling.pinned_node(template["spec"]["affinity"])] += int(container["resources"]["limits"][RESOURCE])
    return found


@dataclass
class World:
    """Simulated cluster and the operator's memory."""

    spec: TrainingPlanSpec = field(default_factory=spec_of)
    nodes: tuple[NodeFacts, ...] = (node("n1"), node("n2"), node("n3", "emulated-t4"))
    annotations: dict[str, str] = field(default_factory=dict)
    image: str = "worker:1"
    report: Callable[[WorkerTask], Any] = report_of
    log: Callable[[WorkerTask], str | None] = lambda order: None
    run_seconds: float = 10.0
    template_error: tuple[str, str] = ("", "")
    missing: frozenset[LauncherKind] = frozenset()
    """Launchers that the cluster lacks."""
    spec_error: str = ""
    hidden_fields: tuple[str, ...] = ()
    refuse_jobs: str = ""
    search: Callable[[a.PlanningRequest], str] = found_before
    search_hangs: bool = False
    fails: dict[type, str] = field(default_factory=dict)
    """Actions that the API server answers with an error."""
    others: dict[str, int] = field(default_factory=dict)
    image_id: Callable[[str, str], str] = lambda node, image: ""
    """Id that a node reports of an image."""
    queue: SimulatedQueue = field(default_factory=SimulatedQueue)
    """Queue of a plan with queueName; plans may share it."""
    rules: InstallationRules = field(default_factory=InstallationRules)
    draw: Callable[[a.PageRequest], str] | None = None
    """How pages are drawn, where they are."""

    def __post_init__(self) -> None:
        self.now = START
        self.generation = 1
        self.status = TrainingPlanStatus()
        self.stored: dict[str, StoredConfigMap] = {}
        self.measurements: dict[str, StoredConfigMap] = {}
        self.jobs: dict[str, JobFacts] = {}
        self.pods: dict[str, PodFacts] = {}
        self.images: dict[str, str] = {}
        self.policies: dict[str, dict[str, Any]] = {}
        self.handed_over: dict[str, dict[str, Any]] = {}
        self.winner_jobs: dict[str, HandedOverObject] = {}
        self.templates: dict[str, dict[str, Any]] = {}
        self.manifests: dict[str, dict[str, Any]] = {}
        self.events: list[a.EmitEvent] = []
        self.deleted = False
        self.pods_made = self.maps_made = 0
        self.created: list[str] = []
        self.restart()

    def change(self, **spec: Any) -> None:
        """Edit the spec, as a user does."""
        self.spec = spec_of(**spec)
        self.generation += 1

    def restart(self) -> None:
        """Clear the operator's memory."""
        self.dry_run: DryRun | None = None
        self.planner = PlannerFacts()
        self.refusals: dict[str, str] = {}
        self.failing: RequestFailure | None = None

    def snapshot(self) -> Snapshot:
        used = dict(self.others)
        for pod in self.pods.values():
            where = pod.node or scheduling.pinned_node(pod.affinity)
            if where and pod.phase in ("Pending", "Running"):
                used[where] = used.get(where, 0) + self._devices(pod)
        for name, manifest in self.handed_over.items():
            if self.winner_jobs[name].devices:
                used = dict(Counter(used) + devices_by_node(manifest))
        snapshot = Snapshot(
            plan=PlanFacts(
                "demo", "default", "uid-1", self.generation, START, None if self.spec_error else self.spec,
                self.status, self.image, self.annotations, self.spec_error,
                self.hidden_fields,
            ),
            nodes=self.nodes,
            jobs=tuple(self.jobs.values()),
            pods=tuple(self.pods.values()),
            stored=tuple(self.stored.values()),
            used_devices=used,
            refusals=dict(self.refusals),
            dry_run=self.dry_run,
            planner=self.planner,
            failing=self.failing,
            queue=self.queue.facts if self.spec.queue_name else None,
            rules=self.rules,
            measurements=tuple(self.measurements.values()),
            draws_pages=self.draw is not None,
        )  # fmt: skip
        read = (self.winner_jobs.get(one.name) for one in objects_to_read(snapshot))
        return replace(snapshot, handed_over=tuple(one for one in read if one is not None))

    def decide(self) -> list[a.Action]:
        return decide(self.snapshot(), self.now)

    def step(self, seconds: float = 2.0) -> list[a.Action]:
        """Run one pass of the operator, then advance the cluster by some time."""
        done = self.decide()
        self.apply(done)
        self.pass_time(seconds)
        return done

    def run(self, steps: int = 2000, until: Callable[[], bool] | None = None) -> TrainingPlanStatus:
        """Run passes until the plan has its answer (or `until`)."""
        for _ in range(steps):
            self.step()
            if until() if until else self._is_answered:
                self.step()
                return self.status
        raise AssertionError(f"no end after {steps} passes: {self.status.dump()}")

    def condition(self, kind: str) -> Any:
        return next((c for c in self.status.conditions if c.type == kind), None)

    def trial(self, name: str) -> TrialStatus:
        return next(found for found in self.status.trials if found.name == name)

    @property
    def _is_answered(self) -> bool:
        found = self.condition("Succeeded")
        return found is not None and found.status != "Unknown" and found.observed_generation == self.generation

    @property
    def succeeded(self) -> str:
        found = self.condition("Succeeded")
        return found.status if found else "Unknown"

    def apply(self, todo: list[a.Action]) -> None:
        words, is_blocked = "", False
        for action in todo:
            failure = self.fails.get(type(action), "") if not is_blocked else ""
            words, is_blocked = words or failure, is_blocked or (bool(failure) and not isinstance(action, a.DeleteJob))
            if not (is_blocked or failure) or isinstance(action, a.SetStatus | a.EmitEvent):
                self._apply(action)
        since = self.failing.since if self.failing else self.now
        self.failing = RequestFailure(words, since) if words else None

    def _apply(self, action: a.Action) -> None:  # noqa: C901, PLR0912, PLR0915 (one case per action)
        match action:
            case a.CreateConfigMap(name=name, role=a.StoredRole.MEASUREMENT):
                self.measurements[name] = StoredConfigMap(
                    name, "", action.role, self.now, action.data, annotations=action.annotations
                )
            case a.CreateConfigMap(name=name):
                if action.role is a.StoredRole.TASK:
                    self.refusals.clear()
                if name not in self.stored:
                    self.created.append(name)
                    self.maps_made += 1
                    uid = f"{self.maps_made:08}-uid"
                    self.stored[name] = StoredConfigMap(name, action.gang, action.role, self.now, action.data, uid=uid)
            case a.AnnotateConfigMap(name=name):
                known = self.stored[name]
                self.stored[name] = replace(known, annotations={**known.annotations, **action.annotations})
            case a.DeleteConfigMap(name=name):
                gone = self.stored.pop(name, None)
                self.measurements.pop(name, None)
                self.policies = {
                    key: one for key, one in self.policies.items() if gone is None or owner(one) != gone.uid
                }
            case a.CreateNetworkPolicy(manifest=manifest):
                assert owner(manifest) in {one.uid for one in self.stored.values()}, "collected at once"
                self.policies[manifest["metadata"]["name"]] = dict(manifest)
            case a.CreateJob(manifest=manifest):
                self._create_job(dict(manifest))
            case a.HandOverJob(manifest=manifest):
                if manifest["metadata"]["name"] not in self.handed_over:
                    self._hand_over(dict(manifest))
            case a.DeleteJob(name=name) if name in self.winner_jobs:
                self.change_winner_job(name, terminating=True)
            case a.DeleteJob(name=name):
                self.delete_job(name)
            case a.PinPod():
                self._pin(action)
            case a.DryRunJob(key=key):
                launcher = LAUNCHERS[LauncherKind(action.manifest["kind"])]
                missing = (launcher.missing, "the server could not find the requested resource")
                self.dry_run = DryRun(key, *(missing if launcher.kind in self.missing else self.template_error))
            case a.StartPlanner(request=request) if self.search_hangs:
                self.planner = PlannerFacts(PlannerState.RUNNING, request.key, self.now)
            case a.StartPlanner(request=request):
                try:
                    self.planner = PlannerFacts(PlannerState.DONE, request.key, self.now, self.search(request))
                except NoFeasiblePlan as refusal:
                    self.planner = PlannerFacts(PlannerState.INFEASIBLE, request.key, self.now, message=str(refusal))
                except ValueError as error:  # the search process ends with its traceback
                    self.planner = PlannerFacts(PlannerState.FAILED, request.key, self.now, message=str(error))
            case a.DrawPage(request=request):
                assert self.draw is not None
                try:
                    self.planner = PlannerFacts(PlannerState.DONE, request.key, self.now, self.draw(request))
                except ValueError as error:
                    self.planner = PlannerFacts(PlannerState.FAILED, request.key, self.now, message=str(error))
            case a.SetStatus(status=status):
                self.status = status
            case a.EmitEvent():
                self.events.append(action)
            case a.DeletePlan():
                self.deleted = True

    def _create_job(self, manifest: dict[str, Any]) -> None:
        name, labels = manifest["metadata"]["name"], manifest["metadata"]["labels"]
        if name in self.jobs:
            return
        if self.refuse_jobs:
            self.refusals[name] = self.refuse_jobs
            return
        self.created.append(name)
        kind = LauncherKind(manifest["kind"])
        is_suspended = manifest["spec"].get("suspend", False)
        self.jobs[name] = JobFacts(name, labels[GANG_LABEL], self.now, launcher=kind, suspended=is_suspended)
        self.manifests[name] = manifest
        if not is_suspended:
            self.create_pods(name)

    def create_pods(self, name: str) -> None:
        """Create the pods of a job that is not suspended."""
        manifest, kind = self.manifests[name], self.jobs[name].launcher
        labels = manifest["metadata"]["labels"]
        for pod, template in pods_of_job(manifest):
            gates = tuple(one["name"] for one in template["spec"].get("schedulingGates", ()))
            affinity = template["spec"].get("affinity")
            assert gates == (() if scheduling.pinned_node(affinity) else (PLACEMENT_GATE,)), "one of both places a pod"
            place = LAUNCHERS[kind].read_place(pod["labels"])
            assert place is not None
            own = template["metadata"]["labels"]
            assert self.rules.isolates_gangs == any(selects(one, own) for one in self.policies.values())
            speaks = LOG_LABEL in own or (RENDEZVOUS_LABEL in own and place.index == 0)
            self.pods[pod["name"]] = PodFacts(
                pod["name"], labels[GANG_LABEL], place.job, place.role, place.index, self.now, gates=gates,
                affinity=affinity, reports=speaks,
            )  # fmt: skip
            self.templates[pod["name"]] = template["spec"]
            self.images[pod["name"]] = template["spec"]["containers"][0]["image"]
            self.pods_made += 1

    def _hand_over(self, manifest: dict[str, Any]) -> None:
        name, spec = manifest["metadata"]["name"], manifest["spec"]
        is_suspended = spec.get("suspend", spec.get("runPolicy", {}).get("suspend", False))
        job = JobFacts(name, "", self.now, launcher=LauncherKind(manifest["kind"]), suspended=is_suspended)
        self.created.append(name)
        self.handed_over[name] = manifest
        self.winner_jobs[name] = HandedOverObject(job, is_owned=bool(manifest["metadata"].get("ownerReferences")))

    def change_winner_job(self, name: str, **changes: Any) -> None:
        """Change what the API server tells of an object of the winner's job; one that ended holds no devices."""
        found = self.winner_jobs[name]
        changed = replace(found, job=replace(found.job, **changes))
        released = changed.has_ended or changed.job.suspended
        self.winner_jobs[name] = replace(changed, devices=0, held_since=None) if released else changed

    def delete_winner_job(self, name: str) -> None:
        """Delete an object of the winner's job, as somebody may who has the right to."""
        del self.winner_jobs[name], self.handed_over[name]

    def _run_winner_jobs(self) -> None:
        for name, found in list(self.winner_jobs.items()):
            if found.job.terminating:
                self.delete_winner_job(name)
            elif found.is_owned and not (found.has_ended or found.job.suspended or found.devices):
                devices = sum(devices_by_node(self.handed_over[name]).values())
                self.winner_jobs[name] = replace(found, devices=devices, held_since=self.now)

    def delete_job(self, name: str) -> None:
        self.jobs.pop(name, None)
        self.queue.release(name)
        self.delete_pods(name)

    def delete_pods(self, name: str) -> None:
        self.pods = {key: pod for key, pod in self.pods.items() if pod.job != name}

    def _admit_jobs(self) -> None:
        for name, job in list(self.jobs.items()):
            if not job.suspended or job.deactivated:
                continue
            lacking = self.queue.admit(self.manifests[name])
            if lacking:
                self.jobs[name] = replace(job, queue_message=lacking)
            else:
                self.jobs[name] = replace(job, suspended=False, resumed_at=self.now)
                self.delete_pods(name)
                self.create_pods(name)

    def evict(self, gang: str, **changes: Any) -> None:
        """Suspend the gang's job, as Kueue does; its pods terminate."""
        for name, job in list(self.jobs.items()):
            if job.gang == gang:
                self.jobs[name] = replace(job, suspended=True, queue_message="preempted by another", **changes)
                self.queue.release(name)
                ending = {key: replace(pod, terminating=True) for key, pod in self.pods.items() if pod.job == name}
                self.pods |= ending

    def _pin(self, action: a.PinPod) -> None:
        pod = self.pods[action.name]
        given = self.queue.assigned.get((pod.job, pod.role))
        labels = next((one.labels for one in self.nodes if one.name == action.node), {})
        assert given is None or given.node_labels.items() <= labels.items(), f"{pod.name} never starts on {action.node}"
        if PLACEMENT_GATE in pod.gates:
            match = {"key": "metadata.name", "operator": "In", "values": [action.node]}
            terms = {"nodeSelectorTerms": [{"matchFields": [match]}]}
            affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
            self.pods[action.name] = replace(pod, gates=(), affinity=affinity)

    def order_of(self, pod: PodFacts) -> WorkerTask | None:
        stored = next((s for s in self.stored.values() if s.gang == pod.gang and s.role == "order"), None)
        try:
            order: WorkerTask | None = parse_strict(stored.data["order.json"], WorkerTask, "order") if stored else None
        except NeedsNewerVersion:
            return None
        return order

    def _devices(self, pod: PodFacts) -> int:
        order = self.order_of(pod)
        where = pod.node or scheduling.pinned_node(pod.affinity)
        return next((len(n.slots) for n in order.gang.nodes if n.name == where), 0) if order else 0

    def pass_time(self, seconds: float) -> None:
        """Advance the clock: pods are bound and run; a gang whose pods ran long enough succeeds, with its report in the log."""
        self.now += timedelta(seconds=seconds)
        self._admit_jobs()
        self._run_winner_jobs()
        for name, pod in list(self.pods.items()):
            if pod.phase == "Pending" and not pod.gates and not (pod.containers and pod.containers[0].waiting_reason):
                where = scheduling.pinned_node(pod.affinity)
                image_id = self.image_id(where, self.images[name])
                running = ContainerFacts("pytorch", running_since=self.now, image_id=image_id)
                self.pods[name] = replace(pod, phase="Running", node=where, started_at=self.now, containers=(running,))
        for job in list(self.jobs.values()):
            pods = [pod for pod in self.pods.values() if pod.gang == job.gang]
            order = self.order_of(pods[0]) if pods else None
            if order is None or not all(pod.phase == "Running" for pod in pods):
                continue
            since = max(pod.started_at for pod in pods if pod.started_at)
            fault = order.fault if isinstance(order, TrialTask) else None
            if fault == "hang" or (self.now - since).total_seconds() < self.run_seconds:
                continue
            self._finish(job.gang, order, fault)

    def _finish(self, gang: str, order: WorkerTask, fault: str | None) -> None:
        for name, pod in list(self.pods.items()):
            if pod.gang != gang:
                continue
            code = 13 if fault == "crash" else 0
            ended = replace(pod.containers[0], running_since=None, started_at=pod.started_at, exit_code=code,
                            finished_at=self.now)  # fmt: skip
            log = self.log(order) if pod.reports else None
            if pod.reports and log is None:
                log = "no report here\n" if fault == "mute" else log_of(self.report(order))
            phase = "Failed" if code else "Succeeded"
            self.pods[name] = replace(pod, phase=phase, containers=(ended,), log=log)
        for name, job in self.jobs.items():
            if job.gang == gang:
                self.jobs[name] = replace(
                    job, succeeded=fault != "crash", failed_at=self.now if fault == "crash" else None
                )
