"""The description that people edit, and folders that a test may fill."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from local_cluster.config import ClusterConfig, read_config
from local_cluster.paths import Folders, project_root

DESCRIPTION = """
name: rehearsal
accelerators:
  emulated-fast: {memoryMiB: 16384, flopsPerSecond: 1.2e9, floorSeconds: 0.002, updatedParametersPerSecond: 5.0e7}
nodes:
  - {name: left, accelerator: emulated-fast, devices: 2, link: 40mbit}
  - {name: right, accelerator: emulated-fast, devices: 4, link: 200mbit}
"""

Read = Callable[[str], ClusterConfig]


@pytest.fixture
def description() -> str:
    return DESCRIPTION


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def from_text(text: str) -> ClusterConfig:
        file = tmp_path / "cluster.yaml"
        file.write_text(text)
        return read_config(file)

    return from_text


@pytest.fixture
def shape(read: Read) -> ClusterConfig:
    return read(DESCRIPTION)


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders(project_root(), tmp_path / "cache", "rehearsal")
