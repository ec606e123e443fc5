"""Figures of an operator process: CPU, memory, and how long its event loop is held."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Operator:
    """Operator process with its metrics port and the file of its loop's holds."""

    process: subprocess.Popen[bytes]
    metrics_port: int
    holds_file: Path

    @property
    def cpu_seconds(self) -> float:
        """Return CPU seconds of the process, its ended children and its decision process."""
        ticks = 0
        for pid in (self.process.pid, *self._decision_processes()):
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            ticks += sum(map(int, fields[11:15]))
        return ticks / os.sysconf("SC_CLK_TCK")

    @property
    def peak_bytes(self) -> int:
        """Return the largest resident memory so far."""
        return peak_bytes(self.process.pid)

    @property
    def decisions_peak_bytes(self) -> int:
        """Return the largest resident memory of the decision process so far; 0 if it does not run."""
        return max(map(peak_bytes, self._decision_processes()), default=0)

    def holds(self, since: float) -> list[tuple[float, float]]:
        """Return the loop's holds, each with the CPU seconds of the process."""
        rows = [[float(cell) for cell in line.split()] for line in self.holds_file.read_text().splitlines()]
        return [(late, busy) for ended, late, busy in rows if ended - late > since]

    def quantile(self, metric: str, share: float) -> float:
        """Return the upper bound of the histogram's bucket that holds the quantile; nan where there is no such metric."""
        with socket.create_connection(("127.0.0.1", self.metrics_port)) as connection:
            connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            text = b"".join(iter(lambda: connection.recv(65_536), b"")).decode()
        buckets = [
            (float(edge), float(count)) for edge, count in re.findall(rf'{metric}_bucket{{le="(.+?)"}} (\S+)', text)
        ]
        return next((edge for edge, count in buckets if count >= share * buckets[-1][1]), float("nan"))

    def _decision_processes(self) -> list[int]:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        name = b"trainwright_operator.decision_process"
        return [int(pid) for pid in children if name in Path(f"/proc/{pid}/cmdline").read_bytes()]


def peak_bytes(pid: int) -> int:
    """Return the largest resident memory of a process so far."""
    return 1024 * int(re.findall(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[0])
