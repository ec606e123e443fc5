"""Agreement of estimates with published throughputs: errors, memory, and the order of plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from trainwright_papers.comparison import Comparison, Grid, format_figure, spearman
from trainwright_papers.published_bands import OWN_TRIALS, LeftOutSource, left_out_sources
from trainwright_papers.published_scores import ScoredRow, ScoredTable, groups, source_of

MIN_RANKED = 3
"""Rows that a group needs for a rank correlation."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Agreement of some rows.

    Attributes:
        mean_error: mean of |estimated − published| / published.
        bias: mean of (estimated − published) / published.
        utilisation_rank: Spearman's correlation of the model FLOP utilisation.
        refused: rows called infeasible.
        memory_error: mean of (estimated − measured) / measured memory of the rows that state it.
    """

    rows: int
    mean_error: float
    bias: float
    largest_error: float
    utilisation_rank: float | None
    refused: int
    memory_error: float | None

    @classmethod
    def of(cls, scored: Sequence[ScoredRow]) -> Agreement:
        memory_errors = [each.memory_error for each in scored if each.memory_error is not None]
        return cls(
            len(scored),
            fmean(abs(each.error) for each in scored),
            fmean(each.error for each in scored),
            max((each.error for each in scored), key=abs),
            spearman(
                [each.published * each.utilisation_per_token for each in scored],
                [each.estimated * each.utilisation_per_token for each in scored],
            ),
            sum(each.reason is not None for each in scored),
            fmean(memory_errors) if memory_errors else None,
        )

    def texts(self) -> tuple[str, ...]:
        return (
            str(self.rows),
            f"{self.mean_error:.1%}",
            f"{self.bias:+.1%}",
            f"{self.largest_error:+.1%}",
            format_figure(self.utilisation_rank),
            str(self.refused),
            "–" if self.memory_error is None else f"{self.memory_error:+.1%}",
        )

    def document(self) -> dict[str, float | int | None]:
        return {
            "rows": self.rows,
            "mean_error": self.mean_error,
            "bias": self.bias,
            "utilisation_rank": self.utilisation_rank,
            "called_infeasible": self.refused,
            "memory_error": self.memory_error,
        }


HEADINGS = ("rows", "mean error", "mean", "worst", "rank of MFU", "called infeasible", "memory")


@dataclass(frozen=True, slots=True)
class PlanOrder:
    """Order of the plans that sources ran of one model on equally many equal GPUs.

    Attributes:
        rank: Spearman's correlation of published and estimated throughput, mean of the groups.
        regret: share of the best published throughput that the plan estimated as the fastest loses, mean of the groups.
    """

    groups: int
    rank: float | None
    regret: float

    @classmethod
    def of(cls, scored: Sequence[ScoredRow]) -> PlanOrder | None:
        """Return the order over all groups of at least three plans; None without a group. Several runs of a plan count as their mean."""
        rates = [
            [_mean_rates(runs) for runs in groups(group, _plan).values()] for group in groups(scored, _task).values()
        ]
        rates = [plans for plans in rates if len(plans) >= MIN_RANKED]
        if not rates:
            return None
        ranks = [rank for plans in rates if (rank := spearman(*zip(*plans, strict=True))) is not None]
        regrets = [
            1 - max(plans, key=lambda rate: rate[1])[0] / max(published for published, _ in plans) for plans in rates
        ]
        return cls(len(rates), fmean(ranks) if ranks else None, fmean(regrets))

    def document(self) -> dict[str, float | int | None]:
        return {"groups": self.groups, "rank": self.rank, "regret_of_the_first": self.regret}


def _task(scored: ScoredRow) -> tuple[object, ...]:
    """Return what rows have in common that differ in their plans alone."""
    row = scored.row
    return row.source, row.model, row.gpu, row.gpus, row.machine, row.gpus_per_node, row.sequence, row.dtype


def _plan(scored: ScoredRow) -> tuple[object, ...]:
    """Return what runs of one plan have in common."""
    row = scored.row
    return row.tp, row.pp, row.dp, row.sharding, row.micro_batch, row.global_batch, row.recompute, scored.estimated


def _mean_rates(scored: Sequence[ScoredRow]) -> tuple[float, float]:
    """Return the published and the estimated throughput of runs of one plan."""
    return fmean(each.published for each in scored), fmean(each.estimated for each in scored)


GROUPINGS: dict[str, Callable[[ScoredRow], str]] = {
    "source": source_of,
    "GPU": lambda each: each.row.gpu,
    "kind of plan": lambda each: each.plan_kind,
}


def published_comparison(table: ScoredTable, *, leave_out: bool = False) -> Comparison:
    """Compare the estimated rows with what was published; `leave_out` tests the bands that other sources make."""
    scored = table.rows
    by = {name: groups(scored, key) for name, key in GROUPINGS.items()}
    by_source = {name: Agreement.of(some) for name, some in by["source"].items()}
    everything = Agreement.of(scored)
    order = PlanOrder.of(scored)
    mean_of_sources = fmean(each.mean_error for each in by_source.values())
    tested = left_out_sources(scored) if leave_out else []
    return Comparison(
        name="published",
        title="Published throughputs, tokens (or images) a second and GPU",
        records=tuple(each.record() for each in scored),
        grids=(
            _row_grid(scored),
            *(_group_grid(name, members) for name, members in by.items()),
            _order_grid(by["source"]),
            *([_left_out_grid(tested)] if tested else []),
        ),
        agreement={
            "mean_of_sources_error": mean_of_sources,
            "utilisation_rank": everything.utilisation_rank,
            "called_infeasible": everything.refused,
            "memory_error": everything.memory_error,
            "order_of_plans": order.document() if order else None,
            **{
                f"by {name}": {key: Agreement.of(some).document() for key, some in members.items()}
                for name, members in by.items()
            },
            **({"sources_left_out": [each.document() for each in tested]} if tested else {}),
        },
        notes=(
            f"Mean of the sources' mean errors: {mean_of_sources:.1%}; over all {len(scored)} rows {everything.mean_error:.1%}.",
            f"Rank correlation of the model FLOP utilisation: {format_figure(everything.utilisation_rank)}.",
            f"Rows called infeasible, although they ran: {everything.refused}.",
            *_memory_note(scored, everything),
            *_order_note(order),
            *_left_out_note(tested),
            *table.remarks,
            *(f"Rows left out: {number}: {reason}." for reason, number in table.left_out.items()),
        ),
    )


def _memory_note(scored: Sequence[ScoredRow], everything: Agreement) -> list[str]:
    if everything.memory_error is None:
        return []
    errors = [abs(each.memory_error) for each in scored if each.memory_error is not None]
    return [
        f"Memory of {len(errors)} rows that state it: {everything.memory_error:+.1%} on average, {fmean(errors):.1%} off."
    ]


def _order_note(order: PlanOrder | None) -> list[str]:
    if order is None:
        return []
    return [
        f"Order of plans in {order.groups} groups: rank {format_figure(order.rank)}, the first loses {order.regret:.1%} to the best."
    ]


def _left_out_note(tested: Sequence[LeftOutSource]) -> list[str]:
    rows = sum(each.rows for each in tested)
    if not rows:
        return []
    inside = sum(each.inside for each in tested) / rows
    notes = [f"Rows inside the band that other sources make: {inside:.0%} of {rows}."]
    after = [(each.rows - OWN_TRIALS, each.inside_after) for each in tested if each.inside_after is not None]
    if after:
        share = sum(number * inside_after for number, inside_after in after) / sum(number for number, _ in after)
        mean = fmean(inside_after for _, inside_after in after)
        notes.append(
            f"Rows inside it after {OWN_TRIALS} trials of their source narrowed it: {share:.0%}; {mean:.0%} as the mean of {len(after)} sources."
        )
    return notes


def _group_grid(name: str, members: dict[str, list[ScoredRow]]) -> Grid:
    return Grid(
        f"by {name}", (name, *HEADINGS), tuple((key, *Agreement.of(some).texts()) for key, some in members.items())
    )


def _order_grid(by_source: dict[str, list[ScoredRow]]) -> Grid:
    def lines() -> Iterator[tuple[str, ...]]:
        for name, some in by_source.items():
            if order := PlanOrder.of(some):
                yield name, str(order.groups), format_figure(order.rank), f"{order.regret:.1%}"

    return Grid("order of plans", ("source", "groups", "rank", "regret of the first"), tuple(lines()))


def _left_out_grid(tested: Sequence[LeftOutSource]) -> Grid:
    return Grid(
        "each source left out",
        ("source", "rows", "inside", "bands of the others", f"inside after {OWN_TRIALS} trials", "width of before"),
        tuple(
            (
                each.source,
                str(each.rows),
                f"{each.inside / each.rows:.0%}",
                each.bands,
                *("–" if share is None else f"{share:.0%}" for share in (each.inside_after, each.narrowing)),
            )
            for each in tested
        ),
    )


def _row_grid(scored: Sequence[ScoredRow]) -> Grid:
    headings = ("model", "GPUs", "tp pp dp", "rows × tokens", "published", "ours", "error", "GiB")
    return Grid("rows", headings, tuple(_row_texts(each) for each in scored))


def _row_texts(scored: ScoredRow) -> tuple[str, ...]:
    row = scored.row
    measured = "" if row.measured_memory_gib is None else f" ({row.measured_memory_gib:.0f})"
    return (
        row.model,
        f"{row.gpus} {row.gpu}",
        f"{row.tp} {row.pp} {row.dp}",
        f"{row.micro_batch} × {row.sequence}",
        f"{scored.published:.0f}",
        f"{scored.estimated:.0f}",
        f"{scored.error:+.1%}",
        f"{scored.peak_memory_bytes / 2**30:.0f}{measured}{'' if scored.reason is None else ' !'}",
    )
