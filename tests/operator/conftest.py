"""Fixture that runs a test once with each launcher, and in a queue."""

from __future__ import annotations

import flow_world
import pytest

from trainwright_operator.api.spec import LauncherKind

_QUEUED = {"launcher": LauncherKind.JOB_SET, "queueName": "research"}


@pytest.fixture(params=[*({"launcher": kind} for kind in LauncherKind), _QUEUED], ids=[*LauncherKind, "queue"])
def each_launcher(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LauncherKind:
    """Let every spec of the simulated world ask for the launcher, or for a queue."""
    for field, value in request.param.items():
        monkeypatch.setitem(flow_world.ASKED, field, value)
    kind: LauncherKind = request.param["launcher"]
    return kind
