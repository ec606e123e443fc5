"""Galvatron-BMW's table IV: partitions balanced by memory, by time and by both, on 16 A100 without CKPT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainwright.model import Model
from trainwright.plan import Plan
from trainwright.search import Candidate
from trainwright_papers.comparison import Comparison, Grid, Record, ReportProgress, format_figure, inverted_pairs
from trainwright_papers.galvatron_search import PartitionBalance, SearchSpace
from trainwright_papers.galvatron_settings import SIXTEEN_A100, BatchSizeSearch, galvatron_problem, samples_per_second
from trainwright_papers.galvatron_strategies import (
    BI_OBJECTIVE,
    ONE_F_ONE_B,
    SearchedStrategy,
    is_without_checkpointing,
)
from trainwright_papers.published import PartitionFigures, Throughput, galvatron_figures

_BATCH_SIZES = BatchSizeSearch(growth=4, bisections=1)
BALANCES: Mapping[str, SearchedStrategy] = {
    "Galvatron (1F1B+Mem)": SearchedStrategy(
        SearchSpace(is_without_checkpointing, PartitionBalance.MEMORY, ONE_F_ONE_B), _BATCH_SIZES, ()
    ),
    "Galvatron (1F1B+Time)": SearchedStrategy(
        SearchSpace(is_without_checkpointing, PartitionBalance.TIME, ONE_F_ONE_B), _BATCH_SIZES, ()
    ),
    BI_OBJECTIVE: SearchedStrategy(
        SearchSpace(is_without_checkpointing, PartitionBalance.BOTH, ONE_F_ONE_B), _BATCH_SIZES, ()
    ),
}
"""Strategies by the names of the table's rows."""

HEADINGS = ("model", "partition", "paper", "batch", "blocks by stage", "ours", "batch", "blocks by stage")


@dataclass(frozen=True)
class _PartitionPrediction:
    budget: int
    model: str
    name: str
    published: Throughput
    published_layers: tuple[int, ...]
    found: Candidate | None
    layers: tuple[int, ...]

    @property
    def predicted(self) -> float:
        return samples_per_second(self.found) if self.found else 0.0

    def record(self) -> Record:
        return {
            "machines": SIXTEEN_A100.title,
            "budget_gigabytes": self.budget,
            "model": self.model,
            "strategy": self.name,
            "published_samples_per_second": self.published.samples_per_second,
            "published_batch": self.published.batch,
            "published_layers": list(self.published_layers),
            "predicted_samples_per_second": self.predicted or None,
            "predicted_batch": self.found.plan.global_batch_size if self.found else 0,
            "predicted_layers": list(self.layers),
            "predicted_out_of_memory": self.found is None,
            "plan": self.found.plan.summary() if self.found else None,
        }

    def cells(self) -> tuple[str, ...]:
        return (
            self.model.replace("-Huge", ""),
            self.name.removeprefix("Galvatron (1F1B+").removesuffix(")"),
            format_figure(self.published.samples_per_second),
            str(self.published.batch),
            _join(self.published_layers),
            format_figure(self.predicted) if self.found else "OOM",
            str(self.found.plan.global_batch_size) if self.found else "",
            _join(self.layers),
        )


def partition_balance_table(*, report_progress: ReportProgress) -> Comparison:
    """Rebuild table IV."""
    rows: list[_PartitionPrediction] = []
    published = galvatron_figures().balance
    columns = [(budget, *item) for budget, models in published.items() for item in models.items()]
    for finished, (budget, model, figures) in enumerate(columns):
        report_progress(f"partitions of {model}, {budget} GB", finished / len(columns))
        rows += _predict(budget, model, figures)
    groups = _by_column(rows)
    agreeing = sum(not _inverted(members) for _, members in groups)
    return Comparison(
        name="galvatron-4",
        title="Galvatron-BMW, table IV: samples a second by how the partition is balanced",
        records=tuple(row.record() for row in rows),
        grids=tuple(
            Grid(
                f"{SIXTEEN_A100.title}, {budget} GB of each device",
                HEADINGS,
                tuple(row.cells() for row in rows if row.budget == budget),
            )
            for budget in published
        ),
        agreement={"columns": len(groups), "columns_in_the_paper's_order": agreeing},
        notes=(
            f"All pairs stand in the paper's order in {agreeing} of {len(groups)} columns.",
            *(_describe_inversions(label, members) for label, members in groups if _inverted(members)),
        ),
    )


def _predict(budget: int, model: str, figures: Mapping[str, PartitionFigures]) -> list[_PartitionPrediction]:
    rows = []
    for name, figure in figures.items():
        strategy = BALANCES[name]

        def evaluate(batch: int, strategy: SearchedStrategy = strategy) -> Candidate | None:
            return strategy.best(galvatron_problem(SIXTEEN_A100, model, budget, batch))

        found = strategy.batch_sizes.best(evaluate)
        layers = blocks_per_stage(galvatron_problem(SIXTEEN_A100, model, budget, 8).model, found.plan) if found else ()
        rows.append(_PartitionPrediction(budget, model, name, Throughput.of(figure.cell), figure.layers, found, layers))
    return rows


def blocks_per_stage(model: Model, plan: Plan) -> tuple[int, ...]:
    """Return the number of blocks (tensor-parallel layers) of each stage."""
    return tuple(
        sum(model.kind_of(layer).is_tensor_parallel for layer in range(stage.first, stage.end))
        for stage in plan.pipelines[0].stages
    )


def _by_column(rows: Sequence[_PartitionPrediction]) -> list[tuple[str, list[_PartitionPrediction]]]:
    groups: dict[str, list[_PartitionPrediction]] = {}
    for row in rows:
        groups.setdefault(f"{row.model}, {row.budget} GB", []).append(row)
    return list(groups.items())


def _inverted(rows: Sequence[_PartitionPrediction]) -> list[tuple[str, str]]:
    """Return published pairs (better, worse) whose predicted order is reversed; predicted ties are not inverted."""
    names = [row.name for row in rows]
    published = [-(row.published.samples_per_second or 0.0) for row in rows]
    predicted = [-row.predicted for row in rows]
    return [
        (a, b)
        for a, b in inverted_pairs(names, published, predicted)
        if predicted[names.index(a)] > predicted[names.index(b)]
    ]


def _describe_inversions(label: str, rows: Sequence[_PartitionPrediction]) -> str:
    pairs = "; ".join(f"{a} before {b}" for a, b in _inverted(rows))
    batches = ", ".join(
        f"{row.name.removeprefix('Galvatron ')} {row.found.plan.global_batch_size if row.found else 0} for "
        f"{row.published.batch}"
        for row in rows
    )
    return (
        f"{label}: the paper has {pairs}. The batches that fit here differ less between the partitions than the "
        f"paper's ({batches}), so that the more even times win."
    )


def _join(layers: Sequence[int]) -> str:
    return " ".join(str(count) for count in layers)
