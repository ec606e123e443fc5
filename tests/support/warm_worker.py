"""Worker that imported torch before its first task: as a program it forks a process for each line of its input.

Importing torch takes seconds, and most tests start a gang. The process does what `python -m trainwright_worker` does.
"""

from __future__ import annotations

import json
import os
import runpy
import select
import subprocess
import sys
import traceback
from pathlib import Path
from typing import NoReturn


class WarmWorker:
    """Program that runs one worker's command at a time."""

    def __init__(self, environment: dict[str, str]) -> None:
        command = [sys.executable, __file__]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, folder: Path, *arguments: str, timeout_seconds: float) -> tuple[int, str, str]:
        """Run the command in the folder. Returns its exit code, output and errors."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(folder), *arguments]) + "\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], timeout_seconds)[0]:
            self.close()
            raise subprocess.TimeoutExpired(list(arguments), timeout_seconds)
        code = int(self._process.stdout.readline())
        output, errors = ((folder / name).read_text(encoding="utf-8") for name in ("stdout", "stderr"))
        return code, output, errors

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def _run(folder: str, *arguments: str) -> NoReturn:
    try:
        os.chdir(folder)
        os.environ["HOME"] = folder
        for number, name in enumerate((os.devnull, "stdout", "stderr")):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), number)
        sys.argv = ["trainwright_worker", *arguments]
        runpy.run_module("trainwright_worker", run_name="__main__", alter_sys=True)
    except BaseException:  # noqa: BLE001  SystemExit too: the loop of the parent must not go on here
        traceback.print_exc()
    finally:
        os._exit(1)


def main() -> None:
    from trainwright_worker.gang.startup import limit_threads

    limit_threads()  # before torch is loaded
    from trainwright_worker import run_task  # noqa: F401
    from trainwright_worker.gang import local_launcher  # noqa: F401

    for line in sys.stdin:
        process = os.fork()
        if process == 0:
            _run(*json.loads(line))
        _, status = os.waitpid(process, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
