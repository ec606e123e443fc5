"""Start of the operator's child processes."""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Final

logger = logging.getLogger(__name__)
_LONGEST_PAUSE_SECONDS: Final = 30.0


async def start_module(
    module: str, *arguments: str, errors: int | None = asyncio.subprocess.PIPE
) -> asyncio.subprocess.Process:
    """Run a module with pipes, retrying while the system has no memory or process number for it.

    `errors`: standard error; None: the operator's.
    """
    pause = 1.0
    while True:
        try:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                module,
                *arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
            )
        except OSError as error:
            logger.warning("%s cannot be started, retrying in %.0f s: %s", module, pause, error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
