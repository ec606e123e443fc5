"""Calls of kubectl: repeated while an API server is too busy to greet, and by no other failure."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainwright_operator.kubectl import client
from trainwright_operator.kubectl.client import ATTEMPTS, Kubectl, KubectlError

BUSY = "Unable to connect to the server: net/http: TLS handshake timeout"


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a kubectl first on PATH that fails as often as `failures` says, with `message`, and counts its calls."""
    script = (
        f'cd {tmp_path}; echo >> calls; [ "$(wc -l < calls)" -gt "$(cat failures)" ] || {{ cat message >&2; exit 1; }}'
    )
    program = tmp_path / "kubectl"
    program.write_text(f"#!/bin/sh\n{script}\necho '{{}}'\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(client, "RETRY_SECONDS", 0.0)
    return tmp_path


@pytest.mark.parametrize(
    ("failures", "message", "made", "succeeds"),
    [
        (0, BUSY, 1, True),
        (ATTEMPTS - 1, BUSY, ATTEMPTS, True),
        (ATTEMPTS, BUSY, ATTEMPTS, False),
        (1, 'trainingplans "a" not found', 1, False),
    ],
)
def test_busy_server_is_asked_again(calls: Path, failures: int, message: str, made: int, succeeds: bool) -> None:
    (calls / "failures").write_text(str(failures), encoding="utf-8")
    (calls / "message").write_text(message, encoding="utf-8")
    if succeeds:
        assert Kubectl().get_plan("a") == {}
    else:
        with pytest.raises(KubectlError, match=message.partition(":")[0]):
            Kubectl().get_plan("a")
    assert len((calls / "calls").read_text(encoding="utf-8").splitlines()) == made
