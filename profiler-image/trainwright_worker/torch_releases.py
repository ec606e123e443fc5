"""Releases of torch that the worker supports, and the GPUs and drivers that their wheels run on; without torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

Capability = tuple[int, int]
"""Compute capability of a GPU, major and minor: (7, 0) is sm_70."""


@dataclass(frozen=True, slots=True)
class TorchRelease:
    """Release of torch, as the wheel for Linux on the Python package index.

    Attributes:
        driver: oldest branch of NVIDIA's driver that runs this CUDA.
        architectures: what the wheel has kernels for, in the notation of `torch.cuda.get_arch_list()`.
    """

    version: str
    cuda: str
    driver: int
    architectures: tuple[str, ...]


RELEASES = (
    TorchRelease("2.8.0", "12.8", 525, ("sm_70", "sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")),
    TorchRelease("2.10.0", "12.8", 525, ("sm_70", "sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")),
    TorchRelease("2.13.0", "13.0", 580, ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")),
)
"""The oldest release, the default one and the newest: those that the tests run on."""
OLDEST, DEFAULT, NEWEST = RELEASES

_ARCHITECTURE = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)")
_OLD_DRIVER = re.compile(r"driver on your system is too old \(found version (\d+)\)")


def kernel_problem(torch_version: str, gpu: str, capability: Capability, architectures: Iterable[str]) -> str | None:
    """Return why torch cannot compute on a GPU, and what to do, as one sentence; None if it can or does not say."""
    kernel_architectures = [name for name in architectures if _ARCHITECTURE.fullmatch(name)]
    if not kernel_architectures or _has_kernels(capability, kernel_architectures):
        return None
    suited = [release for release in (DEFAULT, NEWEST, OLDEST) if _has_kernels(capability, release.architectures)]
    remedy = _use(suited[0]) if suited else "no supported release has; leave it out with spec.devices"
    major, minor = capability
    return f"torch {torch_version} has no kernels for {gpu} (sm_{major}{minor}), only for {', '.join(kernel_architectures)}; {remedy}"


def start_problem(torch_version: str, cuda: str | None, error: str) -> str:
    """Return why torch cannot start CUDA, and what to do, as one sentence, from torch's own error."""
    if match := _OLD_DRIVER.search(error):
        driver_cuda = int(match[1]) // 1000, int(match[1]) % 1000 // 10
        needed = next((release.driver for release in reversed(RELEASES) if release.cuda == cuda), None)
        newer = f" to {needed} or later" if needed else ""
        suited = [release for release in (DEFAULT, OLDEST) if _major(release.cuda) <= driver_cuda[0]]
        other = f", or {_use(suited[0])}" if suited else ""
        return (
            f"torch {torch_version} needs a driver for CUDA {cuda}, and the node's is for CUDA "
            f"{driver_cuda[0]}.{driver_cuda[1]}; update the driver{newer}{other}"
        )
    reason = " ".join(error.split()).split(". ")[0].rstrip(".")
    return (
        f"torch {torch_version} (CUDA {cuda}) cannot start: {reason}; check the node's driver and the container runtime"
    )


def _has_kernels(capability: Capability, architectures: Iterable[str]) -> bool:
    """Return whether a GPU runs any of the architectures.

    Machine code runs on its own major version from its minor version on; PTX is compiled for any later GPU. The suffix
    `a` means this very GPU, `f` its family.
    """
    for name in architectures:
        if (match := _ARCHITECTURE.fullmatch(name)) is None:
            continue
        kind, major, minor, suffix = match.groups()
        target = int(major), int(minor)
        is_later = target <= capability and (target[0] == capability[0] or (kind == "compute" and not suffix))
        if capability == target or (is_later and suffix != "a"):
            return True
    return False


def _use(release: TorchRelease) -> str:
    return f"use the worker image with torch {release.version} (docs/install.md)"


def _major(version: str) -> int:
    return int(version.partition(".")[0])
