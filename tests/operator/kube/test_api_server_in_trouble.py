"""Failing watches are noticed and dead nodes cost no lease, against an API server that answers by HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import kopf
import pytest
from flow_server import Server
from kubernetes.config import kube_config
from prometheus_client import CollectorRegistry

from trainwright_operator.kube import client as client_module
from trainwright_operator.kube import watch as watch_module
from trainwright_operator.kube.client import ApiError, connect, connect_for_lease
from trainwright_operator.kube.health import Liveness
from trainwright_operator.kube.lease import Lease
from trainwright_operator.kube.reconciler import Reconciler
from trainwright_operator.kube.watch import KopfWatch, watch_forever
from trainwright_operator.kube.write_guard import WriteGuard
from trainwright_operator.metrics import Metrics
from trainwright_operator.settings import Settings

WITHIN_SECONDS = 15.0


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Server]]:
    """Start an API server that a kube config points to."""
    Server.asked.clear()
    Server.lease.clear()
    Server.lease.update({"metadata": {"name": "trainwright-operator"}, "spec": {}})
    Server.closing.clear()
    Server.going = None
    Server.refused = "/namespaces/gone/"
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
    """Shorten kopf's default retry time of 54 s."""
    usual = watch_module.kopf_settings

    def soon() -> kopf.OperatorSettings:
        chosen = usual()
        chosen.networking.error_backoffs = (0.1,)
        return chosen

    monkeypatch.setattr(watch_module, "kopf_settings", soon)


async def until_asked(server: type[Server], path: str, times: int = 2, task: asyncio.Task[None] | None = None) -> None:
    """Wait until the path was requested `times` times, while the task goes on."""
    deadline = time.monotonic() + WITHIN_SECONDS
    while server.asked[path] < times:
        assert time.monotonic() < deadline, server.asked
        assert task is None or not task.done(), task
        await asyncio.sleep(0.05)


async def end_of_watch(
    server: type[Server], begun: str, namespaces: tuple[str, ...], meanwhile: Callable[[KopfWatch], None]
) -> None:
    """Call `meanwhile` once path `begun` was listed and watched, then expect the watch and its thread to end."""
    others = set(threading.enumerate())
    settings = Settings(namespaces=namespaces)
    watch = KopfWatch(
        Reconciler(connect(WriteGuard(), "me"), settings, Metrics(CollectorRegistry()), Liveness()), settings
    )
    watch.start()
    await until_asked(server, begun)
    meanwhile(watch)
    await asyncio.wait_for(watch.ended(), WITHIN_SECONDS)
    for thread in set(threading.enumerate()) - others:
        if thread.name == "watch":
            await asyncio.to_thread(thread.join, WITHIN_SECONDS)
            assert not thread.is_alive()


IMPATIENT_OPERATOR = """
from trainwright_operator.kube import main, watch
usual = watch.kopf_settings
def soon():
    chosen = usual()
    chosen.networking.error_backoffs = (0.1,)
    return chosen
watch.kopf_settings = soon
raise SystemExit(main.main())
"""


def test_operator_exits_when_its_watch_is_forbidden(server, tmp_path) -> None:
    server.refused = "/namespaces/gone/pods"

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

    # Sequentially, since each takes the lease; repeatedly, since kopf hangs at its end only often.
    for _ in range(3):
        server.lease["spec"] = {}
        process = start()
        try:
            _, told = process.communicate(timeout=WITHIN_SECONDS)
        finally:
            process.kill()
        assert process.returncode == 70, told
        assert "the task 'watch' ended: RuntimeError: APIForbiddenError" in told


def test_watch_continues_when_a_readable_namespace_is_deleted(server, impatient) -> None:
    server.going = threading.Event()

    def delete(watch: KopfWatch) -> None:
        server.going.set()
        threading.Timer(3.0, watch.stop).start()

    pods = "/api/v1/namespaces/gone/pods"
    asyncio.run(end_of_watch(server, pods, ("gone", "team-a"), delete))
    assert server.asked[pods] <= 4, "it is left alone once it is gone"


@asynccontextmanager
async def watching(*namespaces: str) -> AsyncIterator[asyncio.Task[None]]:
    """Run an operator's watch of these namespaces, and stop it afterwards."""
    api, settings = connect(WriteGuard(), "me"), Settings(namespaces=namespaces)
    reconciler = Reconciler(api, settings, Metrics(CollectorRegistry()), Liveness())
    task = asyncio.create_task(watch_forever(api, reconciler, settings))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})


async def asked_for(server: type[Server], path: str, task: asyncio.Task[None], times: int = 2) -> None:
    """Wait until the path was requested `times` more times: kopf lists and then watches it."""
    server.asked.clear()
    await until_asked(server, path, times, task)


def test_namespace_is_watched_only_while_readable(server, impatient, monkeypatch, caplog) -> None:
    monkeypatch.setattr(watch_module, "RECHECK_SECONDS", 0.2)
    caplog.set_level(logging.INFO, watch_module.__name__)
    gone, other = (f"/api/v1/namespaces/{name}/pods" for name in ("gone", "team-a"))

    async def story() -> None:
        async with watching("gone", "team-a") as task:
            await asked_for(server, other, task)
            assert not server.asked[gone]
            server.refused = "nothing"
            await asked_for(server, gone, task)
            server.refused = "/namespaces/gone/"
            await asked_for(server, other, task)
            assert not server.asked[gone]

    asyncio.run(story())
    told = [record.getMessage() for record in caplog.records if record.name == watch_module.__name__]
    assert told == ["watching namespaces: gone, team-a", "watching namespaces: team-a"]


def test_no_namespace_is_watched_when_none_is_readable(server, monkeypatch) -> None:
    monkeypatch.setattr(watch_module, "RECHECK_SECONDS", 0.1)

    async def story() -> None:
        async with watching("gone") as task:
            await asked_for(server, "/apis/trainwright.dev/v1alpha1/namespaces/gone/trainingplans", task, times=4)

    asyncio.run(story())
    assert not [path for path in server.asked if path.endswith(("/pods", "/v1alpha1/trainingplans"))]


def test_other_namespaces_stay_watched_when_one_becomes_unreadable(server, impatient, monkeypatch) -> None:
    asked = iter([("gone", "team-a")])

    async def readable(*_: Any, **__: Any) -> tuple[str, ...]:
        return next(asked, ("team-a",))

    monkeypatch.setattr(watch_module, "_readable", readable)

    async def story() -> None:
        async with watching("gone", "team-a") as task:
            # Listed and watched by the first watch, and listed by the next.
            await asked_for(server, "/api/v1/namespaces/team-a/pods", task, times=3)

    asyncio.run(story())
    assert server.asked["/api/v1/namespaces/gone/pods"] <= 2, "asked, and once more, by the first watch alone"


def test_stopped_watch_ends_without_an_error(server) -> None:
    asyncio.run(end_of_watch(server, "/apis/trainwright.dev/v1alpha1/trainingplans", (), KopfWatch.stop))


def test_lease_is_held_without_any_event_loop(server) -> None:
    acquired, guard = threading.Event(), WriteGuard()
    settings = Settings(identity="me")
    lease = Lease(connect_for_lease("me"), settings, guard, pulse=Liveness(), acquired=acquired.set, lost=pytest.fail)
    lease.start()
    assert acquired.wait(WITHIN_SECONDS)
    assert server.lease["spec"]["holderIdentity"] == "me"
    assert guard.seconds_left > 0
    lease.stop()


def test_logs_of_dead_nodes_time_out_without_blocking_other_requests(server, monkeypatch) -> None:
    monkeypatch.setattr(client_module, "_LOG_TIMEOUT_SECONDS", (5.0, 1.0))
    log = "/api/v1/namespaces/team-a/pods/worker-0/log"

    async def story() -> list[BaseException | str]:
        api = connect(WriteGuard(), "me")
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
