"""Kernels of `scaled_dot_product_attention` that some work takes."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile

_OPERATOR = "aten::_scaled_dot_product_"
_NAMES = {"efficient": "memory_efficient"}


def attention_kernels(work: Callable[[], object]) -> tuple[str, ...]:
    """Return the kernels, sorted: flash, cudnn, memory_efficient, or math, which stores all scores.

    Their operators have the same names on every device, so the profiler needs no access to the GPU's counters.
    """
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as recorded:
        work()
    names = {event.key for event in recorded.key_averages() if event.key.startswith(_OPERATOR)}
    kernels = {name.removeprefix(_OPERATOR).removesuffix("_for_cpu").replace("attention", "") for name in names}
    return tuple(sorted(_NAMES.get(kernel.strip("_"), kernel.strip("_")) for kernel in kernels))
