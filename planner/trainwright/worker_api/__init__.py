"""Documents that operator and worker exchange.

Every pod of a gang reads its task from a file and finds its slots by its node's name. A worker prints every message as
one line: a marker, a space, and a JSON document.

    TRAINWRIGHT-PROGRESS   a `Progress`, now and then, from rank 0
    TRAINWRIGHT-PART       a `SeriesPart` for each trial of a series, from rank 0
    TRAINWRIGHT-REPORT     the report of the task's kind, once, from rank 0
    TRAINWRIGHT-FAILURE    a `Failure`, from any process; also the pod's termination message
"""

from __future__ import annotations

from trainwright.worker_api.reports import Cause, Failure, FailureReason, Progress
from trainwright.worker_api.tasks import (
    FAILURE_MARKER,
    MAX_LATE_RATIO,
    MAX_REPORT_BYTES,
    NODE_NAME_VARIABLE,
    PROGRESS_MARKER,
    REPORT_MARKER,
    SECRET_FILE,
    SERIES_PART_MARKER,
    SERIES_ROUNDS,
    TASK_PATH,
    CheckedLayer,
    CollectiveKind,
    CollectiveTime,
    Gang,
    GangNode,
    LayerCheck,
    LinkReport,
    LinkTask,
    LossDependence,
    Overlap,
    ProfilingReport,
    ProfilingTask,
    RankMemory,
    SeriesPart,
    TrialReport,
    TrialSeriesReport,
    TrialSeriesTask,
    TrialTask,
)

WorkerTask = LinkTask | ProfilingTask | TrialTask | TrialSeriesTask
WorkerReport = LinkReport | ProfilingReport | TrialReport | TrialSeriesReport

__all__ = [
    "FAILURE_MARKER",
    "MAX_LATE_RATIO",
    "MAX_REPORT_BYTES",
    "NODE_NAME_VARIABLE",
    "PROGRESS_MARKER",
    "REPORT_MARKER",
    "SECRET_FILE",
    "SERIES_PART_MARKER",
    "SERIES_ROUNDS",
    "TASK_PATH",
    "Cause",
    "CheckedLayer",
    "CollectiveKind",
    "CollectiveTime",
    "Failure",
    "FailureReason",
    "Gang",
    "GangNode",
    "LayerCheck",
    "LinkReport",
    "LinkTask",
    "LossDependence",
    "Overlap",
    "ProfilingReport",
    "ProfilingTask",
    "Progress",
    "RankMemory",
    "SeriesPart",
    "TrialReport",
    "TrialSeriesReport",
    "TrialSeriesTask",
    "TrialTask",
    "WorkerReport",
    "WorkerTask",
]
