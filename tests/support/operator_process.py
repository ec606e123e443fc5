"""Operator process for tests on a real API server, and a way to that server which can be cut off."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flow_jobs import pods_of_job
from real_api_server import job_set_definition, pytorch_job_definition

EMULATION = {"flops_per_second": 1e9, "floor_seconds": 0.001, "updated_parameters_per_second": 1e8}
NODES = ("alpha", "beta")


def equip(api: Any) -> None:
    api.kubectl("apply", "--server-side", document=[pytorch_job_definition(), job_set_definition()])
    until("both kinds to be served", 30, lambda: api.try_kubectl("get", "pytorchjobs,jobsets").returncode == 0)
    for name in NODES:
        labels = {"nvidia.com/gpu.product": "emulated-v100", "nvidia.com/gpu.memory": "16384"}
        annotations = {"trainwright.dev/emulation": json.dumps(EMULATION)}
        meta = {"name": name, "labels": labels, "annotations": annotations}
        api.create({"apiVersion": "v1", "kind": "Node", "metadata": meta})
        devices = {"nvidia.com/gpu": "2"}
        status = {"capacity": devices, "allocatable": devices, "conditions": [{"type": "Ready", "status": "True"}]}
        patch_status(api, "node", name, status)


def patch_status(api: Any, kind: str, name: str, status: dict[str, Any], *, namespace: str = "default") -> None:
    where = ["--namespace", namespace, "--subresource", "status"]
    api.kubectl("patch", kind, name, *where, "--type=merge", "--patch", json.dumps({"status": status}))


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@contextmanager
def operator(
    api: Any, namespace: str, folder: Path, *others: str, kubeconfig: Path | None = None
) -> Iterator[tuple[subprocess.Popen[bytes], int, Path]]:
    """Run the operator on a namespace, which also holds its lease, and others; yield process, health port and log."""
    health, log = free_port(), folder / f"operator-{time.monotonic_ns()}.log"
    environment = os.environ | {
        "KUBECONFIG": str(kubeconfig or api.kubeconfig),
        "TRAINWRIGHT_WORKER_IMAGE": "worker:test",
        "TRAINWRIGHT_WATCH_NAMESPACES": ",".join((namespace, *others)),
        "TRAINWRIGHT_LEASE_NAMESPACE": namespace,
        "TRAINWRIGHT_LEASE_NAME": namespace,
        "TRAINWRIGHT_METRICS_PORT": str(free_port()),
        "TRAINWRIGHT_HEALTH_PORT": str(health),
    }
    command = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-m", "trainwright_operator"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            yield process, health, log
        finally:
            process.kill()
            process.wait(timeout=20)


def until(what: str, seconds: float, reached: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := reached()):
        assert time.monotonic() < deadline, f"{what}: not within {seconds:.0f} s"
        time.sleep(0.2)
    return found


def condition(api: Any, namespace: str, name: str, kind: str) -> dict[str, Any]:
    status = api.get("trainingplan", name, "--namespace", namespace).get("status", {})
    found: dict[str, Any] = next((c for c in status.get("conditions", []) if c["type"] == kind), {"status": "Unknown"})
    return found


def make_pods(api: Any, namespace: str, job: dict[str, Any]) -> list[str]:
    """Create the pods that the training operator or JobSet would create."""
    names = []
    for pod, template in pods_of_job(job):
        manifest = {"apiVersion": "v1", "kind": "Pod", **json.loads(json.dumps(template))}
        manifest["metadata"] |= {"name": pod["name"], "namespace": namespace, "ownerReferences": [pod_owner(pod, job)]}
        manifest["metadata"]["labels"] |= pod["labels"]
        api.create(manifest)
        names.append(pod["name"])
    return names


def pod_owner(pod: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    """Return the reference to the PyTorchJob, or to the Job that JobSet makes of a replicated job."""
    owner = {
        "apiVersion": job["apiVersion"],
        "kind": job["kind"],
        **{key: job["metadata"][key] for key in ("name", "uid")},
    }
    if job["kind"] == "JobSet":
        role = pod["labels"]["jobset.sigs.k8s.io/replicatedjob-name"]
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": f"{owner['name']}-{role}-0", "uid": "of-the-job"}
    return owner | {"controller": True}


def jobs(api: Any, namespace: str, kind: str = "PyTorchJob") -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = api.get(kind, "--namespace", namespace)["items"]
    return items


def deny(api: Any, namespace: str, *, operation: str, group: str, resource: str, expression: str, message: str) -> None:
    """Deny requests in a namespace by an expression, as a platform team's policy may."""
    kind = {"apiVersion": "admissionregistration.k8s.io/v1"}
    rule = {"apiGroups": [group], "apiVersions": ["*"], "operations": [operation], "resources": [resource]}
    match = {
        "resourceRules": [rule],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
    }
    policy = {"matchConstraints": match, "validations": [{"expression": expression, "message": message}]}
    api.create(kind | {"kind": "ValidatingAdmissionPolicy", "metadata": {"name": namespace}, "spec": policy})
    binding = {"policyName": namespace, "validationActions": ["Deny"]}
    api.create(kind | {"kind": "ValidatingAdmissionPolicyBinding", "metadata": {"name": namespace}, "spec": binding})


class Gateway:
    """Way to the API server that can be cut off: a TCP proxy on loopback."""

    def __init__(self, target: str) -> None:
        self.target = urlsplit(target)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.is_open = threading.Event()
        self.is_open.set()
        self.connections: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def kubeconfig(self, api: Any, folder: Path) -> Path:
        """Write the API server's kubeconfig with the gateway's address."""
        config = folder / "gateway.kubeconfig"
        port = self.listener.getsockname()[1]
        config.write_text(api.kubeconfig.read_text().replace(f":{self.target.port}", f":{port}"))
        return config

    def cut(self) -> None:
        """Let nothing pass, and break all connections, so that watches begin anew afterwards."""
        self.is_open.clear()
        while self.connections:
            with suppress(OSError):
                self.connections.pop().shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            near, _ = self.listener.accept()
            self.is_open.wait()
            self.connections.append(near)
            far = socket.create_connection((self.target.hostname, self.target.port))
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                self.is_open.wait()
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
