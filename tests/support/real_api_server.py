"""Real etcd and kube-apiserver on loopback, without kubelet, scheduler or controllers."""

from __future__ import annotations

import base64
import csv
import json
import secrets
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from local_cluster.binaries import JOBSET, KUEUES, TRAINING_OPERATOR, Binaries, GoModule
from local_cluster.paths import Folders, default_cache

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = Folders(project=ROOT, cache=default_cache(), cluster_name="trainwright")
BINARIES = Binaries(FOLDERS)
START_DEADLINE_SECONDS = 90.0
ESTABLISHED_WITHIN_SECONDS = 30


@dataclass(frozen=True)
class ApiServer:
    """A running API server and its administrator's kubectl."""

    url: str
    kubeconfig: Path
    audit_log: Path
    etcd_url: str

    def try_kubectl(
        self, *arguments: str, document: Any = None, piped: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl, whether it succeeds or not. `document`, one object or a list, is passed as `-f -`."""
        if document is not None:
            documents = document if isinstance(document, list) else [document]
            piped = "\n---\n".join(json.dumps(one) for one in documents)
            arguments = (*arguments, "-f", "-")
        return subprocess.run(
            [BINARIES.path("kubectl"), "--kubeconfig", self.kubeconfig, *arguments],
            input=piped,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def kubectl(self, *arguments: str, document: Any = None, piped: str | None = None) -> str:
        """Return kubectl's output; fail the test with kubectl's message if it does not succeed."""
        done = self.try_kubectl(*arguments, document=document, piped=piped)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def get(self, *arguments: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.kubectl("get", *arguments, "--output", "json"))
        return found

    def create(self, document: dict[str, Any]) -> dict[str, Any]:
        """Return the object as the API server stores it."""
        created: dict[str, Any] = json.loads(self.kubectl("create", "--output", "json", document=document))
        return created

    def establish(self, definition: str) -> None:
        """Wait until the API server serves a resource definition.

        `kubectl wait` fails on a new definition whose conditions are still null.
        """
        deadline = time.monotonic() + ESTABLISHED_WITHIN_SECONDS
        while not self.get(definition)["status"].get("conditions"):
            assert time.monotonic() < deadline, f"{definition} has no conditions"
            time.sleep(0.1)
        self.kubectl("wait", "--for=condition=Established", f"--timeout={ESTABLISHED_WITHIN_SECONDS}s", definition)

    def compact(self) -> None:
        """Drop the history of all objects from etcd."""

        def ask(path: str, body: dict[str, Any]) -> dict[str, Any]:
            request = urllib.request.Request(f"{self.etcd_url}/v3/kv/{path}", json.dumps(body).encode(), method="POST")
            with urllib.request.urlopen(request, timeout=10) as answer:
                found: dict[str, Any] = json.loads(answer.read())
                return found

        revision = ask("range", {"key": base64.b64encode(b"/").decode()})["header"]["revision"]
        ask("compaction", {"revision": revision, "physical": True})

    def refusal(self, document: dict[str, Any]) -> str:
        """Return why the API server refuses the object; fail the test if it accepts it."""
        done = self.try_kubectl("create", "--dry-run=server", document=document)
        assert done.returncode != 0, f"accepted: {json.dumps(document)}"
        return done.stderr


def pytorch_job_definition() -> dict[str, Any]:
    """Return the definition of PyTorchJob as the training operator installs it."""
    return _definition(TRAINING_OPERATOR, "pytorchjobs.kubeflow.org")


def job_set_definition() -> dict[str, Any]:
    """Return the definition of JobSet as its controller's manifests install it."""
    return _definition(JOBSET, "jobsets.jobset.x-k8s.io")


def kueue_definitions(release: str) -> list[dict[str, Any]]:
    """Return the definitions of a release of Kueue, from its source: nothing has to be built for them.

    They lack the webhook that converts between versions, which belongs to Kueue's controller.
    """
    folder = BINARIES.source(KUEUES[release], "sigs.k8s.io/kueue") / "config" / "components" / "crd" / "bases"
    return [yaml.load(file.read_text(), yaml.CSafeLoader) for file in sorted(folder.glob("*.yaml"))]


def _definition(part: GoModule, name: str) -> dict[str, Any]:
    manifests = yaml.load_all(BINARIES.manifests(part).read_text(), yaml.CSafeLoader)
    found: dict[str, Any] = next(m for m in manifests if m["metadata"]["name"] == name)
    found.pop("status", None)
    return found


def start(folder: Path, running: ExitStack, *flags: str) -> ApiServer:
    """Start etcd and kube-apiserver, with further flags, and wait until they are ready."""
    peer_port, client_port, secure_port = _free_ports(3)
    etcd_url = f"http://127.0.0.1:{client_port}"
    running.enter_context(
        _program(
            folder / "etcd.log",
            BINARIES.path("etcd"),
            *("--data-dir", folder / "etcd", "--unsafe-no-fsync", "--log-level=warn"),
            *("--listen-client-urls", etcd_url, "--advertise-client-urls", etcd_url),
            *("--listen-peer-urls", f"http://127.0.0.1:{peer_port}"),
        )
    )
    key = folder / "service-accounts.key"
    key.write_bytes(
        ec.generate_private_key(ec.SECP256R1()).private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
        )
    )
    token = secrets.token_hex(16)
    tokens = folder / "tokens.csv"
    with tokens.open("w", newline="") as stream:
        csv.writer(stream).writerow([token, "admin", "admin", "system:masters"])
    policy, audit_log = folder / "audit-policy.yaml", folder / "audit.log"
    rules = [{"level": "None", "verbs": ["get", "list", "watch"]}, {"level": "Metadata"}]
    stages = {"omitStages": ["RequestReceived"]}
    policy.write_text(json.dumps({"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "rules": rules, **stages}))
    log = folder / "kube-apiserver.log"
    server = running.enter_context(
        _program(
            log,
            BINARIES.path("kube-apiserver"),
            *("--etcd-servers", etcd_url, "--bind-address=127.0.0.1", "--secure-port", str(secure_port)),
            *("--cert-dir", folder / "certificates", "--token-auth-file", tokens, "--authorization-mode=RBAC"),
            *("--service-account-issuer=https://kubernetes.default.svc", "--service-cluster-ip-range=10.96.0.0/16"),
            *("--service-account-key-file", key, "--service-account-signing-key-file", key),
            # Service accounts are made by a controller that does not run here; loopback is no address of an endpoint.
            *("--disable-admission-plugins=ServiceAccount", "--endpoint-reconciler-type=none"),
            *("--audit-policy-file", policy, "--audit-log-path", audit_log),
            *flags,
        )
    )
    url = f"https://127.0.0.1:{secure_port}"
    api = ApiServer(url=url, kubeconfig=folder / "kubeconfig", audit_log=audit_log, etcd_url=etcd_url)
    # Its self-signed serving certificate is its own authority.
    authority = folder / "certificates" / "apiserver.crt"
    api.kubeconfig.write_text(json.dumps(_kubeconfig(url, authority, token)))
    deadline = time.monotonic() + START_DEADLINE_SECONDS
    while not authority.exists() or api.try_kubectl("get", "--raw=/readyz").returncode != 0:
        shown = "\n".join(log.read_text().splitlines()[-15:])
        assert server.poll() is None, f"kube-apiserver ended at its start:\n{shown}"
        assert time.monotonic() < deadline, f"kube-apiserver: not ready within {START_DEADLINE_SECONDS:.0f} s:\n{shown}"
        time.sleep(0.3)
    return api


def _kubeconfig(url: str, authority: Path, token: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": url, "certificate-authority": str(authority)}}],
        "users": [{"name": "admin", "user": {"token": token}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
    }


@contextmanager
def _program(log: Path, *command: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program until the block ends or this process is killed."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=10)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
