"""Nothing is written without the lease: not before it is held, not after a pause of the process, not while it is released."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from contextlib import closing
from http.client import HTTPConnection
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from trainwright_operator.kube import lease as lease_module
from trainwright_operator.kube import main
from trainwright_operator.kube.client import Api, ApiError, TimedClient
from trainwright_operator.kube.health import Liveness
from trainwright_operator.kube.lease import DURATION_SECONDS, Lease, LeaseLost
from trainwright_operator.kube.reconciler import Reconciler
from trainwright_operator.kube.write_guard import WRITE_SECONDS, NotLeading, WriteGuard
from trainwright_operator.metrics import Metrics
from trainwright_operator.settings import Settings


class Ended(BaseException):
    """Stand-in for the process's exit."""


class Slow:
    """Slow API server that counts requests."""

    def __init__(self, *_: Any) -> None:
        self.asked = 0

    async def get(self, path: str, **query: str) -> Any:
        self.asked += 1
        await asyncio.sleep(60)


class Clock:
    """Clock that only tests move."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Leases:
    """API server with one lease, for clients that share a clock; `cut_off`: no answers."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.cut_off = False

    def request(self, method: str, path: str, body: Any, query: dict[str, str]) -> bytes:
        if self.cut_off:
            raise ApiError(0, "no route")
        if method == "GET" and self.lease is None:
            raise ApiError(404, "no lease")
        if method == "GET":
            return json.dumps(self.lease).encode()
        version = int((self.lease or {}).get("metadata", {}).get("resourceVersion", 0))
        if self.lease is not None and int(body["metadata"].get("resourceVersion", -1)) != version:
            raise ApiError(409, "conflict")
        self.lease = json.loads(json.dumps(body))
        self.lease["metadata"]["resourceVersion"] = str(version + 1)
        return b"{}"


class Holder:
    """One operator's lease, stepped by the test."""

    def __init__(self, leases: Leases, clock: Clock, identity: str) -> None:
        self.guard = WriteGuard(clock)
        settings = Settings(identity=identity)
        self.lease = Lease(
            cast(TimedClient, leases),
            settings,
            self.guard,
            pulse=Liveness(),
            acquired=lambda: None,
            lost=lambda _: None,
        )

    def try_once(self) -> str:
        return self.lease._acquire_or_renew()

    @property
    def may_write(self) -> bool:
        try:
            with self.guard.write():
                return True
        except NotLeading:
            return False


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(lease_module, "boot_time", clock)
    return clock


def test_no_write_is_sent_before_the_lease_is_held(clock: Clock) -> None:
    assert not Holder(Leases(), clock, "a").may_write


def test_two_holders_never_write_at_one_time(clock: Clock) -> None:
    """The first one is cut off at every moment between two renewals; the second one polls at every phase."""
    for cut_after in range(3):
        for phase in range(3):
            leases = Leases()
            first, second = Holder(leases, clock, "a"), Holder(leases, clock, "b")
            assert first.try_once() == "a"
            clock.now += phase
            assert second.try_once() == "a"
            clock.now += cut_after
            first.try_once()
            last_renewal = clock.now
            taken_over = 0.0
            for _ in range(4 * (DURATION_SECONDS + 5)):
                clock.now += 0.25
                if clock.now - last_renewal >= 1 and second.try_once() == "b":
                    taken_over = taken_over or clock.now - last_renewal
                assert not (first.may_write and second.may_write)
            assert DURATION_SECONDS <= taken_over <= DURATION_SECONDS + 5


def test_process_that_was_stopped_does_not_take_its_lease_back(clock: Clock) -> None:
    leases, lost = Leases(), []
    holder = Holder(leases, clock, "a")
    holder.lease._lost = lost.append
    holder.lease._stop = cast(threading.Event, OneRound(lambda: setattr(clock, "now", clock.now + WRITE_SECONDS + 1)))
    holder.lease._run()
    assert isinstance(lost[0], LeaseLost)
    assert not holder.may_write
    renewed = leases.lease
    assert renewed is not None
    assert renewed["metadata"]["resourceVersion"] == "1"


class OneRound:
    """Event on which the process is stopped for a while."""

    def __init__(self, stopped: Callable[[], None]) -> None:
        self._stopped = stopped

    def is_set(self) -> bool:
        return False

    def wait(self, seconds: float) -> bool:
        self._stopped()
        return False


def test_renewal_counts_from_its_start(clock: Clock) -> None:
    leases = Leases()
    holder = Holder(leases, clock, "a")
    answer = leases.request

    def late(method: str, *request: Any) -> bytes:
        clock.now += 4
        return answer(method, *request)

    leases.request = late  # type: ignore[method-assign]
    holder.try_once()
    assert holder.guard.seconds_left == pytest.approx(WRITE_SECONDS - 8)


def test_lease_is_lost_when_another_one_holds_it(clock: Clock) -> None:
    leases, lost = Leases(), []
    holder = Holder(leases, clock, "a")
    holder.try_once()
    leases.lease["spec"]["holderIdentity"] = "b"  # type: ignore[index]
    holder.lease._lost = lost.append
    holder.lease._wait = lambda: True  # type: ignore[method-assign]
    holder.lease._stop = cast(threading.Event, OneRound(lambda: None))
    holder.lease._run()
    assert str(lost[0]) == "held by b"


def test_closing_waits_for_writes_under_way_and_refuses_new_ones(clock: Clock) -> None:
    guard = WriteGuard(clock)
    guard.renewed(clock.now)
    with guard.write() as left:
        assert left == WRITE_SECONDS
        assert not guard.close(timeout=0.01)
        with pytest.raises(NotLeading, match="stopping"), guard.write():
            pass
    assert guard.close(timeout=0.01)


def test_operator_exits_when_acquiring_the_lease_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    left = threading.Event()

    def fail(lease: Lease) -> bool:
        raise KeyError("spec")

    def leave(code: int) -> None:
        ended.append(code)
        left.set()
        raise Ended(code)  # ends the lease's thread, as the exit ends the process

    monkeypatch.setattr(Lease, "_wait", fail)
    monkeypatch.setattr(main, "connect", Slow)
    monkeypatch.setattr(main, "connect_for_lease", lambda _: Leases())
    monkeypatch.setattr(main, "start_http_server", lambda port, registry: None)
    monkeypatch.setattr(main.health, "serve", lambda port, pulse: None)
    monkeypatch.setattr(main.os, "_exit", leave)
    monkeypatch.setattr(main, "Reconciler", lambda *_: pytest.fail("it works without the lease"))
    monkeypatch.setattr(threading, "excepthook", lambda _: None)

    async def story() -> None:
        running = asyncio.create_task(main._run(Settings()))
        await asyncio.to_thread(left.wait)
        running.cancel()

    asyncio.run(asyncio.wait_for(story(), 15))
    assert ended == [main._BROKEN_EXIT_CODE]


def test_stopped_reconciler_starts_no_reconciliation() -> None:
    async def story() -> tuple[int, int]:
        api = Slow()
        reconciler = Reconciler(cast(Api, api), Settings(), Metrics(CollectorRegistry()), Liveness())
        reconciler.wake("default", "demo")
        await asyncio.sleep(0.05)
        before = api.asked
        reconciler.wake("default", "demo")  # a plan's end would start a new pass
        await reconciler.stop()
        reconciler.wake("default", "other")
        await asyncio.sleep(0.05)
        return before, api.asked

    assert asyncio.run(story()) == (1, 1)


def test_operator_is_unhealthy_while_a_pass_hangs_though_lists_succeed() -> None:
    clock = Clock()
    pulse = Liveness(clock)

    async def story() -> None:
        reconciler = Reconciler(cast(Api, Slow()), Settings(), Metrics(CollectorRegistry()), pulse)
        reconciler.wake("default", "demo")
        await asyncio.sleep(0.05)
        for _ in range(11):
            clock.now += 60
            pulse.record_success()  # as a list of all plans does
        assert not pulse.is_healthy
        await reconciler.stop()
        assert pulse.is_healthy

    asyncio.run(story())
    clock.now += 121
    assert not pulse.is_healthy


@pytest.mark.parametrize("is_healthy", [True, False])
def test_health_endpoint_tells_the_kubelet(is_healthy: bool) -> None:
    clock = Clock()
    pulse = Liveness(clock)
    server = main.health.serve(0, pulse)
    try:
        clock.now += 0 if is_healthy else 121
        with closing(HTTPConnection("127.0.0.1", server.server_port, timeout=5)) as connection:
            connection.request("GET", "/healthz")
            assert connection.getresponse().status == (200 if is_healthy else 503)
    finally:
        server.shutdown()
        server.server_close()


def test_only_waiting_for_the_lease_counts_as_healthy(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A renewed lease says nothing of a reconciler that hangs."""

    class Counting(Liveness):
        beats = 0

        def record_success(self) -> None:
            self.beats += 1

    leases, pulse = Leases(), Counting()
    leases.cut_off = True
    holder = Holder(leases, clock, "a")
    holder.lease._liveness = pulse
    rounds: list[int] = []

    class Rounds(OneRound):
        def wait(self, seconds: float) -> bool:
            rounds.append(pulse.beats)
            leases.cut_off = len(rounds) < 3
            return len(rounds) == 6

    holder.lease._stop = cast(threading.Event, Rounds(lambda: None))
    holder.lease._run()
    assert rounds == [1, 2, 3, 4, 4, 4]
