"""A watch that fails is heard of, and dead nodes cost nobody the lease: against an API server that answers by HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import kopf
import pytest
from kubernetes.config import kube_config
from prometheus_client import CollectorRegistry

from trainwright_operator.kube import api as api_module
from trainwright_operator.kube import watch as watch_module
from trainwright_operator.kube.api import ApiError, connect
from trainwright_operator.kube.health import Pulse
from trainwright_operator.kube.lease import Lease
from trainwright_operator.kube.reconciler import Reconciler
from trainwright_operator.kube.watch import Watch
from trainwright_operator.metrics import Metrics
from trainwright_operator.settings import Settings

KINDS = {
    "/api/v1": [("pods", "Pod", True), ("namespaces", "Namespace", False)],
    "/apis/trainwright.dev/v1alpha1": [("trainingplans", "TrainingPlan", True)],
    "/apis/kubeflow.org/v1": [("pytorchjobs", "PyTorchJob", True)],
}
WITHIN_SECONDS = 15.0


class Server(BaseHTTPRequestHandler):
    """An API server that refuses everything of the namespace `gone` and never gets a log from a kubelet.

    With `going` it lets namespaces be watched, and refuses only once that is set, which deletes the namespace.
    """

    protocol_version = "HTTP/1.1"
    asked: ClassVar[Counter[str]] = Counter()
    lease: ClassVar[dict[str, Any]] = {}
    closing = threading.Event()
    going: ClassVar[threading.Event | None] = None

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        self.asked[path] += 1
        if self.going is not None and path == "/api/v1/namespaces":
            self.namespaces(self.going, is_watch="watch=true" in query)
        elif "/namespaces/gone/" in path and self.going is not None and not self.going.is_set():
            if "watch=true" in query:
                self.going.wait()  # and its end is what the client gets
                self.close_connection = True
            else:
                self.say(self.discovered(path))
        elif "/namespaces/gone/" in path or path == "/api/v1/namespaces":
            self.say({"kind": "Status", "code": 403, "reason": "Forbidden", "message": f"{path} is forbidden"}, 403)
        elif path.endswith("/log") or "watch=true" in query:
            self.closing.wait()
            self.close_connection = True
        elif "/leases/" in path:
            self.say(self.lease)
        else:
            self.say(self.discovered(path))

    def namespaces(self, going: threading.Event, *, is_watch: bool) -> None:
        found = [{"metadata": {"name": name, "resourceVersion": "1"}} for name in ("gone", "team-a")]
        if not is_watch:
            self.say({"metadata": {"resourceVersion": "1"}, "items": found})
            return
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        going.wait()
        self.wfile.write(json.dumps({"type": "DELETED", "object": found[0]}).encode() + b"\n")
        self.closing.wait()

    def do_PUT(self) -> None:
        self.lease.update(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.say(self.lease)

    def discovered(self, path: str) -> dict[str, Any]:
        """What the server has, or else an empty list."""
        if path == "/api":
            return {"versions": ["v1"]}
        if path == "/apis":
            groups = [name.removeprefix("/apis/") for name in KINDS if name.startswith("/apis/")]
            versions = [{"groupVersion": group, "version": group.partition("/")[2]} for group in groups]
            names = [group.partition("/")[0] for group in groups]
            named = zip(names, versions, strict=True)
            return {"groups": [{"name": n, "versions": [v], "preferredVersion": v} for n, v in named]}
        verbs = ["get", "list", "watch", "patch"]
        if path in KINDS:
            kinds = [
                {"name": name, "singularName": "", "kind": kind, "namespaced": inside, "verbs": verbs}
                for name, kind, inside in KINDS[path]
            ]
            return {"resources": kinds}
        return {"metadata": {"resourceVersion": "1"}, "items": []}

    def say(self, body: dict[str, Any], code: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Nobody reads it."""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Server]]:
    """The API server that a kube config leads to."""
    Server.asked.clear()
    Server.lease.clear()
    Server.lease.update({"metadata": {"name": "trainwright-operator"}, "spec": {}})
    Server.closing.clear()
    Server.going = None
    http = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    http.daemon_threads = True
    threading.Thread(target=http.serve_forever, daemon=True).start()
    document = {
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{http.server_port}"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    (tmp_path / "config").write_text(json.dumps(document))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "config"))
    yield Server
    Server.closing.set()
    if Server.going is not None:
        Server.going.set()
    http.shutdown()
    http.server_close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kopf gives up soon, not after the 54 s of its default."""
    usual = watch_module.kopf_settings

    def soon() -> kopf.OperatorSettings:
        chosen = usual()
        chosen.networking.error_backoffs = (0.1,)
        return chosen

    monkeypatch.setattr(watch_module, "kopf_settings", soon)


async def end_of_watch(namespaces: tuple[str, ...], meanwhile: Callable[[Watch], None]) -> None:
    settings = Settings(namespaces=namespaces)
    watch = Watch(Reconciler(connect(), settings, Metrics(CollectorRegistry()), Pulse()), settings)
    watch.start()
    await asyncio.sleep(0.5)
    meanwhile(watch)
    await asyncio.wait_for(watch.ended(), WITHIN_SECONDS)
    for thread in threading.enumerate():
        if thread.name == "watch":
            await asyncio.to_thread(thread.join, WITHIN_SECONDS)
            assert not thread.is_alive()


IMPATIENT_OPERATOR = """
from trainwright_operator.kube import run, watch
usual = watch.kopf_settings
def soon():
    chosen = usual()
    chosen.networking.error_backoffs = (0.1,)
    return chosen
watch.kopf_settings = soon
raise SystemExit(run.main())
"""


def test_an_operator_whose_watch_is_refused_for_good_ends(server, tmp_path) -> None:
    def start() -> subprocess.Popen[str]:
        with socket.socket() as one, socket.socket() as two:
            for place in (one, two):
                place.bind(("127.0.0.1", 0))
            metrics, health = (str(place.getsockname()[1]) for place in (one, two))
        environment = os.environ | {
            "TRAINWRIGHT_WATCH_NAMESPACES": "gone,team-a",
            "TRAINWRIGHT_METRICS_PORT": metrics,
            "TRAINWRIGHT_HEALTH_PORT": health,
        }
        command = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-c", IMPATIENT_OPERATOR]
        return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)

    # One after another, for each takes the lease; more than one, for kopf hangs at its end only often.
    for _ in range(3):
        server.lease["spec"] = {}
        process = start()
        try:
            _, told = process.communicate(timeout=WITHIN_SECONDS)
        finally:
            process.kill()
        assert process.returncode == 70, told
        assert "ended by its watch: RuntimeError: APIForbiddenError" in told


def test_a_namespace_that_is_deleted_ends_no_watch_where_namespaces_may_be_read(server, impatient) -> None:
    server.going = threading.Event()

    def delete(watch: Watch) -> None:
        assert server.asked["/api/v1/namespaces/gone/pods"] == 2, "listed and watched"
        server.going.set()
        threading.Timer(3.0, watch.stop).start()

    asyncio.run(end_of_watch(("gone", "team-a"), delete))
    assert server.asked["/api/v1/namespaces/gone/pods"] <= 4, "it is left alone once it is gone"


def test_a_watch_that_is_told_to_end_ends_without_a_failure(server) -> None:
    asyncio.run(end_of_watch((), Watch.stop))
    assert server.asked["/apis/trainwright.dev/v1alpha1/trainingplans"]


def test_a_lease_is_renewed_while_every_other_thread_waits(server) -> None:
    async def story() -> str:
        api, over = connect(), threading.Event()
        threads = ThreadPoolExecutor(1)
        asyncio.get_running_loop().set_default_executor(threads)
        waiting = asyncio.create_task(asyncio.to_thread(over.wait))
        await asyncio.sleep(0.1)
        try:
            return await asyncio.wait_for(Lease(api, "default", "me", Pulse())._try(), WITHIN_SECONDS)
        finally:
            over.set()
            await waiting

    assert asyncio.run(story()) == "me"
    assert server.lease["spec"]["holderIdentity"] == "me"


def test_logs_of_dead_nodes_are_given_up_soon_and_hold_up_no_other_request(server, monkeypatch) -> None:
    monkeypatch.setattr(api_module, "_LOG_TIMEOUT_SECONDS", (5.0, 1.0))
    log = "/api/v1/namespaces/team-a/pods/worker-0/log"

    async def story() -> list[BaseException | str]:
        api = connect()
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        logs = asyncio.gather(*(api.get_text(log) for _ in range(8)), return_exceptions=True)
        await asyncio.sleep(0.2)
        assert await asyncio.wait_for(api.list("/api/v1/nodes"), 0.7) == []
        assert not logs.done()
        return await logs

    started = time.monotonic()
    answers = asyncio.run(story())
    assert all(isinstance(answer, ApiError) and answer.status == 0 for answer in answers)
    assert time.monotonic() - started < 4
    assert server.asked[log] == 8, "none is asked for a second time"
