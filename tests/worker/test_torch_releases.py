"""GPUs and drivers that a release of torch runs on, and one version of torch within a gang."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from packaging.requirements import Requirement

from trainwright.cluster import Device
from trainwright.worker_api import FailureReason
from trainwright_worker.device import choose_device
from trainwright_worker.gang.errors import WorkerError
from trainwright_worker.gang.rank_assignment import RankAssignment
from trainwright_worker.gang.version_check import check_versions, own_version, version_mismatch
from trainwright_worker.torch_releases import DEFAULT, NEWEST, OLDEST, RELEASES, kernel_problem, start_problem

ROOT = Path(__file__).resolve().parents[2]
GPUS = {
    "P100": (6, 0),
    "V100": (7, 0),
    "T4": (7, 5),
    "A100": (8, 0),
    "L4": (8, 9),
    "H200": (9, 0),
    "B200": (10, 0),
    "B300": (10, 3),
    "Jetson Thor": (11, 0),
    "RTX 5090": (12, 0),
    "GB10": (12, 1),
}
WITHOUT_KERNELS = {
    OLDEST: {"P100", "Jetson Thor"},
    DEFAULT: {"P100", "Jetson Thor"},
    NEWEST: {"P100", "V100", "Jetson Thor"},
}
OLD_DRIVER = (
    "The NVIDIA driver on your system is too old (found version {}). Please update your GPU driver by downloading and "
    "installing a new version from the URL: http://www.nvidia.com/Download/index.aspx Alternatively, go to: "
    "https://pytorch.org to install a PyTorch version that has been compiled with your version of the CUDA driver."
)


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.version)
def test_release_refuses_the_gpus_that_its_wheel_has_no_kernels_for(release) -> None:
    refused = {name for name, capability in GPUS.items() if kernel_problem("", name, capability, release.architectures)}
    assert refused == WITHOUT_KERNELS[release]


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ((8, 0), ["sm_86"], False),  # machine code runs from its minor version on
        ((8, 9), ["sm_80"], True),
        ((9, 0), ["sm_80"], False),
        ((9, 0), ["sm_70", "compute_80"], True),  # PTX is compiled for later GPUs
        ((7, 5), ["sm_70", "compute_80"], True),
        ((7, 0), ["sm_75", "compute_75"], False),
        ((9, 0), ["sm_90a"], True),
        ((10, 3), ["sm_100a"], False),
        ((10, 3), ["sm_100f"], True),
        ((12, 0), ["sm_100f"], False),
        ((12, 0), ["compute_100a"], False),
        ((9, 0), [], True),  # torch does not say
        ((9, 0), ["gfx90a"], True),
    ],
)
def test_gpu_runs_its_machine_code_and_older_ptx(capability, architectures, runs: bool) -> None:
    assert (kernel_problem("2.11.0", "GPU", capability, architectures) is None) == runs


def test_refusal_of_a_gpu_names_the_image_that_has_kernels_for_it() -> None:
    assert kernel_problem("2.11.0", "Tesla V100-SXM2-16GB", (7, 0), ("sm_75", "sm_80")) == (
        "torch 2.11.0 has no kernels for Tesla V100-SXM2-16GB (sm_70), only for sm_75, sm_80; use the worker image with "
        "torch 2.10.0 (docs/install.md)"
    )
    assert kernel_problem("2.10.0", "Tesla P100", (6, 0), DEFAULT.architectures).endswith(
        "; no supported release has; leave it out with spec.devices"
    )


@pytest.mark.parametrize(
    ("release", "error", "sentence"),
    [
        (
            NEWEST,
            OLD_DRIVER.format(12080),
            (
                "torch 2.13.0 needs a driver for CUDA 13.0, and the node's is for CUDA 12.8; update the driver to 580 or "
                "later, or use the worker image with torch 2.10.0 (docs/install.md)"
            ),
        ),
        (
            DEFAULT,
            OLD_DRIVER.format(11040),
            "torch 2.10.0 needs a driver for CUDA 12.8, and the node's is for CUDA 11.4; update the driver to 525 or later",
        ),
        (
            DEFAULT,
            "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU",
            (
                "torch 2.10.0 (CUDA 12.8) cannot start: Found no NVIDIA driver on your system; check the node's driver and "
                "the container runtime"
            ),
        ),
    ],
    ids=["newer torch", "default torch", "no driver"],
)
def test_refusal_of_a_driver_says_what_to_do(release, error: str, sentence: str) -> None:
    assert start_problem(release.version, release.cuda, error) == sentence


def test_process_is_refused_when_torch_has_no_kernels_for_its_gpu(make, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = {
        "init": lambda: None,
        "device_count": lambda: 1,
        "get_device_capability": lambda index: (7, 0),
        "get_device_name": lambda index: "Tesla V100",
        "get_arch_list": lambda: list(NEWEST.architectures),
    }
    for name, function in cuda.items():
        monkeypatch.setattr(torch.cuda, name, function)
    assignment = RankAssignment(Device("node-a", 0), 0, 0, 0, 1)
    with pytest.raises(
        WorkerError, match=r"^process 0 on node node-a has no usable GPU: torch \S+ has no ke"
    ) as refused:
        choose_device(make.gang(1, backend="nccl"), assignment)
    assert refused.value.reason is FailureReason.PLACEMENT_NOT_MET


def test_gang_is_refused_with_its_nodes_when_versions_differ() -> None:
    devices = [Device("node-a", 0), Device("node-a", 1), Device("node-b", 0)]
    store = dist.HashStore()
    own = own_version("nccl")
    store.set("1", own)
    store.set("2", "torch 2.9.1 with NCCL 2.27.5")
    with pytest.raises(WorkerError) as refused:
        check_versions(store, 0, devices, own)
    assert refused.value.reason is FailureReason.PLACEMENT_NOT_MET
    assert f"got {own} on node-a; torch 2.9.1 with NCCL 2.27.5 on node-b; use one" in refused.value.message
    assert version_mismatch([own] * 3, devices) is None


def test_releases_are_those_of_the_requirement_and_the_tested_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (wanted,) = (Requirement(line) for line in project["optional-dependencies"]["worker"])
    bounds = {one.operator: one.version for one in wanted.specifier}
    assert f"{bounds['>=']}.0" == OLDEST.version
    assert int(bounds["<"].split(".")[1]) - 1 == int(NEWEST.version.split(".")[1])
    pins = (ROOT / "deploy" / "development" / "constraints.txt").read_text(encoding="utf-8")
    assert f"\ntorch=={DEFAULT.version}\n" in pins


def test_image_takes_the_release_that_its_build_names(tmp_path: Path) -> None:
    dockerfile = (ROOT / "profiler-image" / "Dockerfile").read_text(encoding="utf-8")
    (command,) = re.findall(r"(?m)^ && (if .*; fi) \\$", dockerfile)
    constraints = tmp_path / "constraints.txt"
    tested = (ROOT / "deploy" / "development" / "constraints.txt").read_text(encoding="utf-8")
    constraints.write_text(tested, encoding="utf-8")
    script = command.replace("/constraints.txt", str(constraints))
    subprocess.run(["sh", "-c", script], env={"PATH": os.environ["PATH"], "TORCH": NEWEST.version}, check=True)
    kept, named = constraints.read_text(encoding="utf-8").splitlines()[:-1], tested.splitlines()
    left_out = [line for line in named if line not in kept]
    assert [line for line in left_out if not re.match("nvidia-|cuda-", line)] == [
        f"torch=={DEFAULT.version}",
        *(line for line in named if line.startswith(("torchvision==", "triton=="))),
    ]
    assert constraints.read_text(encoding="utf-8").endswith(f"\ntorch=={NEWEST.version}\n")


def test_installed_wheel_is_as_its_release_says() -> None:
    found = [one for one in RELEASES if torch.__version__.startswith(f"{one.version}+cu")]
    if not found:
        pytest.skip(f"torch {torch.__version__} is none of the wheels listed")
    assert torch.version.cuda == found[0].cuda
    assert tuple(torch._C._cuda_getArchFlags().split()) == found[0].architectures


def test_documentation_lists_the_releases() -> None:
    text = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    rows = re.findall(r"(?m)^\| ([\d.]+)(?: \(default\))? \| ([\d.]+) \| (\d+) \| ([^|]+) \|", text)
    listed = [
        (version, cuda, int(driver), tuple(f"sm_{part}" for part in parts.split()))
        for version, cuda, driver, parts in rows
    ]
    assert listed == [(one.version, one.cuda, one.driver, one.architectures) for one in RELEASES]
