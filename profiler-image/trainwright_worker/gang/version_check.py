"""Check that all ranks of a gang have one version of torch and NCCL, since others hang or compute differently."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trainwright.cluster import Device
from trainwright.worker_api import FailureReason
from trainwright_worker.gang.errors import WorkerError


def check_versions(store: Any, rank: int, devices: Sequence[Device], own: str) -> None:
    """Exchange versions through the store. Raises WorkerError on all ranks if they differ.

    Args:
        store: the gang's, of this check alone.
        rank: of this process.
        devices: all devices of the gang, by rank.
        own: this process's version.
    """
    store.set(str(rank), own)
    versions = store.multi_get([str(other) for other in range(len(devices))])
    if problem := version_mismatch([version.decode() for version in versions], devices):
        raise WorkerError(FailureReason.PLACEMENT_NOT_MET, problem)


def own_version(backend: str) -> str:
    """Return this process's versions: `torch 2.10.0 with NCCL 2.27.5`, without NCCL if it is not used."""
    version = f"torch {torch.__version__.partition('+')[0]}"
    if backend != "nccl":
        return version
    parts = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return f"{version} with NCCL {'.'.join(map(str, parts))}"


def version_mismatch(versions: Sequence[str], devices: Sequence[Device]) -> str | None:
    """Return the versions and their nodes in one sentence; None if all ranks have the same."""
    nodes: dict[str, dict[str, None]] = {}
    for version, device in zip(versions, devices, strict=True):
        nodes.setdefault(version, {})[device.node] = None
    if len(nodes) == 1:
        return None
    version_list = "; ".join(f"{version} on {', '.join(names)}" for version, names in nodes.items())
    return (
        f"the ranks of a gang need one version of torch and NCCL, got {version_list}; use one worker image on all nodes"
    )
