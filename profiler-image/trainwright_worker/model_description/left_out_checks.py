"""Checks of a user's model that its description left out, on the device that is to profile its layers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Final

import torch

from trainwright.families import Custom
from trainwright.worker_api import FailureReason, ProfilingTask
from trainwright_worker.device import release_cached_memory
from trainwright_worker.executor.stage_module import TORCH_DTYPES
from trainwright_worker.gang.errors import WorkerError
from trainwright_worker.layers.custom_errors import ModelError
from trainwright_worker.layers.custom_makers import host_bytes, processes_of_host
from trainwright_worker.layers.described_layers import load_described_layers
from trainwright_worker.model_description.check_budget import CheckBudget
from trainwright_worker.model_description.fingerprint import check_other_process, other_process
from trainwright_worker.model_description.layer_key import layer_key
from trainwright_worker.model_description.layer_runs import Findings
from trainwright_worker.model_description.values import ValueCheck

CHECK_SECONDS: Final = 120.0
"""Time that the checks may take, or a quarter of the task's deadline where that is less."""
_DEADLINE_SHARE: Final = 0.25
_WAIT_SHARE: Final = 0.5
"""Share of the time that the gang's other processes wait for this one, which itself waits for one outside of the gang."""
_GPU_SHARE, _HOST_SHARE = 0.9, 0.5
"""Share of the memory that a layer's check may take: a GPU refuses what it has not, while a host ends processes."""


def check_left_out(
    task: ProfilingTask, device: torch.device, beat: Callable[[str], None], *, is_main_process: bool
) -> tuple[str, ...]:
    """Check the values of those of the task's layers that the description left out.

    Return what was left out again, and why. `beat` is called with what is checked next. One process of a gang also compares
    weights and rows with those of another process. Raises WorkerError for what a plan would change.
    """
    family = task.model.family
    if not isinstance(family, Custom):
        return ()
    names = family.kinds_to_check & {kind.name for kind in task.layer_kinds}
    if not names:
        return ()
    beat("checking what the description of the model left out")
    layers = load_described_layers(family)
    dtype = TORCH_DTYPES[task.model.dtype]
    half = None if dtype is torch.float32 else dtype
    keys = {number: layer_key(layers, number, half) for number, name in enumerate(family.layers) if name in names}
    first = {key: number for number, key in reversed(keys.items())}
    kinds = {kind.name: kind for kind in family.kinds}
    seconds = min(CHECK_SECONDS, _DEADLINE_SHARE * task.gang.deadline_seconds)
    budget = CheckBudget(seconds, _max_bytes(device), device, is_trained_here=True, beat=beat)
    findings = Findings()
    is_small = 2 * layers.makers.whole_bytes() <= _host_bytes_of_process()
    if not is_small:
        findings.left_out.append(
            "weights and rows of another process: this host has no memory for two of the whole model"
        )
    starts_other = is_main_process and is_small
    try:
        with other_process(family.entrypoint, sorted(first.values())) if starts_other else nullcontext() as other:
            ValueCheck(layers, [kinds[name] for name in family.layers], budget, (dtype,), findings).run(keys)
            if other is not None:
                beat("comparing weights and rows with those of another process")
                wait = _WAIT_SHARE * task.gang.collective_timeout_seconds
                left_out = check_other_process(layers, sorted(first.values()), other, wait)
                findings.left_out += [left_out] if left_out is not None else []
    except ModelError as error:
        raise WorkerError(FailureReason.ORDER_INVALID, str(error)) from error
    finally:
        release_cached_memory(device)
    for sentence in findings.remarks:
        sys.stderr.write(f"{sentence}\n")
    return tuple(findings.left_out)


def _max_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return _GPU_SHARE * free
    return _host_bytes_of_process()


def _host_bytes_of_process() -> float:
    return _HOST_SHARE * host_bytes() / processes_of_host()
