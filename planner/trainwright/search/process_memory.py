"""Memory of a GPU that plans leave to the process and to fragments, where neither runtime nor profiles state it."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from trainwright.accelerators.data_sheets import data_sheet, has_data_sheet
from trainwright.cluster import Cluster, is_cpu
from trainwright.runtime import ProcessBytes, Runtime

UNKNOWN_MEMORY_RATIO: Final = 0.08
"""Share of a device's memory for communicators and fragments, where profiles measured what a process holds without communicators."""
ASSUMED_FRAGMENTS_RATIO: Final = 0.05
"""Share of a device's memory besides the process that is assumed: peaks of our worker's allocator were 2 to 5 % above their
predictions on H100 and H200 (docs/accuracy.md). The 8 % of other trainers' peaks, as nvidia-smi shows them, hold blocks that
the allocator frees before it fails."""
_MIN_CONTEXT_BYTES: Final = 256 * 2**20
"""Bytes of a GPU that a process takes at least outside of its allocator: a CUDA context with its kernels takes more."""
_ASSUMED_BYTES: Final = 2_000_000_000
"""Bytes of a GPU that a process of an unknown trainer holds besides its tensors: what Sailor states for Megatron and DeepSpeed
without tensor degrees (https://github.com/eth-easl/sailor). On A100 a communicator holds 0.54 to 0.69 GB of buffers
(NVIDIA/nccl#964), and there are two, of stages and of replicas."""
_ASSUMED_BYTES_BY_GENERATION: Final = {"volta": 1_000_000_000, "turing": 600_000_000}
"""Bytes on older GPUs: 0.4 GB of context with PyTorch's kernels, measured on a p3.8xlarge (pytorch/pytorch#20532), and two
communicators. Their buffers grow with the number of channels, thus with the bandwidth between GPUs (NVIDIA/nccl#864): V100s have
half of an A100's NVLink, and over PCIe a peer took 0.11 GB (NVIDIA/nccl#34). That T4 and RTX have no NVLink is assumed."""


def assumed_process_bytes(accelerator: str) -> int:
    """Return the bytes that a process of an unknown trainer is assumed to hold besides its tensors."""
    generation = data_sheet(accelerator).generation if has_data_sheet(accelerator) else ""
    return _ASSUMED_BYTES_BY_GENERATION.get(generation, _ASSUMED_BYTES)


def is_assumed(process_bytes: ProcessBytes) -> bool:
    """Return whether a runtime's memory of a process is the assumption rather than a measurement."""
    return process_bytes.held_bytes == assumed_process_bytes(process_bytes.accelerator)


def assuming_process_memory(runtime: Runtime, cluster: Cluster, origin: str) -> Runtime:
    """Return the runtime with the memory of an unknown process on GPUs of which it states none, for profiles that are estimated.

    `origin`: of the profiles.
    """
    if _states_memory(runtime) or origin != "estimated":
        return runtime
    stated = {process_bytes.accelerator for process_bytes in runtime.process_bytes}
    names = [a.name for a in cluster.accelerators if a.emulation is None and not is_cpu(a.name)]
    assumed = (ProcessBytes(name, assumed_process_bytes(name)) for name in names if name not in stated)
    return replace(runtime, process_bytes=(*runtime.process_bytes, *assumed))


def unknown_memory_ratio(runtime: Runtime, cluster: Cluster) -> float:
    """Return the share of every device's memory that plans leave free for what the runtime does not state.

    That is what fragments where its constant bytes can be all that a process holds: calibration fits fewer to peaks of the
    allocator alone. What profiles measured is all of it on a single device, since processes that profile have no communicators.
    """
    by_name = {process_bytes.accelerator: process_bytes for process_bytes in runtime.process_bytes}
    processes = [by_name.get(accelerator.name) for accelerator in cluster.accelerators]
    is_measured = len(cluster.devices) == 1 and all(process and process.held_bytes for process in processes)
    if _states_memory(runtime) or is_measured:
        return runtime.fragmented_ratio
    if all(process and is_assumed(process) for process in processes):
        return max(ASSUMED_FRAGMENTS_RATIO, runtime.fragmented_ratio)
    return UNKNOWN_MEMORY_RATIO


def _states_memory(runtime: Runtime) -> bool:
    return runtime.constant_bytes >= _MIN_CONTEXT_BYTES
