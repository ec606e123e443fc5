"""Search as a process of its own, as in a cluster."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Final

from trainwright_operator.flow.actions import PlanningRequest
from trainwright_operator.flow.phases.planning import SEARCH_DEADLINE_SECONDS
from trainwright_operator.flow.snapshot import PlannerFacts, PlannerState
from trainwright_operator.local.gang_process import end_with_parent
from trainwright_operator.search_process import USUAL_PRIORITY, read_end

_MODULE: Final = "trainwright_operator.search_process"


class SearchProcess:
    """At most one search at a time; its answer is there until the next one starts."""

    def __init__(self) -> None:
        self.facts = PlannerFacts()
        self._process: subprocess.Popen[str] | None = None

    def start(self, request: PlanningRequest) -> None:
        """Start a search, unless one with the same request runs or has its answer."""
        if self.facts.key == request.key:
            return
        self.stop()
        # Nothing is measured meanwhile, so it need not give way.
        command = [sys.executable, "-m", _MODULE, "1", USUAL_PRIORITY]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=end_with_parent,  # noqa: PLW1509 - one system call, which takes no lock
        )
        self.facts = PlannerFacts(PlannerState.RUNNING, request.key, datetime.now(UTC))
        thread = threading.Thread(target=self._wait, args=(self._process, request), daemon=True)
        thread.start()

    def stop(self) -> None:
        """End the search, and forget its answer."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
        self._process, self.facts = None, PlannerFacts()

    def _wait(self, process: subprocess.Popen[str], request: PlanningRequest) -> None:
        try:
            output, errors = process.communicate(json.dumps(asdict(request)), timeout=SEARCH_DEADLINE_SECONDS)
            state, text = read_end(process.returncode, output, errors)
        except subprocess.TimeoutExpired:
            process.kill()
            state, text = PlannerState.TIMED_OUT, ""
        if self._process is process:
            self.facts = self.facts.ended(state, text)
