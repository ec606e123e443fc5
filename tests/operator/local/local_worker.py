"""Worker without torch for tests of `tune`: reports at once, or as LOCAL_WORKER says: `slow` waits after a series' first part, `crash` fails."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from flow_reports import log_of, parts_of, report_of

from trainwright import documents
from trainwright.worker_api import Failure, FailureReason, TrialSeriesTask, TrialTask, WorkerTask


def write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def argument(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


order: WorkerTask = documents.loads(Path(argument("--order")).read_text(), WorkerTask)
is_trial, manner = isinstance(order, TrialTask | TrialSeriesTask), os.environ.get("LOCAL_WORKER", "")
if is_trial and manner == "crash":
    Path(argument("--termination-log")).write_text(documents.dumps(Failure(FailureReason.CRASHED, "crashed as asked")))
    sys.exit(1)
if is_trial and manner == "slow":
    if isinstance(order, TrialSeriesTask):
        write(parts_of([report_of(order.trial_task(0))]))
    time.sleep(60)
write(log_of(report_of(order)))
