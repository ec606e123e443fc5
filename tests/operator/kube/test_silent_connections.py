"""Connections to the health endpoint that send nothing, or no whole request: they end, and nobody waits for them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from http.server import ThreadingHTTPServer

import pytest

from trainwright_operator.kube import health
from trainwright_operator.kube.health import Liveness

WITHIN_SECONDS = 15.0
Serve = Callable[[float], ThreadingHTTPServer]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Serve health checks with the given time for a request."""
    with ExitStack() as stack:

        def start(connection_seconds: float) -> ThreadingHTTPServer:
            monkeypatch.setattr(health, "_CONNECTION_SECONDS", connection_seconds)
            server = health.serve(0, Liveness())
            stack.callback(server.server_close)
            stack.callback(server.shutdown)
            return server

        yield start


def connection(server: ThreadingHTTPServer, sent: bytes = b"") -> socket.socket:
    made = socket.create_connection(("127.0.0.1", server.server_port), timeout=WITHIN_SECONDS)
    made.sendall(sent)
    return made


def check(server: ThreadingHTTPServer) -> int:
    """Return the status that the kubelet gets."""
    with closing(HTTPConnection("127.0.0.1", server.server_port, timeout=WITHIN_SECONDS)) as asking:
        asking.request("GET", "/healthz")
        return asking.getresponse().status


def test_checks_are_answered_beside_silent_connections(serve: Serve) -> None:
    server = serve(600.0)
    with ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(connection(server))
        assert [check(server) for _ in range(3)] == [200] * 3


@pytest.mark.parametrize("sent", [b"", b"GET /hea", b"GET /healthz HTTP/1.1\r\nHost: operator\r\n"])
def test_connection_without_a_whole_request_is_closed(serve: Serve, sent: bytes) -> None:
    before = set(threading.enumerate())
    server = serve(0.2)
    with connection(server, sent) as silent:
        assert silent.recv(1000) == b"", "the server closes it"
    for thread in set(threading.enumerate()) - before:
        if thread.name != "healthz":
            thread.join(WITHIN_SECONDS)
            assert not thread.is_alive(), "its thread has ended, too"
    assert check(server) == 200
