"""Runs of `trainwright tune` on this machine: seconds, errors of predictions, and speed-ups that are none.

    python benchmarks/tune_runs.py [--runs 10] [--busy] [--plan deploy/examples/tiny.yaml] [--write FILE.md]

Every run begins with nothing kept. A pair of equal plans and one of a plan on one device and on two are measured beside, each run,
since only of these is the truth known: the equal ones may never be told apart, the others always. `--busy` runs another program that
takes a core meanwhile. Needs two CPU cores and nothing else to do on them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trainwright import documents
from trainwright.cluster import Device
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.strategy import Strategy
from trainwright.worker_api import REPORT_MARKER, Gang, GangNode, TrialReport, TrialSeriesReport, TrialSeriesTask
from trainwright_operator.flow.trials.comparison import explain_doubt
from trainwright_operator.local.manifest import read_manifest

ROOT = Path(__file__).resolve().parents[1]
NODES = tuple(GangNode(f"core-{number}", (0,), "cpu-bench-1-thread") for number in range(2))


@dataclass(frozen=True, slots=True)
class TuneRun:
    """One run: its seconds, (name, predicted, measured) of its trials, the speed-up that it states, and its two pairs."""

    seconds: float
    trials: tuple[tuple[str, float, float], ...]
    speedup: float | None
    equal_told_apart: bool
    halves_told_apart: bool
    message: str

    @property
    def errors(self) -> list[float]:
        return [predicted / measured - 1 for _, predicted, measured in self.trials]


def tune(plan: Path, folder: Path) -> dict[str, Any]:
    """Return the status of a run that reuses nothing."""
    command = [
        sys.executable,
        "-m",
        "trainwright",
        "tune",
        str(plan),
        "--state",
        str(folder / "state"),
        "--cpu-devices",
        "2",
    ]
    subprocess.run(
        command, check=True, env=os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}, stdout=subprocess.DEVNULL
    )
    status: dict[str, Any] = yaml.safe_load((folder / "state" / "status.yaml").read_text())["status"]
    return status


def data_parallel(model: Model, rows: int, devices: int) -> Plan:
    """Return the plan of whole replicas on some of the devices, of one row each at a time."""
    used = tuple(Device(node.name, 0) for node in NODES[:devices])
    run = LayerRun(0, len(model.layers), Strategy(1, devices), (1,) * devices)
    return Plan(len(model.layers), rows, (Pipeline(rows // devices, devices, (Stage(used, (run,)),)),))


def measure_pairs(model: Model, rows: int, folder: Path) -> tuple[bool, bool]:
    """Return whether the comparison tells two equal plans apart, and one device from two."""
    one, two = data_parallel(model, rows, 1), data_parallel(model, rows, 2)
    path = folder / "order.json"
    path.write_text(documents.dumps(TrialSeriesTask(Gang(NODES), model, (two, two, one))))
    shown = subprocess.run(
        [sys.executable, "-m", "trainwright_worker", "local", "--order", str(path)],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    line = next(line for line in shown.splitlines() if line.startswith(REPORT_MARKER))
    report: TrialSeriesReport = documents.loads(line.removeprefix(REPORT_MARKER), TrialSeriesReport)
    first, second, single = report.trials
    return is_told_apart(*sorted((first, second), key=seconds_of)), is_told_apart(first, single)


def seconds_of(report: TrialReport) -> float:
    return statistics.median(report.iteration_seconds)


def is_told_apart(winner: TrialReport, baseline: TrialReport) -> bool:
    return not explain_doubt(winner, baseline)


@contextmanager
def busy(*, is_busy: bool) -> Iterator[None]:
    """Let another program take a core meanwhile."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if is_busy else None
    try:
        yield
    finally:
        if process is not None:
            process.kill()


def run_once(plan: Path) -> TuneRun:
    """Run everything once."""
    spec = read_manifest(plan).spec
    model, rows = Model.of(spec.model.family, Dtype.FLOAT32), spec.training.global_batch_size
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        status = tune(plan, Path(folder))
        seconds = time.monotonic() - begin
        trials = tuple(
            (trial["name"], trial["predictedSeconds"], trial["measuredSeconds"])
            for trial in status["trials"]
            if "measuredSeconds" in trial
        )
        message = next(each["message"] for each in status["conditions"] if each["type"] == "Succeeded")
        speedup = status["winner"].get("speedupOverBaseline")
        return TuneRun(seconds, trials, speedup, *measure_pairs(model, rows, Path(folder)), message)


def as_markdown(runs: list[TuneRun], *, is_busy: bool) -> str:
    """Return the runs as a table, and what they sum up to."""
    lines = [
        f"`tune` on two CPU devices, {'beside one busy program' if is_busy else 'on a quiet machine'}, {len(runs)} runs.\n",
        "| run | seconds | median error | worst error | speed-up stated | equal plans told apart | one device told from two |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for number, run in enumerate(runs, start=1):
        worst = max(run.errors, key=abs)
        stated = f"{run.speedup:.2f}" if run.speedup is not None else "none"
        pairs = " | ".join("yes" if apart else "no" for apart in (run.equal_told_apart, run.halves_told_apart))
        lines.append(
            f"| {number} | {run.seconds:.0f} | {statistics.median(run.errors):+.0%} | {worst:+.0%} | {stated} | {pairs} |"
        )
    errors = [abs(error) for run in runs for error in run.errors]
    within = sum(error <= 0.2 for error in errors)
    lines.append(
        f"\n{within} of {len(errors)} predictions within 20 %; {sum(run.equal_told_apart for run in runs)} false speed-ups of "
        f"{len(runs)} pairs of equal plans; one device told from two in {sum(run.halves_told_apart for run in runs)} of "
        f"{len(runs)}; {max(run.seconds for run in runs):.0f} s at most."
    )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the table, and write it where asked, with the figures beside it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--plan", type=Path, default=ROOT / "deploy" / "examples" / "tiny.yaml")
    parser.add_argument("--write", type=Path, metavar="FILE.md")
    arguments = parser.parse_args()
    runs: list[TuneRun] = []
    with busy(is_busy=arguments.busy):
        for number in range(arguments.runs):
            runs.append(run_once(arguments.plan))
            print(f"run {number + 1}: {runs[-1].seconds:.0f} s; {runs[-1].message}", flush=True)
    text = as_markdown(runs, is_busy=arguments.busy)
    print(text)
    if arguments.write is not None:
        arguments.write.write_text(text)
        figures = [{"seconds": run.seconds, "trials": run.trials, "speedup": run.speedup} for run in runs]
        arguments.write.with_suffix(".json").write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
