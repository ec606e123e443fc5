"""Estimates of published throughputs from data sheets alone, beside what was measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from trainwright.accelerators import data_sheet, estimate_profiles
from trainwright.cost.context import CostContext
from trainwright.cost.estimate import estimate_with_context
from trainwright.error_bands import plan_kind
from trainwright.throughput import flops_per_row
from trainwright_papers.comparison import ReportProgress
from trainwright_papers.published_models import PROJECT_NAMES, ModelNames
from trainwright_papers.published_rows import PublishedRow, read_table
from trainwright_papers.published_runtimes import drops_of, framework_of, preset_of, runtime_of
from trainwright_papers.published_sources import row_sources

Key = TypeVar("Key")

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """Published and estimated throughput, in tokens (or images) per second and GPU.

    Attributes:
        plan_kind: how the plan divides the model.
        framework: trainer that ran it; None: another one, or unknown.
        utilisation_per_token: model FLOP utilisation of one token per second.
        reason: shortfall of memory if the plan is called infeasible.
    """

    row: PublishedRow
    plan_kind: str
    framework: str | None
    estimated: float
    utilisation_per_token: float
    peak_memory_bytes: int
    reason: str | None

    @property
    def published(self) -> float:
        return self.row.measured

    @property
    def error(self) -> float:
        """Relative error of the estimate; above 0 where it is too fast."""
        return self.estimated / self.published - 1

    @property
    def memory_error(self) -> float | None:
        """Relative error of the estimated memory; above 0 where it is too much; None where it was not measured."""
        measured = self.row.measured_memory_gib
        return None if measured is None else self.peak_memory_bytes / (measured * _GIB) - 1

    @property
    def generation(self) -> str:
        return data_sheet(self.row.gpu_name).generation

    def record(self) -> dict[str, object]:
        row = self.row
        unit = "images" if row.measured_tokens_per_second_per_gpu is None else "tokens"
        return {
            "source": row.source,
            "model": row.model,
            "gpu": row.gpu,
            "gpus": row.gpus,
            "plan": self.plan_kind,
            "framework": self.framework,
            f"published_{unit}_per_second_per_gpu": self.published,
            f"predicted_{unit}_per_second_per_gpu": self.estimated,
            "relative_error": self.error,
            "peak_memory_bytes": self.peak_memory_bytes,
            "relative_memory_error": self.memory_error,
            "reason": self.reason,
        }


def score(row: PublishedRow, names: ModelNames = PROJECT_NAMES) -> ScoredRow:
    """Estimate a row's plan. Raises ValueError for a model, a GPU, a machine or a preset that is not known."""
    runtime = runtime_of(row)
    named = names.model(row.model, row.source)
    model = row.model_of(named, drops=drops_of(row, named.family))
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
    estimate = estimate_with_context(plan, CostContext(model, cluster, profiles, "adam", runtime))
    peak = data_sheet(row.gpu_name).flops_per_second(model.dtype, tensor_float32=tensor_float32)
    return ScoredRow(
        row,
        plan_kind(plan),
        framework_of(row),
        plan.global_batch_size * row.sequence / estimate.iteration_seconds / row.gpus,
        flops_per_row(model) / row.sequence / peak,
        estimate.peak_memory_bytes,
        estimate.reason,
    )


def groups(scored: Iterable[ScoredRow], key: Callable[[ScoredRow], Key]) -> dict[Key, list[ScoredRow]]:
    """Group rows by a key, in the order of their first appearance."""
    members: dict[Key, list[ScoredRow]] = {}
    for each in scored:
        members.setdefault(key(each), []).append(each)
    return members


def source_of(scored: ScoredRow) -> str:
    return scored.row.source


@dataclass(frozen=True, slots=True)
class ScoredTable:
    """Estimated rows of tables, how many were left out for which reason, and sentences on what was not recognised."""

    rows: tuple[ScoredRow, ...]
    left_out: Mapping[str, int]
    remarks: tuple[str, ...] = ()


def scored_table(tables: Sequence[Path], names: ModelNames, report_progress: ReportProgress) -> ScoredTable:
    """Estimate every row of some tables. Raises ValueError if there is none that can be estimated."""
    read = [read_table(table) for table in tables]
    rows = [row for table in read for row in table.rows]
    scored, left_out = [], Counter[str]()
    for number, row in enumerate(rows):
        if isinstance(row, str):
            left_out[row] += 1
            continue
        report_progress(f"{row.model} of {row.source}", number / len(rows))
        try:
            scored.append(score(row, names))
        except ValueError as error:
            left_out[str(error)] += 1
    if not scored:
        paths = ", ".join(map(str, tables))
        raise ValueError(f"{paths}: no row can be estimated: {'; '.join(left_out) or 'there is none'}")
    unread = Counter(column for table in read for column in table.unread_columns)
    return ScoredTable(
        tuple(scored), left_out, (*_unread(unread), *_without_facts(scored), *_other_names(scored, names))
    )


def _unread(columns: Counter[str]) -> list[str]:
    return [f"Columns that are not read: {len(columns)}: {', '.join(columns)}."] if columns else []


def _without_facts(scored: Sequence[ScoredRow]) -> list[str]:
    """Return a sentence for each source of which nothing is stated; its rows are of the preset that is taken for their plan."""
    unknown = Counter((each.row.source, preset_of(each.row)) for each in scored if each.row.source not in row_sources())
    return [
        f"No facts of the source {source}: {count} rows, taken as the preset {preset} with what their columns say."
        for (source, preset), count in unknown.items()
    ]


def _other_names(scored: Sequence[ScoredRow], names: ModelNames) -> list[str]:
    """Return a sentence that lists the models that rows call by another name."""
    models = {each.row.model: names.model(each.row.model, each.row.source) for each in scored}
    taken = [f"{name} as {model}" for name, model in models.items() if name != model.name]
    return [f"Models by another name: {', '.join(taken)}."] if taken else []
