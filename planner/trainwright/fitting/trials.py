"""Plans that were run, and what was measured."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from trainwright.cluster import Device
from trainwright.orders import TrialReport
from trainwright.plan import Plan


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Peak bytes that one device held."""

    device: Device
    peak_bytes: int

    def __post_init__(self) -> None:
        if self.peak_bytes <= 0:
            raise ValueError(
                f"peak_bytes of {self.device} must be above 0, got {self.peak_bytes}; leave it out instead"
            )


@dataclass(frozen=True, slots=True)
class Trial:
    """A plan and its measured iteration.

    Attributes:
        iteration_seconds: median of the measured iterations.
        peak_memory_bytes: of the device that held most, where it was measured.
        memory_by_device: of devices of the plan, where they were measured one by one.
        name: for reports; the plan's summary where it is not given.
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
        """What a worker measured of a plan. Raises ValueError where it means nothing, or is of other devices."""
        if report.is_void:
            raise ValueError(
                f"{report.late_segments} of {report.paced_segments} computations took longer than the emulated devices "
                "would, so this trial says nothing about them; try the plan again on a machine that is less busy"
            )
        held = tuple(
            DeviceMemory(Device(rank.node, rank.slot), rank.peak_bytes) for rank in report.memory if rank.peak_bytes > 0
        )
        peak = max((memory.peak_bytes for memory in held), default=None)
        return cls(plan, statistics.median(report.iteration_seconds), peak, held)

    def is_same_run_as(self, other: Trial) -> bool:
        """Whether both tell of one and the same run: no two of a plan take equally long to the last digit."""
        return self.plan == other.plan and self.iteration_seconds == other.iteration_seconds

    @property
    def label(self) -> str:
        """What a report calls the trial."""
        return self.name or self.plan.summary()


@dataclass(frozen=True, slots=True)
class FailedTrial:
    """A plan that did not run.

    Attributes:
        out_of_memory: whether that is why: then other plans are likelier to be, too.
    """

    plan: Plan
    out_of_memory: bool = False
    name: str | None = None


@dataclass(frozen=True)
class Trials:
    """The document of trials of one model on one cluster: those that were measured, and those that failed."""

    trials: tuple[Trial, ...] = ()
    failed: tuple[FailedTrial, ...] = ()

    def __post_init__(self) -> None:
        if not self.trials and not self.failed:
            raise ValueError("trials must hold at least one measured trial, or one that failed")

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Of all trials, those that failed behind those that ran."""
        return (*(trial.plan for trial in self.trials), *(trial.plan for trial in self.failed))
