"""Results of the other searches on the cases, run once, one search at a time, and stored as a table in `results`.

`python benchmarks/auto_references.py CACHE [FIRST END]` runs those of the cases FIRST … END - 1 that the folder
CACHE lacks, and writes the table of its whole content. CACHE stores the plans too: `--recost` instead of FIRST END
only evaluates them again, after a change of the cost model.
"""

from __future__ import annotations

import csv
import json
import math
import os
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from auto_cases import SEARCHES_OF_DEGREES, Case, cases
from trainwright import documents
from trainwright.cost.estimate import estimate_with_context
from trainwright.plan import Plan
from trainwright.search import SEARCHES, NoFeasiblePlan, SearchControl
from trainwright.search.plan_variants import VariantSearch, fastest_variant

RESULTS = Path(__file__).parent / "results" / "auto_references.csv"
BUDGETS = ((64, 3.0), (256, 6.0), (1024, 10.0))
"""CPU-second budgets of one search, by the largest number of devices that each is for."""
HARD_LIMIT_RATIO = 6
"""Ratio to its budget after which a search that ignores the budget is killed."""
NOTHING = "no feasible plan"


@dataclass(frozen=True)
class CpuControl(SearchControl):
    """Search budget in CPU seconds of this process, so that answers do not depend on other load."""

    cpu_deadline_seconds: float = math.inf

    @classmethod
    def of(cls, budget_seconds: float) -> CpuControl:
        """Return a control with a budget that starts now."""
        return cls(cpu_deadline_seconds=time.process_time() + budget_seconds)

    def expired(self) -> bool:
        return time.process_time() >= self.cpu_deadline_seconds


@dataclass(frozen=True)
class Answer:
    """Result of one search on one case.

    Attributes:
        seconds: iteration seconds of its best plan; infinite if it found none.
        why: reason if it found none.
    """

    case: int
    line: str
    search: str
    seconds: float
    cpu_seconds: float
    why: str = ""


def budget_of(case: Case) -> float:
    """Return the CPU-second budget of a search."""
    return next(budget for most, budget in BUDGETS if case.devices <= most)


def answer(case: Case, search: str) -> tuple[Answer, str]:
    """Return the search's best plan within its budget, and the plan's document (empty without a plan)."""
    problem = case.problem()
    start = time.process_time()
    try:
        found = VariantSearch(SEARCHES_OF_DEGREES[search], fastest_variant)(problem, CpuControl.of(budget_of(case)), 1)
    except NoFeasiblePlan:
        return Answer(case.number, str(case), search, math.inf, time.process_time() - start, NOTHING), ""
    spent = time.process_time() - start
    best = found[0]
    return Answer(case.number, str(case), search, best.estimate.iteration_seconds, spent), documents.dumps(best.plan)


def answer_apart(case: Case, search: str, kept: Path) -> None:
    """Run `answer` in a child process with a CPU limit, and write the result to `kept`."""
    child = os.fork()
    if child == 0:
        _limit(HARD_LIMIT_RATIO * budget_of(case))
        try:
            found, plan = answer(case, search)
        except (ValueError, ArithmeticError, LookupError, MemoryError) as error:
            found, plan = Answer(case.number, str(case), search, math.inf, 0.0, f"{type(error).__name__}: {error}"), ""
        _write(kept, found, plan)
        os._exit(0)
    os.waitpid(child, 0)
    if not kept.exists():
        spent = HARD_LIMIT_RATIO * budget_of(case)
        _write(kept, Answer(case.number, str(case), search, math.inf, spent, "ended by the limit"), "")


def _limit(seconds: float) -> None:
    limit = math.ceil(time.process_time() + seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    resource.setrlimit(resource.RLIMIT_AS, (6 * 2**30, 6 * 2**30))


def _write(kept: Path, found: Answer, plan: str) -> None:
    text = json.dumps(vars(found) | {"plan": json.loads(plan) if plan else None}, ensure_ascii=False)
    whole = kept.with_suffix(".part")
    whole.write_text(text, encoding="utf-8")
    whole.rename(kept)


def kept_answer(kept: Path, case: Case) -> Answer | None:
    """Return the stored result of this case; None if it is missing or belongs to another case with that number."""
    if not kept.exists():
        return None
    found = json.loads(kept.read_text(encoding="utf-8"))
    found.pop("plan")
    return Answer(**found) if found["line"] == str(case) else None


def searches() -> list[str]:
    """Return all searches except our own."""
    return [name for name in SEARCHES if name != "auto"]


def fill(cache: Path, chosen: Sequence[Case]) -> None:
    """Run missing searches, small cases first."""
    for case in sorted(chosen, key=lambda case: (case.devices, case.number)):
        for search in searches():
            kept = cache / f"{case.number:03}-{search}.json"
            if kept_answer(kept, case) is None:
                kept.unlink(missing_ok=True)
                answer_apart(case, search, kept)


def recost(cache: Path) -> None:
    """Evaluate the stored plans with the current cost model."""
    for case in cases():
        problem = None
        for search in searches():
            kept = cache / f"{case.number:03}-{search}.json"
            found = kept_answer(kept, case)
            document = json.loads(kept.read_text(encoding="utf-8"))["plan"] if found else None
            if found is None or document is None:
                continue
            plan = documents.loads(json.dumps(document), Plan)
            problem = problem or case.problem()
            cost = estimate_with_context(plan, problem.cost_context)
            seconds = cost.iteration_seconds if cost.feasible else math.inf
            _write(kept, replace(found, seconds=seconds), documents.dumps(plan))


def write_results(cache: Path) -> None:
    """Write the table: a row for each case, two columns for each search; a dash marks no plan."""
    names = searches()
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["case", "line", "budget", *(f"{name} {what}" for name in names for what in ("s", "CPU s"))])
        for case in cases():
            found = [kept_answer(cache / f"{case.number:03}-{name}.json", case) for name in names]
            if any(found):
                row = [cell for one in found for cell in _cells(one)]
                table.writerow([case.number, str(case), budget_of(case), *row])


def _cells(found: Answer | None) -> tuple[str, str]:
    if found is None:
        return "", ""
    shown = f"{found.seconds:.10g}" if math.isfinite(found.seconds) else "-"
    return shown, f"{found.cpu_seconds:.2f}"


def references() -> Iterator[tuple[Case, dict[str, tuple[float, float]]]]:
    """Yield each case with every search's (iteration seconds of the best plan, CPU seconds); infinite if it found none.

    Raises ValueError if the table belongs to other cases.
    """
    with RESULTS.open(encoding="utf-8", newline="") as file:
        rows = {int(row["case"]): row for row in csv.DictReader(file)}
    for case in cases():
        row = rows.get(case.number)
        if row is None:
            continue
        if row["line"] != str(case):
            raise ValueError(f"case {case.number} is {case}, but {RESULTS.name} is about {row['line']}; make it anew")
        names = [column.removesuffix(" CPU s") for column in row if column.endswith(" CPU s")]
        yield (
            case,
            {
                name: (math.inf if row[f"{name} s"] == "-" else float(row[f"{name} s"]), float(row[f"{name} CPU s"]))
                for name in names
                if row[f"{name} s"]
            },
        )


def main(arguments: Sequence[str]) -> None:
    """Run the searches and write the table, as the module describes."""
    cache, *bounds = arguments
    Path(cache).mkdir(parents=True, exist_ok=True)
    if bounds == ["--recost"]:
        recost(Path(cache))
    else:
        first, end = (int(bounds[0]), int(bounds[1])) if bounds else (0, len(cases()))
        fill(Path(cache), cases()[first:end])
    write_results(Path(cache))


if __name__ == "__main__":
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = "1"
    main(sys.argv[1:])
