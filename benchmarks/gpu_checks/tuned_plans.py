"""`trainwright tune` on one GPU: the whole way from a manifest to the winner."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import yaml

from gpu_checks.findings import Finding, judged, predicted, skipped
from gpu_checks.hardware import Hardware
from gpu_checks.running import Subject
from trainwright_operator.local.machine import read_gpus

AIM, LIMIT = 0.2, 0.5
PLAN = {
    "apiVersion": "trainwright.dev/v1alpha1",
    "kind": "TrainingPlan",
    "metadata": {"name": "one-gpu"},
    "spec": {
        "model": {"gpt": {"layers": 4, "hiddenSize": 512, "heads": 8, "sequenceLength": 512, "vocabularySize": 4096}},
        "training": {"globalBatchSize": 8},
        "devices": {"max": 1},
        "search": {"planner": "Amp"},
        "trials": {"topK": 1, "baseline": "None"},
    },
}


def subjects(hardware: Hardware) -> Iterator[Subject]:
    """Yield one plan on this machine's first GPU."""
    yield Subject("tune", partial(_find, hardware))


def _find(hardware: Hardware) -> Iterator[Finding]:
    free = [gpu for gpu in read_gpus() if not gpu.problem]
    if not free:
        yield skipped("tune", "nvidia-smi shows no GPU that is whole and free")
        return
    path, state = hardware.folder / "one-gpu.yaml", hardware.folder / "tune"
    path.write_text(yaml.safe_dump(PLAN))
    environment = os.environ | {"XDG_CACHE_HOME": str(hardware.folder / "cache")}
    command = [sys.executable, "-m", "trainwright", "tune", str(path), "--state", str(state)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    yield judged("tune ends", f"exit code {done.returncode}", "exit code 0", holds=done.returncode == 0)
    if done.returncode:
        yield skipped("its winner", (done.stderr or done.stdout)[-300:])
        return
    status = yaml.safe_load((state / "status.yaml").read_text())["status"]
    names = [accelerator["name"] for accelerator in status["cluster"]["accelerators"]]
    yield judged("its accelerator", ", ".join(names), free[0].name, holds=names == [free[0].name])
    winner = status["winner"]
    error = winner["predictedSeconds"] / winner["measuredSeconds"] - 1
    figures = (f"{winner['measuredSeconds']:.4g} s", f"{winner['predictedSeconds']:.4g} s")
    yield predicted("its winner", figures, error, aim=AIM, limit=LIMIT)
