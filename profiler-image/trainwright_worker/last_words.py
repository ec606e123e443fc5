"""Last words: a process says once why it ends, whoever notices first, and lets the others of its gang know."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn, TypeVar

from trainwright.orders import NODE_NAME_VARIABLE, Cause, Failure, FailureReason
from trainwright_worker import output
from trainwright_worker.bell import PATIENCE_SECONDS, Bell
from trainwright_worker.failures import TOLD_EXIT_CODE, WorkerError, one_line
from trainwright_worker.seat import Seat
from trainwright_worker.stands import Stand, Stands, cause_of, lost_words
from trainwright_worker.watchdog import Watchdog, stacks, waits_for_others

_TALK_SECONDS = PATIENCE_SECONDS + 2.0
"""The longest that a process that ends waits for the others' words."""
_PLACED = (FailureReason.OUT_OF_MEMORY, FailureReason.CRASHED, FailureReason.TERMINATED)
"""Reasons whose sentence begins with where in the plan the process was."""

_T = TypeVar("_T")


class LastWords:
    """Ends this process, for one reason.

    Attributes:
        seat, watchdog, bell: as soon as they are known; without a bell the others notice by themselves.
    """

    def __init__(self) -> None:
        self.seat: Seat | None = None
        self.watchdog: Watchdog | None = None
        self.bell: Bell | None = None
        self._turn = threading.Lock()

    def failed(self, problem: WorkerError) -> NoReturn:
        """The work ended in an error."""
        self._end(problem.reason, problem.message)

    def gave_up(self, reason: FailureReason, complaint: str) -> NoReturn:
        """The watchdog has had enough."""
        self._end(reason, complaint)

    def told_to_end(self, signal_name: str) -> NoReturn:
        """A signal asked this process to end."""
        self._end(FailureReason.TERMINATED, f"was told to end ({signal_name})", rings=False)

    def heard(self, alarm: Cause) -> NoReturn:
        """Another process raised the alarm."""
        reason = FailureReason.HANG if alarm.reason is FailureReason.HANG else FailureReason.PEER_LOST
        words = ""
        if alarm.reason in (FailureReason.HANG, FailureReason.PEER_LOST):
            words = f"{_device(alarm)} raised the alarm: {alarm.message}" if alarm.node else alarm.message
        self._end(reason, words, alarm)

    def _end(self, reason: FailureReason, words: str, alarm: Cause | None = None, *, rings: bool = True) -> NoReturn:
        if not self._turn.acquire(blocking=False):  # never released: what is said first stands
            threading.Event().wait(2 * _TALK_SECONDS)
            os._exit(TOLD_EXIT_CODE)  # the other thread should have done so
        try:
            self._say(reason, words, alarm, rings=rings)
        except Exception:  # noqa: BLE001 (whatever happens, the process ends)
            self.log(traceback.format_exc())
            output.failure(Failure(reason, words or str(alarm), node=os.environ.get(NODE_NAME_VARIABLE)))
        finally:
            sys.stderr.flush()
            os._exit(TOLD_EXIT_CODE)  # not through the back end's destructors, which may wait for peers

    def _say(self, reason: FailureReason, words: str, alarm: Cause | None, *, rings: bool) -> None:
        stand = self._stand(reason)
        if reason is FailureReason.HANG:
            self.log(stacks())
        if reason in _PLACED and self.seat is not None:
            where = ", ".join(part for part in (str(self.seat.device), stand.place, stand.doing) if part)
            words = f"{where}: {words}"
        rank, slot = (self.seat.rank, self.seat.device.slot) if self.seat else (None, None)
        own = Cause(reason, one_line(words, limit=400), stand.node or None, slot)
        if reason is not FailureReason.PEER_LOST:
            stand = replace(stand, failure=own)
        last = Failure(reason, words, rank, own.node, own.slot, stand.doing)
        if reason in (FailureReason.HANG, FailureReason.PEER_LOST):
            output.failure(self._with_others_words(last, stand, own, alarm, rings=rings))
        else:  # what it says does not hang on the others
            output.failure(last)
            self._talk(stand, own, alarm, rings=rings)

    def _with_others_words(
        self, last: Failure, stand: Stand, own: Cause, alarm: Cause | None, *, rings: bool
    ) -> Failure:
        """The last words with what the others of the gang know."""
        stands, is_first = self._talk(stand, own, alarm, rings=rings) or (Stands(()), True)
        if stands.answers and (is_first or (self.seat is not None and self.seat.is_speaker)):
            self.log(stands.summary())
        if last.reason is FailureReason.HANG:
            parts = (f"{last.message}, here while {last.doing}", stands.suspicion())
            return replace(last, message="; ".join(part for part in parts if part))
        cause = cause_of(alarm, stands)
        lost = "; ".join(part for part in (lost_words(cause, stands), last.message) if part)
        return replace(last, message=f"{lost} (noticed while {last.doing})", cause=cause)

    def _stand(self, reason: FailureReason) -> Stand:
        """Where this process stands, without its failure."""
        node = self.seat.device.node if self.seat else os.environ.get(NODE_NAME_VARIABLE, "")
        rank, slot = (self.seat.rank, self.seat.device.slot) if self.seat else (-1, 0)
        doing, seconds, place = "starting", 0.0, ""
        if self.watchdog is not None:
            doing, seconds, place = self.watchdog.doing, self.watchdog.seconds, self.watchdog.place
        is_main = threading.current_thread() is threading.main_thread()
        waits = waits_for_others() or (reason is FailureReason.HANG and is_main)  # the back end's time was up
        return Stand(rank, node, slot, place, doing, seconds, waits)

    def log(self, text: str) -> None:
        """Write to the log, every line under this process's name: several processes share it."""
        name = f"rank {self.seat.rank} on {self.seat.device}" if self.seat else f"process {os.getpid()}"
        sys.stderr.write("".join(f"[{name}] {line}\n" for line in text.splitlines()))
        sys.stderr.flush()

    def _talk(self, stand: Stand, own: Cause, alarm: Cause | None, *, rings: bool) -> tuple[Stands, bool] | None:
        """Answer, ring and gather what the others answer, where that helps; with it, whether this rang first.

        None where there is nobody to talk with, or not in time.
        """
        bell = self.bell
        if bell is None:
            return None

        def talk() -> tuple[Stands, bool]:
            board = bell.board()
            if self.seat is not None:
                board.answer(stand)
            is_first = alarm is None and rings and board.ring(own)
            if own.reason is FailureReason.HANG:
                return board.gather(), is_first
            if own.reason is FailureReason.PEER_LOST and cause_of(alarm, Stands(())) is None:
                return board.gather(is_enough=lambda found: cause_of(alarm, found) is not None), is_first
            return Stands(board.devices), is_first

        return within(_TALK_SECONDS, talk)


def within(seconds: float, work: Callable[[], _T]) -> _T | None:
    """The work's result; None where it fails or takes longer: who ends must not wait for ever for others."""
    results: list[_T] = []

    def run() -> None:
        try:
            results.append(work())
        except (OSError, RuntimeError) as error:
            sys.stderr.write(f"the others of the gang cannot be told: {error}\n")

    thread = threading.Thread(target=run, name="last words", daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


def _device(cause: Cause) -> str:
    return f"{cause.node}:{cause.slot}" if cause.slot is not None else f"{cause.node}"
