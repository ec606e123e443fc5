"""Emulated devices' memory: only their speed is emulated, so what they would not hold is counted and refused."""

from __future__ import annotations

from trainwright.orders import FailureReason, Gang, RankMemory
from trainwright_worker.failures import WorkerError, amount


def check_capacity(held: RankMemory, gang: Gang) -> None:
    """Raise WorkerError where a rank held more at its peak than its emulated device has, if that is known."""
    accelerator = gang.accelerator_of(held.node)
    emulation = gang.emulation_of(accelerator)
    if emulation is None or emulation.memory_bytes is None or held.peak_bytes <= emulation.memory_bytes:
        return
    lack = held.peak_bytes - emulation.memory_bytes
    raise WorkerError(
        FailureReason.OUT_OF_MEMORY,
        f"asked for {amount(held.peak_bytes)} at its peak, the device ({accelerator}) has "
        f"{amount(emulation.memory_bytes)}: {amount(lack)} too much",
    )
