"""What is asked of a pipeline: its micro-batches and their schedule."""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.plan import Schedule


@dataclass(frozen=True)
class Ask:
    """What is asked: micro-batches and the schedule.

    Attributes:
        schedule: None: the less of what either of them needs; what does not keep that keeps neither.
    """

    micro_batches: int
    schedule: Schedule | None

    def kept(self, behind: int) -> int:
        """Micro-batches in flight with so many stages behind: at least."""
        return self.micro_batches if self.schedule is Schedule.GPIPE else min(self.micro_batches, behind + 1)

    def rounds(self, behind: int) -> tuple[int, int]:
        """How often a stage waits for a way to the last stage and back before the last one begins, and what is left."""
        return (
            divmod(self.micro_batches - 1, behind + 1) if self.schedule is Schedule.ONE_FORWARD_ONE_BACKWARD else (0, 0)
        )

    def spared(self, behind: int) -> int:
        """Forwards that a stage may have done while the first micro-batch was on its way."""
        return 0 if self.schedule is Schedule.GPIPE else min(self.micro_batches - 1, behind)
