"""Gangs that train by random plans, compared with one process: on one device with staged collectives, or by NCCL."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from plan_cases import case

from gpu_checks.findings import Finding, judged
from gpu_checks.hardware import Hardware
from gpu_checks.running import Subject

GANG = Path(__file__).resolve().parents[2] / "tests" / "worker" / "equivalence_gang.py"
PROCESSES = 4
PLANS_OF_EACH = 6
GANG_SECONDS = 200.0
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"gpt": {"layers": 4, "hidden_size": 64, "heads": 8, "sequence_length": 32, "vocabulary_size": 61}},
    "llama": {
        "llama": {
            "layers": 3, "hidden_size": 64, "heads": 8, "key_value_heads": 4, "sequence_length": 32,
            "vocabulary_size": 61, "intermediate_size": 128,
        }
    },
    "t5": {"t5": {"layers": 2, "hidden_size": 64, "heads": 4, "sequence_length": 16, "vocabulary_size": 61}},
    "moe": {
        "moe": {
            "layers": 2, "hidden_size": 64, "heads": 4, "sequence_length": 16, "vocabulary_size": 61, "experts": 4,
            "intermediate_size": 64,
        }
    },
    "vit": {"vit": {"layers": 3, "hidden_size": 64, "heads": 4, "image_size": 32, "patch_size": 8, "classes": 8}},
    "wide_resnet": {"wide_resnet": {"base_channels": 4, "image_size": 64, "classes": 8}},
}  # fmt: skip
EXACT = 1e-4, 1e-3
"""Largest errors of losses and gradients in float32: equality up to the order of sums."""
ROUNDED = 0.01, 0.1
"""Largest errors of any value in a half format, relative to float32."""
NORMALISED = 1e-4, math.inf
"""Batch normalisation of few rows magnifies rounding: a CPU's own gradients in float32 are 0.03 to 0.8 off those in float64,
and 0.1 to 1.4 after weights change by 1e-6. Those of layers are compared by `family_layers`, of plans on CPUs.
"""


def subjects(hardware: Hardware) -> Iterator[Subject]:
    """Yield the models on processes that share one device."""
    yield from gang_subjects(hardware, "staged", 2 if hardware.small else PROCESSES, share_device=True)


def gang_subjects(
    hardware: Hardware, backend: str, processes: int, *, share_device: bool, names: tuple[str, ...] = tuple(MODELS)
) -> Iterator[Subject]:
    """Yield the models on this number of processes with a back end; they share one device or have one each."""
    names = ("gpt",) if hardware.small else names
    cases = {name: _cases(name, MODELS[name], processes, hardware) for name in names}
    halves = ("bfloat16",) if hardware.small else ("bfloat16", "float16")
    cases |= {
        f"gpt, {dtype}": _cases("gpt", {**MODELS["gpt"], "dtype": dtype}, processes, hardware) for dtype in halves
    }
    subject = f"{len(cases)} models, {backend}, {processes} processes"
    gang = {"GANG_WORLD": str(processes), "GANG_BACKEND": backend}
    if share_device:
        gang["GANG_DEVICE"] = str(hardware.device)
    yield Subject(subject, partial(_compare, hardware, cases, gang))


def _cases(family: str, model: dict[str, Any], processes: int, hardware: Hardware) -> list[dict[str, Any]]:
    """Return the cases of `equivalence_gang.py`; batch normalisation is over each replica's own rows."""
    label, normalises_batches = f"{family}-{model.get('dtype', 'float32')}", family == "wide_resnet"
    return [
        case(
            f"{label}-{seed}",
            model,
            seed,
            devices=processes,
            # Batch normalisation magnifies the rounding of weights, so that losses after an update differ.
            steps=1 if hardware.small or normalises_batches else 3,
            by_piece=normalises_batches,
        )
        for seed in range(2 if hardware.small else PLANS_OF_EACH)
    ]


def _compare(hardware: Hardware, cases: dict[str, list[dict[str, Any]]], gang: dict[str, str]) -> Iterator[Finding]:
    """Run all plans in one gang, since starting one takes longer than most plans."""
    done, failure = run_gang(GANG, hardware, json.dumps([case for some in cases.values() for case in some]), gang)
    answers = {answer["name"]: answer for answer in done}
    for name, some in cases.items():
        yield _finding(
            f"{name}, {len(some)} plans, {gang['GANG_BACKEND']}", [answers.get(case["name"]) for case in some]
        )
    if failure:
        raise RuntimeError(f"the gang ended after {len(done)} plans: {failure}")


def run_gang(program: Path, hardware: Hardware, orders: str, gang: dict[str, str]) -> tuple[list[Any], str]:
    """Run a program of `eight_processes` on its orders. Returns what it wrote, empty if nothing, and how it failed, empty if not."""
    given, result = hardware.folder / "orders.json", hardware.folder / "result.json"
    given.write_text(orders, encoding="utf-8")
    result.unlink(missing_ok=True)
    run = subprocess.run(
        [sys.executable, str(program), str(given), str(result)], check=False, capture_output=True, text=True,
        timeout=GANG_SECONDS, env={**os.environ, **gang},
    )  # fmt: skip
    found = json.loads(result.read_text(encoding="utf-8")) if result.exists() else []
    return found, run.stderr.strip()[-300:] or f"code {run.returncode}" if run.returncode else ""


def _finding(subject: str, answers: list[dict[str, Any] | None]) -> Finding:
    found = [answer for answer in answers if answer is not None]
    loss, gradient = (
        max((answer[name] for answer in found), default=float("nan")) for name in ("loss_error", "gradient_error")
    )
    max_loss, max_gradient = NORMALISED if "wide_resnet" in subject else ROUNDED if "float16" in subject else EXACT
    missing = [answer["name"] for answer in found if answer["missing"]]
    holds = len(found) == len(answers) and not missing and loss < max_loss and gradient < max_gradient
    measured = f"gradients {gradient:.1g}, losses {loss:.1g}, {len(found)} plans"
    gradients = f"gradients below {max_gradient:g}, " if math.isfinite(max_gradient) else ""
    return judged(subject, measured, f"{gradients}losses below {max_loss:g} of one process", holds=holds)
