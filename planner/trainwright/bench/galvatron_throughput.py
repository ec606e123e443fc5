"""Galvatron-BMW's tables II, III and V: throughput of every strategy under every memory budget."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from trainwright.bench.agreement import MemoryAgreement, mean_ratio, spearman
from trainwright.bench.batch_sizes import samples_per_second
from trainwright.bench.comparison import Comparison, Grid, Record, Tell, number
from trainwright.bench.figures import OUT_OF_MEMORY, Throughput, ThroughputFigures
from trainwright.bench.galvatron_settings import Machines, galvatron_problem
from trainwright.bench.galvatron_strategies import BASE, DEEPSPEED, PP, SDP, STRATEGIES, TP
from trainwright.bench.orderings import Rates, inversions_of, told
from trainwright.search import Candidate

ALL = "all columns"
MOST_TOLD = 6
SETTINGS = (
    (
        "Float32 (TF32 on A100), attention stored, blocks' activations scaled to table I (dropout's masks and outputs, which "
        "our operators leave out), one gibibyte of each budget for the runtime."
    ),
    (
        "GPipe where the paper does not name 1F1B; a single stage takes the batch in one; searches try up to two micro-batches "
        "for each stage (figure 4 has eight on four stages). 3D is 2 × 2 × 2, with a data degree of 4 on 16 devices and "
        "4 × 4 × 4 on 64. A question mark stands where the paper cannot be read."
    ),
)
REASONS: Mapping[str, str] = {
    PP: "the paper's GPipe hardly gains from memory (one process drives all devices, and starts each micro-batch on "
    "each), ours is bounded by the bubble alone",
    TP: "the paper's all-reduces of activations reach less of the link than ours, which have their nominal rate",
    SDP: "our gathers of weights and sums of gradients reach the links' nominal rate and hide behind computation",
    DEEPSPEED: "the paper does not say its degrees beyond eight devices, nor its micro-batches",
    BASE: "the paper's 1F1B gains less than ours over recomputing under GPipe",
}
"""Why a strategy may stand elsewhere than in the paper."""


@dataclass(frozen=True)
class _Cell:
    budget: int
    model: str
    strategy: str
    published: Throughput | None
    found: Candidate | None

    @property
    def predicted(self) -> float | None:
        return samples_per_second(self.found) if self.found else None

    @property
    def is_timed(self) -> bool:
        """Whether it has a throughput on both sides."""
        return self.found is not None and self.published is not None and self.published.samples_per_second is not None

    def record(self, machines: Machines) -> Record:
        published = self.published
        return {
            "machines": machines.title,
            "budget_gigabytes": self.budget,
            "model": self.model,
            "strategy": self.strategy,
            "published_readable": published is not None,
            "published_samples_per_second": published.samples_per_second if published else None,
            "published_batch": published.batch if published else None,
            "predicted_samples_per_second": self.predicted,
            "predicted_batch": self.found.plan.global_batch_size if self.found else 0,
            "predicted_out_of_memory": self.found is None,
            "plan": self.found.plan.summary() if self.found else None,
            "peak_memory_bytes": self.found.estimate.peak_memory_bytes if self.found else None,
        }

    def texts(self) -> tuple[str, str]:
        if self.published is None:
            paper = "?"
        else:
            rate = self.published.samples_per_second
            paper = OUT_OF_MEMORY if rate is None else number(rate)
        return paper, OUT_OF_MEMORY if self.predicted is None else number(self.predicted)


def throughput(name: str, tables: Mapping[Machines, ThroughputFigures], *, tell: Tell) -> Comparison:
    """A table, on one kind of machines or several."""
    columns, done = sum(len(figures.models) for figures in tables.values()), 0
    records: list[Record] = []
    grids: list[Grid] = []
    agreement: dict[str, dict[str, float | int | None]] = {}
    for machines, figures in tables.items():
        own: list[_Cell] = []
        for model in figures.models:
            tell(f"{model} on {machines.title}", done / columns)
            done += 1
            own += _cells(machines, figures, model)
        records += [cell.record(machines) for cell in own]
        grids += _grids(machines, figures, own)
        agreement |= {f"{machines.title}, {label}": found for label, found in _agreements(own, figures)}
    numeral = next(iter(tables.values())).table
    return Comparison(
        name=name,
        title=f"Galvatron-BMW, table {numeral}: samples a second",
        records=tuple(records),
        grids=tuple(grids),
        agreement=agreement,
        notes=(
            *(_in_words(label, found) for label, found in agreement.items() if label.endswith(ALL)),
            *SETTINGS,
            *told(inversions_of(_columns(records)), REASONS, most=MOST_TOLD),
        ),
    )


def _cells(machines: Machines, figures: ThroughputFigures, model: str) -> Iterator[_Cell]:
    """Budgets ascending: what fits in less memory fits in more, so that the search of the batch begins there."""
    fitting: dict[str, int] = {}
    for budget, strategies in sorted(figures.budgets.items()):
        found: dict[str, Candidate | None] = {}
        for strategy in sorted(strategies, key=list(STRATEGIES).index):
            found[strategy] = best = _best(machines, model, budget, strategy, found, fitting)
            if best is not None:
                fitting[strategy] = best.plan.global_batch_size
        for strategy in strategies:
            yield _Cell(budget, model, strategy, figures.cell(budget, strategy, model), found[strategy])


def _best(  # noqa: PLR0913, PLR0917 - a cell's place in the table
    machines: Machines,
    model: str,
    budget: int,
    strategy: str,
    found: Mapping[str, Candidate | None],
    fitting: Mapping[str, int],
) -> Candidate | None:
    """The best plan of a strategy's own search, or of a strategy that is part of it, at whose batch the search begins."""
    ours = STRATEGIES[strategy]
    parts = [part for name in ours.includes if (part := found.get(name)) is not None]
    known = [fitting.get(strategy, 0), *(part.plan.global_batch_size for part in parts)]
    own = ours.climb.best(
        lambda batch: ours.best(galvatron_problem(machines, model, budget, batch)),
        first=max(known) or ours.least_batch(machines.devices),
    )
    return max([*parts, *([own] if own else [])], key=samples_per_second, default=None)


def _grids(machines: Machines, figures: ThroughputFigures, cells: Sequence[_Cell]) -> Iterator[Grid]:
    """Four models beside each other are as wide as a terminal."""
    by_place = {(cell.budget, cell.strategy, cell.model): cell.texts() for cell in cells}
    for budget, strategies in figures.budgets.items():
        for first in range(0, len(figures.models), 4):
            models = figures.models[first : first + 4]
            headings = ("strategy", *(text for model in models for text in (_short(model), "ours")))
            rows = tuple(
                (strategy, *(text for model in models for text in by_place[budget, strategy, model]))
                for strategy in strategies
            )
            yield Grid(f"{machines.title}, {budget} GB of each device", headings, rows)


def _short(model: str) -> str:
    return model.replace("-Huge", "").replace("-Large", "")


def _agreements(
    cells: Sequence[_Cell], figures: ThroughputFigures
) -> Iterator[tuple[str, dict[str, float | int | None]]]:
    """By column, and over all of them."""
    columns = [
        (f"{budget} GB, {model}", [cell for cell in cells if (cell.budget, cell.model) == (budget, model)])
        for budget in figures.budgets
        for model in figures.models
    ]
    found = [(label, _agreement(members)) for label, members in columns]
    yield from found
    orders = [each["spearman"] for _, each in found if each["spearman"] is not None]
    total = _agreement(cells)
    total["spearman"] = sum(orders) / len(orders) if orders else None
    yield ALL, total


def _agreement(cells: Sequence[_Cell]) -> dict[str, float | int | None]:
    readable = [cell for cell in cells if cell.published is not None]
    timed = [cell for cell in cells if cell.is_timed]
    memory = MemoryAgreement.of(
        [cell.published.samples_per_second is not None for cell in readable if cell.published],
        [cell.found is not None for cell in readable],
    )
    published = [cell.published.samples_per_second or 0.0 for cell in timed if cell.published]
    predicted = [cell.predicted or 0.0 for cell in timed]
    return {
        "spearman": spearman(published, predicted),
        "mean_ratio": mean_ratio(published, predicted),
        "cells": memory.plans,
        "memory_agreeing": memory.agreeing,
        "wrongly_fitting": memory.wrongly_fitting,
        "wrongly_out_of_memory": memory.wrongly_failing,
    }


def _columns(records: Sequence[Record]) -> list[Rates]:
    """Every column's strategies with a throughput on both sides."""
    columns: dict[tuple[str, int, str], dict[str, tuple[float, float]]] = {}
    for record in records:
        place = record["machines"], record["budget_gigabytes"], record["model"]
        rates = record["published_samples_per_second"], record["predicted_samples_per_second"]
        column = columns.setdefault(place, {})
        if None not in rates:
            column[record["strategy"]] = rates
    return list(columns.values())


def _in_words(label: str, found: Mapping[str, float | int | None]) -> str:
    return (
        f"{label}: out of memory or not agrees in {found['memory_agreeing']} of {found['cells']} cells (ours fits wrongly "
        f"in {found['wrongly_fitting']}, fails wrongly in {found['wrongly_out_of_memory']}); mean of the columns' "
        f"Spearman's ρ {number(found['spearman'])}; predicted over published {number(found['mean_ratio'])} in the mean."
    )
