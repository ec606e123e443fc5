"""What the operator asks of a worker, and what the worker answers: the only documents the two share.

An order reaches every pod of a gang as a file; each pod finds its place by its node's name. A worker writes
one line for every answer to its standard output: a marker, a space, and one JSON document:

    TRAINWRIGHT-PROGRESS   a `Progress`, now and then, from the process with rank 0
    TRAINWRIGHT-PART       a `SeriesPart` for each trial of a series, from the process with rank 0
    TRAINWRIGHT-REPORT     the report of the order's kind, once, from the process with rank 0
    TRAINWRIGHT-FAILURE    a `Failure`, from any process; also left as the pod's termination message
"""

from __future__ import annotations

from trainwright.orders.failure import Cause, Failure, FailureReason
from trainwright.orders.gang import Gang, GangNode
from trainwright.orders.links import CollectiveKind, CollectiveTime, LinksOrder, LinksReport, Overlap
from trainwright.orders.pod import (
    FAILURE_MARKER,
    MAX_REPORT_BYTES,
    NODE_NAME_VARIABLE,
    ORDER_PATH,
    PART_MARKER,
    PROGRESS_MARKER,
    REPORT_MARKER,
)
from trainwright.orders.profile import ProfileOrder, ProfileReport
from trainwright.orders.progress import Progress
from trainwright.orders.series import SeriesOrder, SeriesPart, SeriesReport
from trainwright.orders.trial import MOST_LATE_RATIO, RankMemory, TrialOrder, TrialReport

WorkerOrder = LinksOrder | ProfileOrder | TrialOrder | SeriesOrder
WorkerReport = LinksReport | ProfileReport | TrialReport | SeriesReport

__all__ = [
    "FAILURE_MARKER",
    "MAX_REPORT_BYTES",
    "MOST_LATE_RATIO",
    "NODE_NAME_VARIABLE",
    "ORDER_PATH",
    "PART_MARKER",
    "PROGRESS_MARKER",
    "REPORT_MARKER",
    "Cause",
    "CollectiveKind",
    "CollectiveTime",
    "Failure",
    "FailureReason",
    "Gang",
    "GangNode",
    "LinksOrder",
    "LinksReport",
    "Overlap",
    "ProfileOrder",
    "ProfileReport",
    "Progress",
    "RankMemory",
    "SeriesOrder",
    "SeriesPart",
    "SeriesReport",
    "TrialOrder",
    "TrialReport",
    "WorkerOrder",
    "WorkerReport",
]
