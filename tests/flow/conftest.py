"""Fixture that runs a test once with each launcher."""

from __future__ import annotations

import flow_world
import pytest

from trainwright_operator.api.spec import LauncherKind


@pytest.fixture(params=list(LauncherKind))
def each_launcher(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LauncherKind:
    """Let every spec of the simulated world ask for the launcher."""
    kind: LauncherKind = request.param
    monkeypatch.setitem(flow_world.ASKED, "launcher", kind)
    return kind
