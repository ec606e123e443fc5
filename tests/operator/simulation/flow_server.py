"""API server that answers by HTTP and refuses requests as a test demands."""

from __future__ import annotations

import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler
from typing import Any, ClassVar

KINDS = {
    "/api/v1": [("pods", "Pod", True), ("namespaces", "Namespace", False)],
    "/apis/trainwright.dev/v1alpha1": [("trainingplans", "TrainingPlan", True)],
    "/apis/kubeflow.org/v1": [("pytorchjobs", "PyTorchJob", True)],
}


class Server(BaseHTTPRequestHandler):
    """API server that refuses paths containing `refused`, initially all of `gone`, and never gets a log from a kubelet.

    With `going` it lets namespaces be watched, and refuses only once that is set, which deletes the namespace.
    """

    protocol_version = "HTTP/1.1"
    asked: ClassVar[Counter[str]] = Counter()
    lease: ClassVar[dict[str, Any]] = {}
    closing = threading.Event()
    going: ClassVar[threading.Event | None] = None
    refused: ClassVar[str] = "/namespaces/gone/"

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        self.asked[path] += 1
        if self.going is not None and path == "/api/v1/namespaces":
            self.namespaces(self.going, is_watch="watch=true" in query)
        elif "/namespaces/gone/" in path and self.going is not None and not self.going.is_set():
            if "watch=true" in query:
                self.going.wait()  # and its end is what the client gets
                self.close_connection = True
            else:
                self.say(self.discovered(path))
        elif self.refused in path or path == "/api/v1/namespaces":
            self.say({"kind": "Status", "code": 403, "reason": "Forbidden", "message": f"{path} is forbidden"}, 403)
        elif path.endswith("/log") or "watch=true" in query:
            self.closing.wait()
            self.close_connection = True
        elif "/leases/" in path:
            self.say(self.lease)
        else:
            self.say(self.discovered(path))

    def namespaces(self, going: threading.Event, *, is_watch: bool) -> None:
        found = [{"metadata": {"name": name, "resourceVersion": "1"}} for name in ("gone", "team-a")]
        if not is_watch:
            self.say({"metadata": {"resourceVersion": "1"}, "items": found})
            return
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        going.wait()
        self.wfile.write(json.dumps({"type": "DELETED", "object": found[0]}).encode() + b"\n")
        self.closing.wait()

    def do_PUT(self) -> None:
        self.lease.update(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.say(self.lease)

    def discovered(self, path: str) -> dict[str, Any]:
        """Return what the server has, or else an empty list."""
        if path == "/api":
            return {"versions": ["v1"]}
        if path == "/apis":
            groups = [name.removeprefix("/apis/") for name in KINDS if name.startswith("/apis/")]
            versions = [{"groupVersion": group, "version": group.partition("/")[2]} for group in groups]
            names = [group.partition("/")[0] for group in groups]
            named = zip(names, versions, strict=True)
            return {"groups": [{"name": n, "versions": [v], "preferredVersion": v} for n, v in named]}
        verbs = ["get", "list", "watch", "patch"]
        if path in KINDS:
            kinds = [
                {"name": name, "singularName": "", "kind": kind, "namespaced": inside, "verbs": verbs}
                for name, kind, inside in KINDS[path]
            ]
            return {"resources": kinds}
        return {"metadata": {"resourceVersion": "1"}, "items": []}

    def say(self, body: dict[str, Any], code: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the base class's name)
        """Discard log messages."""
