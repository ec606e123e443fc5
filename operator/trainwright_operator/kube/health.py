"""/healthz: whether the operator has lately reached the API server. kopf's own endpoint stays content without one."""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

STALE_SECONDS: Final = 120.0
"""Four missed re-syncs."""


class Pulse:
    """When something last worked: a pass, a listing of all plans, the lease renewed or waited for."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def beat(self) -> None:
        self._last = time.monotonic()

    @property
    def age_seconds(self) -> float:
        return time.monotonic() - self._last


def serve(port: int, pulse: Pulse) -> ThreadingHTTPServer:
    """Answer health checks in a thread of its own, so that a blocked event loop is told apart from a slow one."""

    class Handler(BaseHTTPRequestHandler):
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
            """Checks come every few seconds and are no news."""

    server = ThreadingHTTPServer(("", port), Handler)
    threading.Thread(target=server.serve_forever, name="healthz", daemon=True).start()
    return server
