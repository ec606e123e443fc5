"""Search as a process of its own, as in a cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import IO, Final

from trainwright_operator.flow.actions import PlanningRequest
from trainwright_operator.flow.gangs.worker_log import parse_progress
from trainwright_operator.flow.phases.planning import SEARCH_DEADLINE_SECONDS
from trainwright_operator.flow.snapshot import PlannerFacts, PlannerState
from trainwright_operator.local.gang_process import end_with_parent
from trainwright_operator.search_process import USUAL_PRIORITY, read_end

_MODULE: Final = "trainwright_operator.search_process"


class SearchProcess:
    """At most one search at a time; its answer is there until the next one starts."""

    def __init__(self) -> None:
        self._facts = PlannerFacts()
        self._process: subprocess.Popen[str] | None = None
        self._errors: IO[bytes] | None = None

    @property
    def state(self) -> PlannerState:
        return self._facts.state

    @property
    def facts(self) -> PlannerFacts:
        """Return the search, with how far it is while it runs."""
        if self._facts.state is not PlannerState.RUNNING or self._errors is None:
            return self._facts
        return replace(self._facts, progress=parse_progress(_read(self._errors)))

    def start(self, request: PlanningRequest) -> None:
        """Start a search, unless one with the same request runs or has its answer."""
        if self._facts.key == request.key:
            return
        self.stop()
        # Nothing is measured meanwhile, so it need not give way.
        command = [sys.executable, "-m", _MODULE, "1", USUAL_PRIORITY]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the search, which others read
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=end_with_parent,  # noqa: PLW1509 - one system call, which takes no lock
        )
        self._facts = PlannerFacts(PlannerState.RUNNING, request.key, datetime.now(UTC))
        thread = threading.Thread(target=self._wait, args=(self._process, self._errors, request), daemon=True)
        thread.start()

    def stop(self) -> None:
        """End the search, and forget its answer."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
        self._process, self._errors, self._facts = None, None, PlannerFacts()

    def _wait(self, process: subprocess.Popen[str], errors: IO[bytes], request: PlanningRequest) -> None:
        try:
            output, _ = process.communicate(json.dumps(asdict(request)), timeout=SEARCH_DEADLINE_SECONDS)
            state, text = read_end(process.returncode, output, _read(errors))
        except subprocess.TimeoutExpired:
            process.kill()
            state, text = PlannerState.TIMED_OUT, ""
        if self._process is process:
            self._facts = self._facts.ended(state, text)


def _read(file: IO[bytes]) -> str:
    """Return the text of a file that another process writes."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")
