"""Operator whose event loop is watched: `watched_operator.py FILE` appends a line for each hold of the loop.

A line holds the time (monotonic), by how many seconds a short sleep ended late, and how many CPU seconds the process took
meanwhile, which a busy machine does not change: any thread holds the loop while it holds the interpreter's lock.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final

from trainwright_operator.kube.main import main

SLEEP_SECONDS: Final = 0.02
MIN_SECONDS: Final = 0.03


async def record_holds(file: Path) -> None:
    """Append holds of the loop, for ever."""
    with file.open("a", buffering=1, encoding="utf-8") as lines:
        while True:
            began, cpu = time.monotonic(), time.process_time()
            await asyncio.sleep(SLEEP_SECONDS)
            ended = time.monotonic()
            late, busy = ended - began - SLEEP_SECONDS, time.process_time() - cpu
            if late > MIN_SECONDS:
                lines.write(f"{ended} {late:.4f} {busy:.4f}\n")


def run_watched(work: Coroutine[Any, Any, Any], run: Any = asyncio.run) -> None:
    """Run the operator's coroutine beside the watch, as `asyncio.run` does."""

    async def both() -> None:
        watching = asyncio.create_task(record_holds(Path(sys.argv[1])))
        await work
        watching.cancel()

    run(both())


if __name__ == "__main__":
    asyncio.run = run_watched  # type: ignore[assignment]
    sys.exit(main())
