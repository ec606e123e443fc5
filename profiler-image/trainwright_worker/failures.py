"""Why a worker gives up: one reason and one sentence for whatever went wrong."""

from __future__ import annotations

from trainwright.orders import FailureReason

_PEER_LOST = (
    "connection closed by peer",
    "connection reset",
    "broken pipe",
    "failed to recv, got 0 bytes",
    "remote process exited",
    "remote worker crashing",
    "socket closed",
    "connection was likely closed",
)
_HANG = ("timed out", "timeout", "watchdog caught collective operation")
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory")


class WorkerError(Exception):
    """A refusal or a failure with its reason; the message is one sentence."""

    def __init__(self, reason: FailureReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


def one_line(text: str, *, limit: int = 600) -> str:
    """The text with its white space joined, at most `limit` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def classify(error: BaseException) -> WorkerError:
    """The reason for an exception, told by its type and, for the collectives' plain RuntimeErrors, by its words.

    Gloo and the store raise RuntimeErrors whose words are all that tells a dead peer from a silent one.
    """
    if isinstance(error, WorkerError):
        return error
    words = one_line(str(error))
    sentence = f"{type(error).__name__}: {words}" if words else type(error).__name__
    lowered = sentence.lower()
    if isinstance(error, MemoryError) or any(mark in lowered for mark in _OUT_OF_MEMORY):
        return WorkerError(FailureReason.OUT_OF_MEMORY, sentence)
    if isinstance(error, RuntimeError | OSError | EOFError):
        if any(mark in lowered for mark in _PEER_LOST):
            return WorkerError(FailureReason.PEER_LOST, sentence)
        if any(mark in lowered for mark in _HANG):
            return WorkerError(FailureReason.HANG, sentence)
    return WorkerError(FailureReason.CRASHED, sentence)
