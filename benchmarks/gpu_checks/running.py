"""Run of one check in a process of its own, subject by subject, within its budget."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection

from gpu_checks.findings import Finding, Verdict, skipped
from gpu_checks.hardware import Hardware

GRACE_SECONDS = 30.0
"""Time beyond its budget that a check has to finish its current subject."""


@dataclass(frozen=True, slots=True)
class Subject:
    """Part of a check that is tried, and can fail, without the others."""

    name: str
    find: Callable[[], Iterable[Finding]]


@dataclass(frozen=True, slots=True)
class Check:
    """Named check.

    Attributes:
        subjects: lists its parts; it runs in the check's own process.
    """

    name: str
    budget_seconds: float
    subjects: Callable[[Hardware], Iterable[Subject]]


def findings_of(check: Check, hardware: Hardware, *, budget_seconds: float) -> Iterable[Finding]:
    """Yield a check's findings as they come; a check that outlasts its budget is cut, with a finding that says so.

    A process of its own survives no illegal access and no hang, and leaves the GPU's memory to the next check.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(["gpu_checks.checks"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_find, args=(check, hardware, budget_seconds, sender))
    process.start()
    sender.close()
    end = time.monotonic() + budget_seconds + GRACE_SECONDS
    try:
        while receiver.poll(max(end - time.monotonic(), 0.0)):
            yield replace(receiver.recv(), check=check.name)
        reason = f"the check was cut after {budget_seconds + GRACE_SECONDS:.0f} s"
        yield skipped("the rest", reason, check=check.name)
    except EOFError:
        process.join()
        if process.exitcode:
            reason = f"its process ended with code {process.exitcode}"
            yield Finding("the rest", "–", "–", Verdict.FAILS, reason, check.name)
    finally:
        if process.pid is not None:
            _end_group(process.pid)
        process.join()


def _end_group(leader: int) -> None:
    """End the check's process and those that it started."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


def _find(check: Check, hardware: Hardware, budget_seconds: float, sender: Connection) -> None:
    os.setpgid(0, 0)
    hardware.prepare()
    for finding in find_within(check.subjects(hardware), budget_seconds):
        sender.send(finding)
        if finding.verdict is Verdict.FAILS:
            gc.collect()  # the error's frames held the subject's tensors
        hardware.empty_cache()
    sender.close()


def find_within(subjects: Iterable[Subject], budget_seconds: float) -> Iterable[Finding]:
    """Yield the findings of all subjects; one that raises fails, and none begins once the budget is spent."""
    end = time.monotonic() + budget_seconds
    for subject in subjects:
        if time.monotonic() >= end:
            yield skipped(subject.name, f"the budget of {budget_seconds:.0f} s is spent")
            continue
        try:
            yield from subject.find()
        except Exception as error:  # noqa: BLE001 (one subject's failure is a finding)
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            yield Finding(subject.name, "–", "–", Verdict.FAILS, reason)
