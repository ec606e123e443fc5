"""Galvatron-BMW's tables II, III and V: throughput by strategy, model and memory budget."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from trainwright.search import Candidate
from trainwright_papers.comparison import (
    Comparison,
    Grid,
    MemoryAgreement,
    Record,
    ReportProgress,
    ThroughputPairs,
    count_inversions,
    describe_inversions,
    format_figure,
    geometric_mean_ratio,
    spearman,
)
from trainwright_papers.galvatron_settings import Machines, galvatron_problem, samples_per_second
from trainwright_papers.galvatron_strategies import BASE, DEEPSPEED, PP, SDP, STRATEGIES, TP
from trainwright_papers.published import OUT_OF_MEMORY, Throughput, ThroughputFigures

ALL_COLUMNS = "all columns"
DESCRIBED_INVERSIONS = 6
MODELS_PER_GRID = 4  # fits a terminal of 100 columns
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
    SDP: "our gathers of weights and sums of gradients reach the links' nominal rate and overlap with computation",
    DEEPSPEED: "the paper does not say its degrees beyond eight devices, nor its micro-batches",
    BASE: "the paper's 1F1B gains less than ours over recomputing under GPipe",
}
"""Reasons why the predicted rank of a strategy may differ from the published one."""


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
        """Return whether both sides have a throughput."""
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
            paper = OUT_OF_MEMORY if rate is None else format_figure(rate)
        return paper, OUT_OF_MEMORY if self.predicted is None else format_figure(self.predicted)


def throughput_table(
    name: str, tables: Mapping[Machines, ThroughputFigures], *, report_progress: ReportProgress
) -> Comparison:
    """Rebuild a table of one or several kinds of machines."""
    columns, finished = sum(len(figures.models) for figures in tables.values()), 0
    records: list[Record] = []
    grids: list[Grid] = []
    agreement: dict[str, dict[str, float | int | None]] = {}
    for machines, figures in tables.items():
        cells: list[_Cell] = []
        for model in figures.models:
            report_progress(f"{model} on {machines.title}", finished / columns)
            finished += 1
            cells += _predict_cells(machines, figures, model)
        records += [cell.record(machines) for cell in cells]
        grids += _grids(machines, figures, cells)
        agreement |= {f"{machines.title}, {label}": found for label, found in _agreements(cells, figures)}
    numeral = next(iter(tables.values())).table
    return Comparison(
        name=name,
        title=f"Galvatron-BMW, table {numeral}: samples a second",
        records=tuple(records),
        grids=tuple(grids),
        agreement=agreement,
        notes=(
            *(_describe_agreement(label, found) for label, found in agreement.items() if label.endswith(ALL_COLUMNS)),
            *SETTINGS,
            *describe_inversions(count_inversions(_columns(records)), REASONS, limit=DESCRIBED_INVERSIONS),
        ),
    )


def _predict_cells(machines: Machines, figures: ThroughputFigures, model: str) -> Iterator[_Cell]:
    """Yield the cells of a model.

    Budgets ascend: a batch size that fits in less memory fits in more, so that the next search starts from it.
    """
    fitting_batches: dict[str, int] = {}
    for budget, strategies in sorted(figures.budgets.items()):
        best_by_strategy: dict[str, Candidate | None] = {}
        for strategy in sorted(strategies, key=list(STRATEGIES).index):
            best = _best(machines, model, budget, strategy, best_by_strategy, fitting_batches)
            best_by_strategy[strategy] = best
            if best is not None:
                fitting_batches[strategy] = best.plan.global_batch_size
        for strategy in strategies:
            yield _Cell(budget, model, strategy, figures.cell(budget, strategy, model), best_by_strategy[strategy])


def _best(  # noqa: PLR0913, PLR0917 - the coordinates of a cell
    machines: Machines,
    model: str,
    budget: int,
    strategy: str,
    best_by_strategy: Mapping[str, Candidate | None],
    fitting_batches: Mapping[str, int],
) -> Candidate | None:
    """Return the best plan of a strategy, those of included strategies among them.

    The search starts from the largest batch size that is known to fit.
    """
    strategy_search = STRATEGIES[strategy]
    included = [candidate for name in strategy_search.includes if (candidate := best_by_strategy.get(name)) is not None]
    known = [fitting_batches.get(strategy, 0), *(candidate.plan.global_batch_size for candidate in included)]
    own = strategy_search.batch_sizes.best(
        lambda batch: strategy_search.best(galvatron_problem(machines, model, budget, batch)),
        first=max(known) or strategy_search.min_batch(machines.devices),
    )
    return max([*included, *([own] if own else [])], key=samples_per_second, default=None)


def _grids(machines: Machines, figures: ThroughputFigures, cells: Sequence[_Cell]) -> Iterator[Grid]:
    """Yield grids of MODELS_PER_GRID models each."""
    texts = {(cell.budget, cell.strategy, cell.model): cell.texts() for cell in cells}
    for budget, strategies in figures.budgets.items():
        for first in range(0, len(figures.models), MODELS_PER_GRID):
            models = figures.models[first : first + MODELS_PER_GRID]
            headings = ("strategy", *(text for model in models for text in (_short_name(model), "ours")))
            rows = tuple(
                (strategy, *(text for model in models for text in texts[budget, strategy, model]))
                for strategy in strategies
            )
            yield Grid(f"{machines.title}, {budget} GB of each device", headings, rows)


def _short_name(model: str) -> str:
    return model.replace("-Huge", "").replace("-Large", "")


def _agreements(
    cells: Sequence[_Cell], figures: ThroughputFigures
) -> Iterator[tuple[str, dict[str, float | int | None]]]:
    """Yield the agreement of each column, then of all columns."""
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
    yield ALL_COLUMNS, total


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
        "mean_ratio": geometric_mean_ratio(published, predicted),
        "cells": memory.plans,
        "memory_agreeing": memory.agreeing,
        "wrongly_fitting": memory.wrongly_fitting,
        "wrongly_out_of_memory": memory.wrongly_failing,
    }


def _columns(records: Sequence[Record]) -> list[ThroughputPairs]:
    """Return published and predicted throughput of each column, without strategies that lack one of them."""
    columns: dict[tuple[str, int, str], dict[str, tuple[float, float]]] = {}
    for record in records:
        place = record["machines"], record["budget_gigabytes"], record["model"]
        rates = record["published_samples_per_second"], record["predicted_samples_per_second"]
        column = columns.setdefault(place, {})
        if None not in rates:
            column[record["strategy"]] = rates
    return list(columns.values())


def _describe_agreement(label: str, found: Mapping[str, float | int | None]) -> str:
    return (
        f"{label}: out of memory or not agrees in {found['memory_agreeing']} of {found['cells']} cells (ours fits wrongly "
        f"in {found['wrongly_fitting']}, fails wrongly in {found['wrongly_out_of_memory']}); mean of the columns' "
        f"Spearman's ρ {format_figure(found['spearman'])}; predicted over published {format_figure(found['mean_ratio'])} in the mean."
    )
