"""Health endpoint /healthz: whether the operator recently got something done, and no pass over a plan hangs.

kopf's own endpoint does not check that. A renewed lease is no sign of it: a thread of its own renews the lease. Nor is a list
of all plans alone: a task of its own asks for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

STALE_SECONDS: Final = 120.0
"""Four missed re-syncs."""
LONGEST_PASS_SECONDS: Final = 600.0
"""Duration of a pass that hangs: each request ends within a minute, and a pass makes some hundred at most."""
_CONNECTION_SECONDS: Final = 5.0
"""Time for each read of a request: each connection has a thread, and clients that send nothing must not pile up."""


class Liveness:
    """Time of the last success (a reconciliation, a listing of all plans, a lease awaited), and the passes under way."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self._passes: dict[object, float] = {}

    def record_success(self) -> None:
        self._last = self._clock()

    @contextmanager
    def reconciling(self) -> Iterator[None]:
        """Count the block as a pass under way."""
        marker = object()
        self._passes[marker] = self._clock()
        try:
            yield
        finally:
            del self._passes[marker]

    @property
    def success_age_seconds(self) -> float:
        return self._clock() - self._last

    @property
    def pass_age_seconds(self) -> float:
        """Return the age of the oldest pass under way; 0 without one."""
        now = self._clock()
        return now - min(self._passes.copy().values(), default=now)

    @property
    def is_healthy(self) -> bool:
        return self.success_age_seconds < STALE_SECONDS and self.pass_age_seconds < LONGEST_PASS_SECONDS


def serve(port: int, pulse: Liveness) -> ThreadingHTTPServer:
    """Serve health checks in a separate thread, so that a blocked event loop differs from a slow one."""

    class Handler(BaseHTTPRequestHandler):
        timeout = _CONNECTION_SECONDS

        def do_GET(self) -> None:
            success, oldest = pulse.success_age_seconds, pulse.pass_age_seconds
            body = f"last success {success:.0f} s ago, oldest pass under way for {oldest:.0f} s\n".encode()
            self.send_response(404 if self.path != "/healthz" else 200 if pulse.is_healthy else 503)
            self.send_header("Content-Type", "text/plain")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
            """Suppress logs of checks, which arrive every few seconds."""

    server = ThreadingHTTPServer(("", port), Handler)
    threading.Thread(target=server.serve_forever, name="healthz", daemon=True).start()
    return server
