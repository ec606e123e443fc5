"""Document of plans that were run and their measurements."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass

from trainwright.cluster import Device
from trainwright.document_kind import document
from trainwright.plan import Plan
from trainwright.worker_api import TrialReport


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Peak bytes of one device."""

    device: Device
    peak_bytes: int

    def __post_init__(self) -> None:
        if self.peak_bytes <= 0:
            raise ValueError(
                f"peak_bytes of {self.device} must be above 0, got {self.peak_bytes}; leave it out instead"
            )


@dataclass(frozen=True, slots=True)
class Trial:
    """Plan and its measured iteration.

    Attributes:
        iteration_seconds: median of the measured iterations.
        peak_memory_bytes: maximum over the devices, if measured.
        memory_by_device: of the plan's devices that were measured individually; a job's log may tell one peak of a whole node.
        name: for reports; by default the plan's summary.
    """

    plan: Plan
    iteration_seconds: float
    peak_memory_bytes: int | None = None
    memory_by_device: tuple[DeviceMemory, ...] = ()
    name: str | None = None

    def __post_init__(self) -> None:
        if self.iteration_seconds <= 0:
            raise ValueError(
                f"iteration_seconds of {self.label} must be above 0, got {self.iteration_seconds}; put a failed trial under `failed`"
            )
        if self.peak_memory_bytes is not None and self.peak_memory_bytes <= 0:
            raise ValueError(
                f"peak_memory_bytes of {self.label} must be above 0, got {self.peak_memory_bytes}; leave it out instead"
            )
        devices = [memory.device for memory in self.memory_by_device]
        strange = [device for device in devices if device not in self.plan.devices]
        if strange or len(set(devices)) < len(devices):
            raise ValueError(
                f"memory_by_device of {self.label} must name devices of its plan, each once; check "
                f"{(strange or devices)[0]}"
            )

    @classmethod
    def of(cls, plan: Plan, report: TrialReport) -> Trial:
        """Convert a trial's report. Raises ValueError if it is meaningless or of other devices.

        Of a user's job, a node's figure is the most that its pod stated: with several devices it is of any of them.
        """
        if report.is_emulation_too_slow:
            raise ValueError(
                f"{report.late_segments} of {report.paced_segments} computations took longer than the emulated devices "
                "would, so this trial says nothing about them; try the plan again on a machine that is less busy"
            )
        measured = [rank for rank in report.memory if rank.peak_bytes > 0]
        devices = Counter(device.node for device in plan.devices)
        stated = Counter(rank.node for rank in report.memory)
        memories = tuple(
            DeviceMemory(Device(rank.node, rank.slot), rank.peak_bytes)
            for rank in measured
            if not (stated[rank.node] == 1 < devices[rank.node])
        )
        peak = max((rank.peak_bytes for rank in measured), default=None)
        return cls(plan, statistics.median(report.iteration_seconds), peak, memories)

    def is_same_run_as(self, other: Trial) -> bool:
        """Return True if both are the same run: no two runs of a plan take equally long to the last digit."""
        is_same_plan = self.plan.in_any_format == other.plan.in_any_format
        return is_same_plan and self.iteration_seconds == other.iteration_seconds

    @property
    def label(self) -> str:
        """Name in reports."""
        return self.name or self.plan.summary()


@dataclass(frozen=True, slots=True)
class FailedTrial:
    """Plan that did not run.

    Attributes:
        out_of_memory: memory was the reason, which makes other plans likelier to run out of it, too.
    """

    plan: Plan
    out_of_memory: bool = False
    name: str | None = None

    @property
    def label(self) -> str:
        """Name in reports."""
        return self.name or self.plan.summary()


@document("Trials")
@dataclass(frozen=True)
class Trials:
    """Trials of one model on one cluster: those that were measured, and those that failed."""

    trials: tuple[Trial, ...] = ()
    failed: tuple[FailedTrial, ...] = ()

    def __post_init__(self) -> None:
        if not self.trials and not self.failed:
            raise ValueError("trials must hold at least one measured trial, or one that failed")

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Plans of all trials: the measured ones, then the failed ones."""
        return (*(trial.plan for trial in self.trials), *(trial.plan for trial in self.failed))
