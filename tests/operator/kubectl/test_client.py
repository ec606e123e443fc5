"""Calls of kubectl: repeated while an API server is too busy to greet, and by no other failure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from trainwright_operator.kubectl import client
from trainwright_operator.kubectl.client import ATTEMPTS, Kubectl, KubectlError

BUSY = "Unable to connect to the server: net/http: TLS handshake timeout"
Cluster = Callable[..., Path]


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "RETRY_SECONDS", 0.0)


@pytest.mark.parametrize(
    ("failures", "message", "made", "succeeds"),
    [
        (0, BUSY, 1, True),
        (ATTEMPTS - 1, BUSY, ATTEMPTS, True),
        (ATTEMPTS, BUSY, ATTEMPTS, False),
        (1, 'trainingplans "a" not found', 1, False),
    ],
)
def test_busy_server_is_asked_again(cluster: Cluster, failures: int, message: str, made: int, succeeds: bool) -> None:
    calls = cluster({}, error=message, failures=failures) / "calls"
    if succeeds:
        assert Kubectl().get_plan("a") == {}
    else:
        with pytest.raises(KubectlError, match=message.partition(":")[0]):
            Kubectl().get_plan("a")
    assert len(calls.read_text(encoding="utf-8").splitlines()) == made
