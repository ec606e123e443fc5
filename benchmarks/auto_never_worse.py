"""Comparison of `auto` on every case with the best plan of any other search, and with AMP's CPU seconds in the same run.

`python benchmarks/auto_never_worse.py` writes the table that later runs are compared with.
"""

from __future__ import annotations

import csv
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from auto_cases import SEARCHES_OF_DEGREES, Case
from auto_references import references
from trainwright.search import Candidate, NoFeasiblePlan, Problem, SearchControl, SearchProgress
from trainwright.search.plan_variants import VariantSearch, fastest_variant

RESULTS = Path(__file__).parent / "results" / "auto_results.csv"
SAME, FASTER = 1e-9, 1e-6
"""Relative differences: rounding tolerance, and threshold of strictly faster."""
CPU_REGRESSION_RATIO = 1.5
"""Growth of CPU seconds over AMP's that counts as a regression."""
YARDSTICK_CPU_SECONDS = 1.0
"""AMP's search is rerun on cases on which it took less."""
ASKED_ALPA_DEVICES = 8
"""Most devices on which `auto` asks Alpa at effort 1, and is compared with it."""
FIELDS = ("seconds", "CPU s", "first CPU s", "AMP CPU s")


@dataclass(frozen=True)
class Outcome:
    """Result of one case.

    Attributes:
        others: iteration seconds of the best plan of each other search; infinite if it found none.
        seconds: iteration seconds of our plan.
        cpu_seconds, first_cpu_seconds: CPU seconds of our search, and until its first feasible plan.
        amp_cpu_seconds: CPU seconds of AMP's search; 0 if it was not run.
    """

    case: Case
    others: Mapping[str, float]
    seconds: float
    cpu_seconds: float
    first_cpu_seconds: float
    amp_cpu_seconds: float

    @property
    def best_other(self) -> float:
        return min(self.others.values())

    @property
    def ratio(self) -> float:
        """Return our seconds over the best other's: below 1 where ours is faster, 1 where no search finds a plan."""
        return self.seconds / self.best_other if math.isfinite(min(self.seconds, self.best_other)) else 1.0

    @property
    def is_slower(self) -> bool:
        return self.seconds > self.best_other * (1 + SAME)

    @property
    def is_faster(self) -> bool:
        return self.seconds < self.best_other * (1 - FASTER)


@dataclass(frozen=True)
class Timed:
    """Best candidate of a search (None where none fits), its CPU seconds, and those until its first feasible plan."""

    best: Candidate | None
    cpu_seconds: float
    first_cpu_seconds: float

    @classmethod
    def of(cls, problem: Problem, search: str) -> Timed:
        """Run a search and measure it."""
        firsts: list[float] = []
        start = time.process_time()

        def note(progress: SearchProgress) -> None:
            if progress.best_seconds is not None and not firsts:
                firsts.append(time.process_time() - start)

        try:
            run = VariantSearch(SEARCHES_OF_DEGREES[search], fastest_variant)
            best = run(problem, SearchControl(report=note), 1)[0]
        except NoFeasiblePlan:
            best = None
        spent = time.process_time() - start
        return cls(best, spent, firsts[0] if firsts else spent)

    @property
    def seconds(self) -> float:
        return self.best.estimate.iteration_seconds if self.best else math.inf


def outcome(case: Case, others: Mapping[str, float], *, amp_is_quick: bool = True, search: str = "auto") -> Outcome:
    """Run our search and, if it is quick, AMP's, each on a new problem."""
    amp_seconds = Timed.of(case.problem(), "amp").cpu_seconds if amp_is_quick else 0.0
    ours = Timed.of(case.problem(), search)
    return Outcome(case, others, ours.seconds, ours.cpu_seconds, ours.first_cpu_seconds, amp_seconds)


def outcomes() -> Iterator[Outcome]:
    """Yield the outcome of every case on which the other searches ran."""
    # Standard error shows the progress even if the tables go to a file.
    for case, found in track([*references()], "auto on every case", console=Console(stderr=True)):
        asked = {name for name in found if name != "alpa" or case.devices <= ASKED_ALPA_DEVICES}
        others = {name: found[name][0] for name in asked}
        yield outcome(case, others, amp_is_quick=found["amp"][1] < YARDSTICK_CPU_SECONDS)


CLASSES: Mapping[str, Callable[[Case], bool]] = {
    "one type": lambda case: case.types == 1,
    "two types": lambda case: case.types == 2,
    "three types": lambda case: case.types == 3,
    "four types": lambda case: case.types == 4,
    "unequal devices": lambda case: case.types > 1,
    "2–4 devices": lambda case: case.devices <= 4,
    "5–12": lambda case: 4 < case.devices <= 12,
    "13–64": lambda case: 12 < case.devices <= 64,
    "65–1,024": lambda case: case.devices > 64,
    "memory tight": lambda case: case.memory_ratio < 1,
    "slow rack or node": lambda case: case.topology != "flat",
    "all": lambda _: True,
}


def table(found: Sequence[Outcome]) -> Table:
    """Build the table by class of cases. Cases without any plan count only in the first column."""
    shown = Table(title="auto against the best of all other searches")
    for name in ("cases", "", "never slower", "faster", "only ours", "slower", "time", "CPU s"):
        shown.add_column(name, justify="left" if not name else "right")
    for name, belongs in CLASSES.items():
        chosen = [one for one in found if belongs(one.case)]
        answered = [one for one in chosen if math.isfinite(min(one.seconds, one.best_other))]
        if not answered:
            continue
        alone = sum(math.isinf(one.best_other) for one in answered)
        ratios = [one.ratio for one in answered if math.isfinite(max(one.seconds, one.best_other))]
        slower = sum(one.is_slower for one in answered)
        shown.add_row(
            str(len(chosen)),
            name,
            f"{len(answered) - slower} of {len(answered)}",
            str(sum(one.is_faster for one in answered) - alone),
            str(alone),
            str(slower),
            f"×{statistics.geometric_mean(ratios):.3f}" if ratios else "–",
            f"{sum(one.cpu_seconds for one in chosen):.1f}",
        )
    return shown


def losses(found: Iterable[Outcome]) -> list[str]:
    """Return a sentence for each case where another search is faster."""
    return [
        f"{one.case.number}: {one.case}: {min(one.others, key=lambda name: one.others[name])} takes "
        f"{one.best_other:.6g} s, auto {one.seconds:.6g} s"
        for one in found
        if one.is_slower
    ]


def regressions(found: Sequence[Outcome]) -> list[str]:
    """Return what got worse since the table was written: slower plans, CPU seconds over AMP's. Empty without a table."""
    if not RESULTS.exists():
        return []
    with RESULTS.open(encoding="utf-8", newline="") as file:
        rows = {int(row["case"]): row for row in csv.DictReader(file)}
    known = [(one, rows[one.case.number]) for one in found if one.case.number in rows]
    worse = [
        f"{one.case.number}: {one.case}: {one.seconds:.6g} s, was {float(row['seconds']):.6g} s"
        for one, row in known
        if row["line"] == str(one.case) and one.seconds > float(row["seconds"]) * (1 + SAME)
    ]
    quick = [(one, row) for one, row in known if one.amp_cpu_seconds > 0]
    now = sum(one.cpu_seconds for one, _ in quick) / sum(one.amp_cpu_seconds for one, _ in quick)
    before = sum(float(row["CPU s"]) for _, row in quick) / sum(float(row["AMP CPU s"]) for _, row in quick)
    if now > before * CPU_REGRESSION_RATIO:
        worse.append(f"auto takes {now:.2f} times AMP's CPU seconds, it was {before:.2f} times")
    return worse


def write_results(found: Iterable[Outcome]) -> None:
    """Write the table that later runs are compared with."""
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["case", "line", *FIELDS])
        for one in found:
            times = (one.cpu_seconds, one.first_cpu_seconds, one.amp_cpu_seconds)
            shown = [f"{one.seconds:.10g}", *(f"{seconds:.3f}" for seconds in times)]
            rows.writerow([one.case.number, str(one.case), *shown])


if __name__ == "__main__":
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = "1"
    every = list(outcomes())
    write_results(every)
    sys.stdout.write("\n".join(losses(every)) + "\n")
