"""Termination of a process: exactly one failure message, and notice to the rest of its gang."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn, TypeVar

from trainwright.worker_api import NODE_NAME_VARIABLE, Cause, Failure, FailureReason
from trainwright_worker.gang import report_writer
from trainwright_worker.gang.abort import STATUS_TIMEOUT_SECONDS, AbortListener
from trainwright_worker.gang.errors import REPORTED_EXIT_CODE, WorkerError, one_line
from trainwright_worker.gang.rank_assignment import RankAssignment
from trainwright_worker.gang.rank_status import GangStatus, RankStatus, peer_loss_message, root_cause
from trainwright_worker.gang.watchdog import Watchdog, format_stacks, is_waiting

_STATUS_EXCHANGE_SECONDS = STATUS_TIMEOUT_SECONDS + 2.0
"""Maximum time that a terminating process spends on exchanging statuses."""
_DEVICE_QUERY_SECONDS = 1.0
"""Maximum time to ask the device where it is."""
_REASONS_WITH_LOCATION = (FailureReason.OUT_OF_MEMORY, FailureReason.CRASHED, FailureReason.TERMINATED)
"""Reasons whose message begins with the device, plan position and action of the process."""

_T = TypeVar("_T")


class TerminationReporter:
    """Terminator of this process: reports one failure and exits.

    Attributes:
        assignment, watchdog, abort_listener: assigned as soon as known; without a listener, peers notice the exit by
            themselves.
    """

    def __init__(self) -> None:
        self.assignment: RankAssignment | None = None
        self.watchdog: Watchdog | None = None
        self.abort_listener: AbortListener | None = None
        self._termination_lock = threading.Lock()

    def report_error(self, problem: WorkerError) -> NoReturn:
        """Terminate because the task raised an error."""
        self._terminate(problem.reason, problem.message)

    def report_by_watchdog(self, reason: FailureReason, message: str) -> NoReturn:
        """Terminate because the watchdog timed out or found a broken connection."""
        self._terminate(reason, message)

    def report_signal(self, signal_name: str) -> NoReturn:
        """Terminate because of a signal."""
        self._terminate(FailureReason.TERMINATED, f"was stopped by a signal ({signal_name})", raises_abort=False)

    def report_abort(self, abort_cause: Cause) -> NoReturn:
        """Terminate because another process raised the abort signal."""
        reason = FailureReason.HANG if abort_cause.reason is FailureReason.HANG else FailureReason.PEER_LOST
        message = ""
        if abort_cause.reason in (FailureReason.HANG, FailureReason.PEER_LOST):
            message = (
                f"{_format_device(abort_cause)} aborted the gang: {abort_cause.message}"
                if abort_cause.node
                else abort_cause.message
            )
        self._terminate(reason, message, abort_cause)

    def _terminate(
        self, reason: FailureReason, message: str, abort_cause: Cause | None = None, *, raises_abort: bool = True
    ) -> NoReturn:
        if not self._termination_lock.acquire(blocking=False):  # never released: only the first failure is reported
            threading.Event().wait(2 * _STATUS_EXCHANGE_SECONDS)
            os._exit(REPORTED_EXIT_CODE)  # unless the other thread already did
        try:
            self._report(reason, message, abort_cause, raises_abort=raises_abort)
        except Exception:  # noqa: BLE001 (the process must exit in any case)
            self.log(traceback.format_exc())
            report_writer.write_failure(
                Failure(reason, message or str(abort_cause), node=os.environ.get(NODE_NAME_VARIABLE))
            )
        finally:
            sys.stderr.flush()
            os._exit(REPORTED_EXIT_CODE)  # skip the back end's destructors, which may wait for peers

    def _report(self, reason: FailureReason, message: str, abort_cause: Cause | None, *, raises_abort: bool) -> None:
        status = self._rank_status(reason)
        if reason is FailureReason.HANG:
            self.log(format_stacks())
        if reason in _REASONS_WITH_LOCATION and self.assignment is not None:
            where = ", ".join(part for part in (str(self.assignment.device), status.place, status.doing) if part)
            message = f"{where}: {message}"
        rank, slot = (self.assignment.rank, self.assignment.device.slot) if self.assignment else (None, None)
        own_cause = Cause(reason, one_line(message, limit=400), status.node or None, slot)
        if reason is not FailureReason.PEER_LOST:
            status = replace(status, failure=own_cause)
        failure = Failure(reason, message, rank, own_cause.node, own_cause.slot, status.doing)
        if reason in (FailureReason.HANG, FailureReason.PEER_LOST):
            report_writer.write_failure(
                self._with_gang_status(failure, status, own_cause, abort_cause, raises_abort=raises_abort)
            )
        else:  # the message does not depend on other ranks
            report_writer.write_failure(failure)
            self._exchange_statuses(status, own_cause, abort_cause, raises_abort=raises_abort)

    def _with_gang_status(
        self, failure: Failure, status: RankStatus, own_cause: Cause, abort_cause: Cause | None, *, raises_abort: bool
    ) -> Failure:
        """Return the failure with what the gang's statuses reveal about its cause."""
        gang_status, is_first = self._exchange_statuses(status, own_cause, abort_cause, raises_abort=raises_abort) or (
            GangStatus(()),
            True,
        )
        if gang_status.statuses and (is_first or (self.assignment is not None and self.assignment.is_main_process)):
            self.log(gang_status.summary())
        if failure.reason is FailureReason.HANG:
            parts = (f"{failure.message}, here while {failure.doing}", gang_status.likely_culprit())
            return replace(failure, message="; ".join(part for part in parts if part))
        cause = root_cause(abort_cause, gang_status)
        peer_loss = "; ".join(part for part in (peer_loss_message(cause, gang_status), failure.message) if part)
        return replace(failure, message=f"{peer_loss} (noticed while {failure.doing})", cause=cause)

    def _rank_status(self, reason: FailureReason) -> RankStatus:
        """Return this process's status, without its failure."""
        node = self.assignment.device.node if self.assignment else os.environ.get(NODE_NAME_VARIABLE, "")
        rank, slot = (self.assignment.rank, self.assignment.device.slot) if self.assignment else (-1, 0)
        doing, seconds, place, is_device_behind = "starting", 0.0, "", False
        if self.watchdog is not None:
            doing, seconds, place = self.watchdog.doing, self.watchdog.seconds_since_beat, self.watchdog.plan_position
            device = run_with_timeout(_DEVICE_QUERY_SECONDS, self.watchdog.describe_device)
            is_device_behind = device != ""  # a launch that blocks the process can block the query, too
            doing = f"{doing} ({device})" if device else doing
        is_main = threading.current_thread() is threading.main_thread()
        # A process that is ahead of its device ends up blocked by a full launch queue, in any call. The main thread reports
        # a hang if the back end timed out.
        waits = is_waiting() or is_device_behind or (reason is FailureReason.HANG and is_main)
        return RankStatus(rank, node, slot, place, doing, seconds, waits)

    def log(self, text: str) -> None:
        """Write to the log, each line prefixed with this process's name, since several processes share the log."""
        name = (
            f"rank {self.assignment.rank} on {self.assignment.device}" if self.assignment else f"process {os.getpid()}"
        )
        sys.stderr.write("".join(f"[{name}] {line}\n" for line in text.splitlines()))
        sys.stderr.flush()

    def _exchange_statuses(
        self, status: RankStatus, own_cause: Cause, abort_cause: Cause | None, *, raises_abort: bool
    ) -> tuple[GangStatus, bool] | None:
        """Post this status, raise the abort signal, and gather the other statuses if the message depends on them.

        Returns the statuses and whether this process aborted first; None if the store is unknown or did not respond in time.
        """
        listener = self.abort_listener
        if listener is None:
            return None

        def exchange() -> tuple[GangStatus, bool]:
            board = listener.connect_board()
            if self.assignment is not None:
                board.post_status(status)
            is_first = abort_cause is None and raises_abort and board.raise_abort(own_cause)
            if own_cause.reason is FailureReason.HANG:
                return board.gather_statuses(), is_first
            if own_cause.reason is FailureReason.PEER_LOST and root_cause(abort_cause, GangStatus(())) is None:
                return board.gather_statuses(
                    is_enough=lambda statuses: root_cause(abort_cause, statuses) is not None
                ), is_first
            return GangStatus(board.devices), is_first

        return run_with_timeout(_STATUS_EXCHANGE_SECONDS, exchange)


def run_with_timeout(seconds: float, work: Callable[[], _T]) -> _T | None:
    """Return the work's result, or None if it fails or exceeds the timeout: a terminating process must not hang."""
    results: list[_T] = []

    def run() -> None:
        try:
            results.append(work())
        except (OSError, RuntimeError) as error:
            sys.stderr.write(f"cannot complete the report: {error}\n")

    thread = threading.Thread(target=run, name="last words", daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


def _format_device(cause: Cause) -> str:
    return f"{cause.node}:{cause.slot}" if cause.slot is not None else f"{cause.node}"
