from __future__ import annotations

from local_cluster.cli import app

app()
