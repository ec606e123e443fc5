"""Estimates of published throughputs from data sheets alone, beside what was measured, and how well the two agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import TypeVar

import numpy as np

from trainwright.accelerators import data_sheet, estimate_profiles
from trainwright.cost.context import CostContext
from trainwright.cost.estimate import estimate_with_context
from trainwright.error_bands import ErrorBand, plan_kind
from trainwright.throughput import flops_per_row
from trainwright_papers.comparison import Comparison, Grid, ReportProgress, format_figure, spearman
from trainwright_papers.published_rows import PublishedRow, read_rows
from trainwright_papers.published_runtimes import runtime_of, source_runtime

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """Published and estimated throughput, in tokens per second and GPU.

    Attributes:
        plan_kind: how the plan divides the model.
        utilisation_per_token: model FLOP utilisation of one token per second.
        reason: shortfall of memory if the plan is called infeasible.
    """

    row: PublishedRow
    plan_kind: str
    estimated: float
    utilisation_per_token: float
    peak_memory_bytes: int
    reason: str | None

    @property
    def published(self) -> float:
        return self.row.measured_tokens_per_second_per_gpu

    @property
    def error(self) -> float:
        """Relative error of the estimate; above 0 where it is too fast."""
        return self.estimated / self.published - 1

    def record(self) -> dict[str, object]:
        row = self.row
        return {
            "source": row.source,
            "model": row.model,
            "gpu": row.gpu,
            "gpus": row.gpus,
            "plan": self.plan_kind,
            "published_tokens_per_second_per_gpu": self.published,
            "predicted_tokens_per_second_per_gpu": self.estimated,
            "relative_error": self.error,
            "peak_memory_bytes": self.peak_memory_bytes,
            "reason": self.reason,
        }


def score(row: PublishedRow) -> ScoredRow:
    """Estimate a row's plan. Raises ValueError for a model, a GPU or a machine that is not known."""
    runtime = runtime_of(row)
    model = row.model_in(source_runtime(row).attention)
    cluster = row.cluster()
    plan = row.plan(len(model.layers), cluster, sequence_parallel=runtime.sequence_parallel)
    tensor_float32 = row.dtype == "tf32"
    profiles = estimate_profiles(
        model,
        [row.gpu_name],
        tensor_degrees=[row.tp],
        rows=sorted({1, row.micro_batch}),
        tensor_float32=tensor_float32,
        runtime=runtime,
        power_watts={row.gpu_name: row.power_watts} if row.power_watts else None,
    )
    found = estimate_with_context(plan, CostContext(model, cluster, profiles, "adam", runtime))
    peak = data_sheet(row.gpu_name).flops_per_second(model.dtype, tensor_float32=tensor_float32)
    return ScoredRow(
        row,
        plan_kind(plan),
        plan.global_batch_size * row.sequence / found.iteration_seconds / row.gpus,
        flops_per_row(model) / row.sequence / peak,
        found.peak_memory_bytes,
        found.reason,
    )


@dataclass(frozen=True, slots=True)
class Agreement:
    """Agreement of some rows.

    Attributes:
        mean_error: mean of |estimated − published| / published.
        bias: mean of (estimated − published) / published.
        utilisation_rank: Spearman's correlation of the model FLOP utilisation.
        refused: rows called infeasible.
    """

    rows: int
    mean_error: float
    bias: float
    largest_error: float
    utilisation_rank: float | None
    refused: int

    @classmethod
    def of(cls, scored: Sequence[ScoredRow]) -> Agreement:
        return cls(
            len(scored),
            fmean(abs(one.error) for one in scored),
            fmean(one.error for one in scored),
            max((one.error for one in scored), key=abs),
            spearman(
                [one.published * one.utilisation_per_token for one in scored],
                [one.estimated * one.utilisation_per_token for one in scored],
            ),
            sum(one.reason is not None for one in scored),
        )

    def texts(self) -> tuple[str, ...]:
        return (
            str(self.rows),
            f"{self.mean_error:.1%}",
            f"{self.bias:+.1%}",
            f"{self.largest_error:+.1%}",
            format_figure(self.utilisation_rank),
            str(self.refused),
        )


HEADINGS = ("rows", "mean error", "mean", "worst", "rank of MFU", "called infeasible")


def groups(scored: Iterable[ScoredRow], key: Callable[[ScoredRow], Key]) -> dict[Key, list[ScoredRow]]:
    """Group rows by a key, in the order of their first appearance."""
    found: dict[Key, list[ScoredRow]] = {}
    for one in scored:
        found.setdefault(key(one), []).append(one)
    return found


GROUPINGS: dict[str, Callable[[ScoredRow], str]] = {
    "source": lambda one: one.row.source,
    "GPU": lambda one: one.row.gpu,
    "kind of plan": lambda one: one.plan_kind,
}


def bands_of(scored: Sequence[ScoredRow]) -> list[ErrorBand]:
    """Return the error bands of all rows, by generation, by kind of plan, and by both."""

    def keys(one: ScoredRow) -> Iterator[tuple[str | None, str | None]]:
        generation = data_sheet(one.row.gpu_name).generation
        yield from product((None, generation), (None, one.plan_kind))

    ratios: dict[tuple[str | None, str | None], list[float]] = {}
    for one in scored:
        for key in keys(one):
            ratios.setdefault(key, []).append(1 + one.error)
    return [
        ErrorBand(generation, kind, len(some), *(round(float(q), 3) for q in np.quantile(some, (0.1, 0.9))))
        for (generation, kind), some in sorted(ratios.items(), key=lambda item: [name or "" for name in item[0]])
    ]


@dataclass(frozen=True, slots=True)
class ScoredTable:
    """Estimated rows of a table, and how many were left out for which reason."""

    rows: tuple[ScoredRow, ...]
    left_out: Mapping[str, int]


def scored_table(table: Path, report_progress: ReportProgress) -> ScoredTable:
    """Estimate every row of a table. Raises ValueError if there is none that can be estimated."""
    rows = list(read_rows(table))
    scored, left_out = [], Counter[str]()
    for number, row in enumerate(rows):
        if isinstance(row, str):
            left_out[row] += 1
            continue
        report_progress(f"{row.model} of {row.source}", number / len(rows))
        try:
            scored.append(score(row))
        except ValueError as error:
            left_out[str(error)] += 1
    if not scored:
        raise ValueError(f"{table}: no row can be estimated: {'; '.join(left_out) or 'the table has none'}")
    return ScoredTable(tuple(scored), left_out)


def published_comparison(found: ScoredTable) -> Comparison:
    """Compare the estimated rows with what was published."""
    scored, left_out = found.rows, found.left_out
    by = {name: groups(scored, key) for name, key in GROUPINGS.items()}
    by_source = {name: Agreement.of(some) for name, some in by["source"].items()}
    everything = Agreement.of(scored)
    mean_of_sources = fmean(one.mean_error for one in by_source.values())
    return Comparison(
        name="published",
        title="Published throughputs, tokens a second and GPU",
        records=tuple(one.record() for one in scored),
        grids=(_row_grid(scored), *(_group_grid(name, found) for name, found in by.items())),
        agreement={
            "mean_of_sources_error": mean_of_sources,
            "utilisation_rank": everything.utilisation_rank,
            "called_infeasible": everything.refused,
            **{f"by {name}": {key: _document(some) for key, some in found.items()} for name, found in by.items()},
        },
        notes=(
            f"Mean of the sources' mean errors: {mean_of_sources:.1%}; over all {len(scored)} rows {everything.mean_error:.1%}.",
            f"Rank correlation of the model FLOP utilisation: {format_figure(everything.utilisation_rank)}.",
            f"Rows called infeasible, although they ran: {everything.refused}.",
            *(f"Rows left out: {number}: {reason}." for reason, number in left_out.items()),
        ),
    )


def _document(scored: Sequence[ScoredRow]) -> dict[str, float | int | None]:
    found = Agreement.of(scored)
    return {
        "rows": found.rows,
        "mean_error": found.mean_error,
        "bias": found.bias,
        "utilisation_rank": found.utilisation_rank,
        "called_infeasible": found.refused,
    }


def _group_grid(name: str, found: dict[str, list[ScoredRow]]) -> Grid:
    return Grid(
        f"by {name}", (name, *HEADINGS), tuple((key, *Agreement.of(some).texts()) for key, some in found.items())
    )


def _row_grid(scored: Sequence[ScoredRow]) -> Grid:
    headings = ("model", "GPUs", "tp pp dp", "rows × tokens", "published", "ours", "error", "GiB")
    return Grid("rows", headings, tuple(_row_texts(one) for one in scored))


def _row_texts(one: ScoredRow) -> tuple[str, ...]:
    row = one.row
    return (
        row.model,
        f"{row.gpus} {row.gpu}",
        f"{row.tp} {row.pp} {row.dp}",
        f"{row.micro_batch} × {row.sequence}",
        f"{one.published:.0f}",
        f"{one.estimated:.0f}",
        f"{one.error:+.1%}",
        f"{one.peak_memory_bytes / 2**30:.0f}{'' if one.reason is None else ' !'}",
    )
