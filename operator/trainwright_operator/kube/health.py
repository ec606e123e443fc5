"""Health endpoint /healthz: whether the operator recently got something done.

kopf's own endpoint does not check that. A renewed lease is no sign of it: a thread of its own renews the lease.
"""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

STALE_SECONDS: Final = 120.0
"""Four missed re-syncs."""
_CONNECTION_SECONDS: Final = 5.0
"""Time for a request: each connection has a thread, and clients that send nothing must not pile up."""


class Liveness:
    """Time of the last success: a reconciliation, a listing of all plans, or a lease awaited."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def record_success(self) -> None:
        self._last = time.monotonic()

    @property
    def age_seconds(self) -> float:
        return time.monotonic() - self._last


def serve(port: int, pulse: Liveness) -> ThreadingHTTPServer:
    """Serve health checks in a separate thread, so that a blocked event loop differs from a slow one."""

    class Handler(BaseHTTPRequestHandler):
        timeout = _CONNECTION_SECONDS

        def do_GET(self) -> None:
            age = pulse.age_seconds
            healthy = self.path == "/healthz" and age < STALE_SECONDS
            body = f"last success {age:.0f} s ago\n".encode()
            self.send_response(200 if healthy else 404 if self.path != "/healthz" else 503)
            self.send_header("Content-Type", "text/plain")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
            """Suppress logs of checks, which arrive every few seconds."""

    server = ThreadingHTTPServer(("", port), Handler)
    threading.Thread(target=server.serve_forever, name="healthz", daemon=True).start()
    return server
