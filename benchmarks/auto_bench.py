"""Benchmark of `auto`: never worse than other searches, near the optimum of tiny problems, and its growth.

Fails if a plan is slower than another search's or the stored one, or if CPU seconds over AMP's grew.
"""

from __future__ import annotations

import gc
import math
import resource
import statistics
import time

import numpy as np
from rich.console import Console
from rich.table import Table

from auto_cases import NVLINK, TYPES
from auto_never_worse import Timed, losses, outcomes, regressions, table
from auto_optima import optima
from trainwright.accelerators import data_sheet
from trainwright.answer.question import estimate_from_data_sheets
from trainwright.cluster import Accelerator, Cluster, Node, Port
from trainwright.families import Gpt
from trainwright.layer import Dtype
from trainwright.search import Problem
from trainwright.training import Training

GPT = Gpt(24, 2048, 16, 2048, 50304)
TWO, FOUR = ("A100", "V100-32"), ("A100", "V100-32", "A10G", "T4")
REACH = ((TWO, 128, "0.4"), (TWO, 512, "2"), (FOUR, 4096, "20"))
"""Types, number of devices, and target CPU seconds."""
FIRST_CPU_SECONDS = 0.1
"""Limit for the first feasible plan."""
GROWTH = (16, 64, 256, 1024, 4096)
CARD = Port(2e-5, 1.25e10)
EXACT = 1e-9


def main() -> None:
    """Print the tables."""
    console = Console(width=140)
    console.rule("auto")
    gc.freeze()  # as the command does
    found = list(outcomes())
    console.print(table(found))
    quick = [one for one in found if one.amp_cpu_seconds > 0]
    firsts = sorted(one.first_cpu_seconds for one in found if math.isfinite(one.seconds))
    console.print(
        f"first feasible plan after {statistics.median(firsts):.3f} s (median), {firsts[-1]:.3f} s (at most), within "
        f"{FIRST_CPU_SECONDS} s on {sum(one <= FIRST_CPU_SECONDS for one in firsts)} of {len(firsts)}; where AMP is "
        f"quick {sum(one.cpu_seconds for one in quick) / sum(one.amp_cpu_seconds for one in quick):.1f} times its CPU seconds"
    )
    worse = [*losses(found), *regressions(found)]
    console.print(_near_the_optimum())
    console.print(_reach())
    console.print(_growth())
    console.print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10:.0f} MiB")
    if worse:
        raise SystemExit("\n".join(["auto got worse:", *worse]))


def _near_the_optimum() -> str:
    """Return a summary of tiny problems: on how many `auto` is as fast as the fastest of all plans."""
    start = time.process_time()
    differences = [one.difference("auto") for one in optima()]
    spent = time.process_time() - start
    slower = [one for one in differences if one > EXACT]
    faster = [-one for one in differences if one < -EXACT]
    equal = len(differences) - len(slower) - len(faster)
    text = (
        f"{len(differences)} tiny problems, {spent:.1f} s: as fast as enumeration on {equal}, slower on {len(slower)}"
    )
    if slower:
        text += f" by up to {max(slower):.2%}"
    if faster:
        text += f", and on {len(faster)} faster, by up to {max(faster):.2%}: degrees may differ inside a stage, too"
    return text


def _reach() -> Table:
    shown = Table("devices", "types", "CPU s", "reach", "first plan s", "iteration s", "plan", title="auto, GPT 1.3B")
    for types, devices, reach in REACH:
        found = Timed.of(_problem(types, devices), "auto")
        plan = found.best.plan.summary()[:70] if found.best else "-"
        times = (f"{found.cpu_seconds:.2f}", reach, f"{found.first_cpu_seconds:.3f}", f"{found.seconds:.4f}")
        shown.add_row(f"{devices:,}", str(len(types)), *times, plan)
    return shown


def _growth() -> str:
    seconds = [Timed.of(_problem(TWO, devices), "auto").cpu_seconds for devices in GROWTH]
    exponent = np.polyfit(np.log(GROWTH), np.log(seconds), 1)[0]
    shown = ", ".join(f"{count:,}: {spent:.2f}" for count, spent in zip(GROWTH, seconds, strict=True))
    return f"CPU seconds by devices of two types: {shown}; they grow as devices ^ {exponent:.2f}"


def _problem(types: tuple[str, ...], devices: int) -> Problem:
    """Return a problem on nodes of eight, equally many of each type; the batch grows with the devices."""
    accelerators = tuple(Accelerator(TYPES[name], int(data_sheet(TYPES[name]).memory_bytes.value)) for name in types)
    nodes = tuple(
        Node(f"{name}-{number}", TYPES[name], 8, CARD, NVLINK)
        for name in types
        for number in range(devices // 8 // len(types))
    )
    training = Training(4 * devices, GPT).in_format(Dtype.FLOAT16)
    profiles = estimate_from_data_sheets(training, [accelerator.name for accelerator in accelerators], devices=devices)
    return Problem(Cluster(accelerators, nodes), training.model, profiles, training.global_batch_size)
