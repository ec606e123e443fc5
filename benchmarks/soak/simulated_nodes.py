"""Nodes, PyTorchJobs and garbage collection as a real API server sees them, without processes.

A thread creates the pods of jobs, binds and runs those without a gate, and lets a gang end some seconds after all of its
pods run. An HTTPS server stands for the kubelets: it serves the logs with reports that workers would print. Objects whose
owner is gone are deleted.
"""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import urllib3
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flow_reports import log_of, report_of
from real_api_server import ApiServer

from trainwright import documents
from trainwright.worker_api import Failure, WorkerTask
from trainwright_operator.flow.gangs.pod_template import TASK_FILE
from trainwright_operator.flow.gangs.scheduling import pinned_node
from trainwright_operator.flow.names import GANG_LABEL, PLAN_UID_LABEL, RENDEZVOUS_LABEL, ROLE_LABEL

JOBS: Final = "/apis/kubeflow.org/v1/namespaces/{}/pytorchjobs"
PLANS: Final = "/apis/trainwright.dev/v1alpha1/namespaces/{}/trainingplans"
POLICIES: Final = "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies"
_LABEL: Final = "training.kubeflow.org"
_TICK_SECONDS: Final = 0.5
Object = dict[str, Any]
Gang = tuple[str, str]
"""Uid of the plan and name of the gang."""
RunSeconds = float | Callable[[str], float]
"""Seconds that every gang runs, or a function that returns those of a gang by its name."""
Report = Callable[[WorkerTask], Any]
"""Returns the report of a task's workers, or the Failure with which all of them end."""


class Requests:
    """Requests to an API server as its administrator."""

    def __init__(self, api: ApiServer) -> None:
        config = json.loads(api.kubeconfig.read_text())
        self._url = api.url
        self._headers = {"Authorization": f"Bearer {config['users'][0]['user']['token']}"}
        authority = config["clusters"][0]["cluster"]["certificate-authority"]
        self._pool = urllib3.PoolManager(ca_certs=authority, retries=False, timeout=10.0)

    def send(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> Object:
        """Return the answer; of a missing object or a conflict, an empty one."""
        answer = self._pool.request(
            method,
            self._url + path,
            body=None if body is None else json.dumps(body),
            headers=self._headers | {"Content-Type": kind},
        )
        found: Object = json.loads(answer.data)
        if answer.status == 429:  # it starts, or is busy
            time.sleep(1.0)
            return self.send(method, path, body, kind)
        if answer.status in (404, 409):
            return {}
        assert answer.status < 400, f"{method} {path}: {found.get('message')}"
        return found

    def items(self, path: str) -> list[Object]:
        """List all items."""
        found: list[Object] = self.send("GET", path).get("items") or []
        return found


class SimulatedNodes:
    """Pods and jobs of a namespace.

    Attributes:
        completed: number of times that each task ran to its end, by plan and name of its ConfigMap.
    """

    def __init__(self, api: ApiServer, namespace: str, run_seconds: RunSeconds, report: Report) -> None:
        self._requests = Requests(api)
        self._report = report
        self._run_seconds = run_seconds
        self._namespace = namespace
        self._core = f"/api/v1/namespaces/{namespace}"
        self._jobs, self._plans = JOBS.format(namespace), PLANS.format(namespace)
        self._policies = POLICIES.format(namespace)
        self._logs: dict[str, str] = {}
        self._stop = threading.Event()
        self.completed: Counter[tuple[str, str]] = Counter()
        self.failure: BaseException | None = None

    def run(self) -> None:
        """Advance all objects until the end."""
        try:
            while not self._stop.wait(_TICK_SECONDS):
                self._advance()
        except BaseException as error:  # noqa: BLE001 - the waiting program reports it
            self.failure = error

    def stop(self) -> None:
        """Request the end of `run`."""
        self._stop.set()

    def log(self, pod: str) -> str:
        """Return the log of a pod."""
        return self._logs.get(pod, "starting\n")

    def _advance(self) -> None:
        plans = {one["metadata"]["uid"] for one in self._requests.items(self._plans)}
        jobs = self._owned(self._jobs, plans)
        maps = self._owned(f"{self._core}/configmaps", plans)
        self._owned(self._policies, {one["metadata"]["uid"] for one in maps})
        pods = self._owned(f"{self._core}/pods", {one["metadata"]["uid"] for one in jobs})
        by_job: dict[str, list[Object]] = defaultdict(list)
        for pod in pods:
            by_job[pod["metadata"]["labels"][f"{_LABEL}/job-name"]].append(pod)
        gangs: dict[Gang, list[Object]] = defaultdict(list)
        for job in jobs:
            found = by_job[job["metadata"]["name"]]
            if not found:
                self._create_pods(job)
            elif not any(pod["spec"].get("schedulingGates") for pod in found):
                self._run_pods(found)
            gangs[_gang(job)].append(job)
        for gang, members in gangs.items():
            own = [pod for job in members for pod in by_job[job["metadata"]["name"]]]
            if own and all(self._has_run(pod) for pod in own):
                task = next(
                    (one for one in maps if _gang(one) == gang and one["metadata"]["labels"][ROLE_LABEL] == "order"),
                    None,
                )
                if task is not None:
                    self._finish(gang, members, own, task)

    def _owned(self, path: str, owners: set[str]) -> list[Object]:
        """List the objects whose owner exists, and delete the others."""
        kept = []
        for one in self._requests.items(path):
            wanted = one["metadata"].get("ownerReferences")
            if wanted and wanted[0]["uid"] in owners:
                kept.append(one)
            elif wanted and "deletionTimestamp" not in one["metadata"]:
                self._requests.send("DELETE", f"{path}/{one['metadata']['name']}", {"gracePeriodSeconds": 0})
        return kept

    def _create_pods(self, job: Object) -> None:
        meta = job["metadata"]
        owner = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "name": meta["name"], "uid": meta["uid"]}
        for pod in pods_of(job):
            pod["metadata"]["ownerReferences"] = [owner]
            self._requests.send("POST", f"{self._core}/pods", pod)

    def _run_pods(self, pods: list[Object]) -> None:
        for pod in pods:
            if pod.get("status", {}).get("phase") != "Pending":
                continue
            path = f"{self._core}/pods/{pod['metadata']['name']}"
            if not pod["spec"].get("nodeName"):
                target = {"apiVersion": "v1", "kind": "Node", "name": pinned_node(pod["spec"]["affinity"])}
                binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod["metadata"]["name"]}}
                self._requests.send("POST", f"{path}/binding", binding | {"target": target})
            now = _text(datetime.now(UTC))
            self._set_status(f"{path}/status", running_status(now))

    def _has_run(self, pod: Object) -> bool:
        status = pod.get("status", {})
        if status.get("phase") != "Running":
            return False
        since, gang = datetime.fromisoformat(status["startTime"]), pod["metadata"]["labels"][GANG_LABEL]
        seconds = self._run_seconds(gang) if callable(self._run_seconds) else self._run_seconds
        return datetime.now(UTC) - since >= timedelta(seconds=seconds)

    def _finish(self, gang: Gang, jobs: list[Object], pods: list[Object], task_map: Object) -> None:
        task = documents.loads(task_map["data"][TASK_FILE], WorkerTask, source="task")
        self.completed[gang[0], task_map["metadata"]["name"]] += 1
        now, report = _text(datetime.now(UTC)), self._report(task)
        has_failed = isinstance(report, Failure)
        for pod in pods:
            meta = pod["metadata"]
            ended = {"exitCode": int(has_failed), "startedAt": pod["status"]["startTime"], "finishedAt": now}
            if has_failed:
                ended["message"] = documents.dumps(report)
            elif RENDEZVOUS_LABEL in meta["labels"]:
                self._logs[meta["name"]] = log_of(report)
            container = _container({"terminated": ended})
            status = {"phase": "Failed" if has_failed else "Succeeded", "containerStatuses": [container]}
            self._set_status(f"{self._core}/pods/{meta['name']}/status", status)
        kind = "Failed" if has_failed else "Succeeded"
        condition = {"type": kind, "status": "True", "reason": f"PyTorchJob{kind}", "message": ""}
        condition |= {"lastTransitionTime": now, "lastUpdateTime": now}
        for job in jobs:
            status = {"conditions": [condition], "replicaStatuses": {}}
            self._set_status(f"{self._jobs}/{job['metadata']['name']}/status", status)

    def _set_status(self, path: str, status: Object) -> None:
        self._requests.send("PATCH", path, {"status": status}, "application/merge-patch+json")


def pods_of(job: Object) -> list[Object]:
    """Return the pods that the training operator would create for a PyTorchJob."""
    found = []
    meta = job["metadata"]
    owner = {"apiVersion": job["apiVersion"], "kind": "PyTorchJob", "name": meta["name"], "uid": meta["uid"]}
    for role, replicas in job["spec"]["pytorchReplicaSpecs"].items():
        for index in range(replicas["replicas"]):
            template = json.loads(json.dumps(replicas["template"]))
            labels = {"job-name": meta["name"], "replica-type": role.lower(), "replica-index": str(index)}
            template["metadata"] |= {
                "name": f"{meta['name']}-{role.lower()}-{index}",
                "namespace": meta["namespace"],
                "ownerReferences": [owner],
            }
            template["metadata"]["labels"] |= {f"{_LABEL}/{key}": value for key, value in labels.items()}
            found.append({"apiVersion": "v1", "kind": "Pod", **template})
    return found


def running_status(now: str) -> Object:
    """Return the status of a pod that began to run."""
    return {"phase": "Running", "startTime": now, "containerStatuses": [_container({"running": {"startedAt": now}})]}


def _container(state: Object) -> Object:
    known = {"name": "pytorch", "image": "x", "imageID": "", "ready": "running" in state, "restartCount": 0}
    return known | {"state": state}


def _gang(one: Object) -> Gang:
    labels = one["metadata"]["labels"]
    return labels[PLAN_UID_LABEL], labels.get(GANG_LABEL, "")


def _text(time: datetime) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")


@contextmanager
def simulated_nodes(
    api: ApiServer, namespace: str, folder: Path, run_seconds: RunSeconds, report: Report = report_of
) -> Iterator[tuple[SimulatedNodes, int]]:
    """Run the jobs of a namespace until the block ends. Return them with the port of the kubelets."""
    nodes = SimulatedNodes(api, namespace, run_seconds, report)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Kubelet, nodes))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(_certificate(folder / "kubelet.pem"))
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threads = [threading.Thread(target=one, daemon=True) for one in (nodes.run, server.serve_forever)]
    for thread in threads:
        thread.start()
    try:
        yield nodes, server.server_port
    finally:
        nodes.stop()
        server.shutdown()
        for thread in threads:
            thread.join(timeout=30)
    if nodes.failure is not None:
        raise nodes.failure


class _Kubelet(BaseHTTPRequestHandler):
    """Logs of containers: /containerLogs/<namespace>/<pod>/<container>."""

    def __init__(self, nodes: SimulatedNodes, *arguments: Any) -> None:
        self._nodes = nodes
        super().__init__(*arguments)

    def do_GET(self) -> None:
        text = self._nodes.log(self.path.split("/")[3]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


def _certificate(file: Path) -> Path:
    """Write a self-signed certificate with its key; the API server does not verify a kubelet's by default."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "kubelet")])
    now = datetime.now(UTC)
    made = x509.CertificateBuilder(
        name, name, key.public_key(), x509.random_serial_number(), now, now + timedelta(days=1)
    )
    encoding, private = serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL
    text = key.private_bytes(encoding, private, serialization.NoEncryption())
    file.write_bytes(text + made.sign(key, hashes.SHA256()).public_bytes(encoding))
    return file
