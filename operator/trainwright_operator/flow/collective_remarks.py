"""Remarks on predicted collectives: how far they are off, what follows for the answer, and what to look at."""

from __future__ import annotations

from typing import Final

from trainwright.measurement.collective_check import CollectiveCheck

SMALL_ERROR: Final = 0.25
"""Mean error up to which nothing follows: plans that differ by less in their communication are near each other anyway."""
_LARGE_RATIO: Final = 1.25
"""Ratio of measured to predicted seconds, or its inverse, from which errors have a direction."""


def explain_check(check: CollectiveCheck, *, is_emulated: bool, has_trials: bool) -> str:
    """Return a clause on the errors, of the figures alone where they are small."""
    worst = check.worst.measured
    figures = (
        f"{check.count} measured, mean error {check.mean_error:.0%}, largest {check.worst.error:+.0%} for {worst.collective} of "
        f"{worst.message_bytes} bytes on {len(worst.members)} devices"
    )
    if check.mean_error <= SMALL_ERROR:
        return f"collectives are predicted well ({figures})"
    if check.measured_ratio >= _LARGE_RATIO:
        told = f"collectives took {check.measured_ratio:.2g} times as long as predicted ({figures})"
        rank, causes = "too high", _causes_of_slow(is_emulated=is_emulated)
    elif check.measured_ratio <= 1 / _LARGE_RATIO:
        told = f"collectives took only {check.measured_ratio:.2g} of the predicted time ({figures})"
        rank, causes = "too low", _causes_of_fast(is_emulated=is_emulated)
    else:
        told = f"collectives took partly more and partly less than predicted ({figures})"
        rank, causes = "wrongly", "other traffic while they were measured"
    decides = (
        "trials decide, and a higher trials.topK tries more"
        if has_trials
        else "without trials (trials.topK is 0) nothing corrects that"
    )
    return f"{told}, so plans that communicate much may rank {rank}: {decides}; look for {causes}"


def _causes_of_slow(*, is_emulated: bool) -> str:
    traffic = "other traffic on the network while they were measured"
    if is_emulated:
        return f"{traffic}, or a busy machine"
    return (
        f"{traffic}, and for NCCL on TCP instead of RDMA or NVLink (with NCCL_DEBUG=INFO in the environment of worker.podTemplate the "
        "log says NET/Socket)"
    )


def _causes_of_fast(*, is_emulated: bool) -> str:
    traffic = "other traffic that slowed the links while they were measured one by one"
    if is_emulated:
        return traffic
    return f"{traffic}, or a network that sums by itself (NVLink SHARP, InfiniBand SHARP), of which predictions know nothing"
