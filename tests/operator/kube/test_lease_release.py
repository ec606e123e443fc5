"""Release of the lease at the operator's end: after the last write under way, or not at all."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest

from trainwright_operator.kube import client, main
from trainwright_operator.kube.client import Api, ApiError, TimedClient
from trainwright_operator.kube.health import Liveness
from trainwright_operator.kube.lease import Lease
from trainwright_operator.kube.write_guard import WriteGuard, boot_time
from trainwright_operator.settings import Settings

JOB = "/apis/kubeflow.org/v1/namespaces/default/pytorchjobs/gang"
WITHIN_SECONDS = 15.0


class Server:
    """API server with a lease, which keeps one write waiting; its `order` tells what came to its end, and when."""

    def __init__(self, holder: str = "me") -> None:
        self.lease = {"metadata": {"name": "trainwright-operator"}, "spec": {"holderIdentity": holder}}
        self.began, self.may_end = threading.Event(), threading.Event()
        self.order: list[str] = []

    def write(self, *request: Any) -> bytes:
        """Answer a write of a pass."""
        self.began.set()
        assert self.may_end.wait(WITHIN_SECONDS)
        self.order.append("written")
        return b"{}"

    def request(self, method: str, path: str, body: Any, query: dict[str, str]) -> bytes:
        """Answer a request of the lease's own client."""
        if method == "PUT":
            self.lease = body
            self.order.append("released" if not body["spec"]["holderIdentity"] else "renewed")
        return json.dumps(self.lease).encode()


class ImpatientGuard(WriteGuard):
    """Guard that soon gives up waiting for writes."""

    def close(self, timeout: float = 0.0) -> bool:
        return super().close(0.05)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    found = Server()
    monkeypatch.setattr(client.TimedClient, "request", found.write)
    yield found
    found.may_end.set()


def lease_on(server: Server, guard: WriteGuard) -> Lease:
    """Return a lease whose thread renews nothing: it has ended."""
    made = Lease(
        cast(TimedClient, server),
        Settings(identity="me"),
        guard,
        pulse=Liveness(),
        acquired=lambda: None,
        lost=lambda error: pytest.fail(str(error)),
    )
    made._wait = lambda: False  # type: ignore[method-assign]
    made.start()
    return made


def test_lease_is_released_after_the_last_write_of_a_cancelled_pass(server: Server) -> None:
    """A request goes on in its thread where the pass that sent it is cancelled."""
    guard = WriteGuard()
    guard.renewed(boot_time())

    async def story() -> None:
        api = Api(cast(Any, None), cast(Any, None), guard)
        a_pass = asyncio.create_task(api.delete(JOB, uid="uid-read"))
        assert await asyncio.to_thread(server.began.wait, WITHIN_SECONDS)
        a_pass.cancel()
        await asyncio.wait({a_pass})
        end = asyncio.create_task(asyncio.to_thread(main._hand_over, lease_on(server, guard), guard))
        done, _ = await asyncio.wait({end}, timeout=0.3)
        assert not done
        assert server.order == []
        with pytest.raises(ApiError, match="not sent: the operator is stopping"):
            await api.create("/api/v1/namespaces/default/configmaps", {})
        server.may_end.set()
        await asyncio.wait_for(end, WITHIN_SECONDS)

    asyncio.run(story())
    assert server.order == ["written", "released"]
    assert server.lease["spec"]["holderIdentity"] == ""


def test_lease_is_left_to_expire_while_a_write_hangs(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    guard = ImpatientGuard()
    guard.renewed(boot_time())

    async def story() -> None:
        api = Api(cast(Any, None), cast(Any, None), guard)
        writing = asyncio.create_task(api.delete(JOB, uid="uid-read"))
        assert await asyncio.to_thread(server.began.wait, WITHIN_SECONDS)
        await asyncio.to_thread(main._hand_over, lease_on(server, guard), guard)
        assert server.lease["spec"]["holderIdentity"] == "me"
        server.may_end.set()
        await writing

    asyncio.run(story())
    assert server.order == ["written"]
    assert "the lease is left to expire" in caplog.text


def test_lease_of_another_operator_is_not_released() -> None:
    server, guard = Server(holder="another"), WriteGuard()
    main._hand_over(lease_on(server, guard), guard)
    assert server.order == []
    assert server.lease["spec"]["holderIdentity"] == "another"
