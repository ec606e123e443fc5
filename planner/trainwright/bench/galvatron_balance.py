"""Galvatron-BMW's table IV: partitions balanced by memory, by time, and by both, on 16 A100 without CKPT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainwright.bench.agreement import inversions
from trainwright.bench.batch_sizes import Climb, samples_per_second
from trainwright.bench.comparison import Comparison, Grid, Record, Tell, number
from trainwright.bench.figures import BalancedFigures, Throughput, galvatron_figures
from trainwright.bench.galvatron_search import Balance, Part
from trainwright.bench.galvatron_settings import SIXTEEN_A100, galvatron_problem
from trainwright.bench.galvatron_strategies import BI_OBJECTIVE, ONE_F_ONE_B, Searched, plain
from trainwright.model import Model
from trainwright.plan import Plan
from trainwright.search import Candidate

_CLIMB = Climb(factor=4, halvings=1)
BALANCES: Mapping[str, Searched] = {
    "Galvatron (1F1B+Mem)": Searched(Part(plain, Balance.MEMORY, ONE_F_ONE_B), _CLIMB, ()),
    "Galvatron (1F1B+Time)": Searched(Part(plain, Balance.TIME, ONE_F_ONE_B), _CLIMB, ()),
    BI_OBJECTIVE: Searched(Part(plain, Balance.BOTH, ONE_F_ONE_B), _CLIMB, ()),
}
"""By the names of the table's rows."""

HEADINGS = ("model", "partition", "paper", "batch", "blocks by stage", "ours", "batch", "blocks by stage")


@dataclass(frozen=True)
class _Row:
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
            number(self.published.samples_per_second),
            str(self.published.batch),
            _listed(self.published_layers),
            number(self.predicted) if self.found else "OOM",
            str(self.found.plan.global_batch_size) if self.found else "",
            _listed(self.layers),
        )


def balance(*, tell: Tell) -> Comparison:
    """The ablation."""
    rows: list[_Row] = []
    published = galvatron_figures().balance
    columns = [(budget, *item) for budget, models in published.items() for item in models.items()]
    for done, (budget, model, figures) in enumerate(columns):
        tell(f"partitions of {model}, {budget} GB", done / len(columns))
        rows += _rows(budget, model, figures)
    groups = _groups(rows)
    best = [(label, members) for label, members in groups if _agrees(members)]
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
        agreement={"columns": len(groups), "columns_in_the_paper's_order": len(best)},
        notes=(
            f"All pairs stand in the paper's order in {len(best)} of {len(groups)} columns.",
            *(_differs(label, members) for label, members in groups if not _agrees(members)),
        ),
    )


def _rows(budget: int, model: str, figures: Mapping[str, BalancedFigures]) -> list[_Row]:
    rows = []
    for name, figure in figures.items():
        searched = BALANCES[name]

        def at_batch(batch: int, searched: Searched = searched) -> Candidate | None:
            return searched.best(galvatron_problem(SIXTEEN_A100, model, budget, batch))

        found = searched.climb.best(at_batch)
        layers = blocks(galvatron_problem(SIXTEEN_A100, model, budget, 8).model, found.plan) if found else ()
        rows.append(_Row(budget, model, name, Throughput.of(figure.cell), figure.layers, found, layers))
    return rows


def blocks(model: Model, plan: Plan) -> tuple[int, ...]:
    """Blocks (tensor-parallel layers) of every stage."""
    return tuple(
        sum(model.kind_of(layer).is_tensor_parallel for layer in range(stage.first, stage.end))
        for stage in plan.pipelines[0].stages
    )


def _groups(rows: Sequence[_Row]) -> list[tuple[str, list[_Row]]]:
    groups: dict[str, list[_Row]] = {}
    for row in rows:
        groups.setdefault(f"{row.model}, {row.budget} GB", []).append(row)
    return list(groups.items())


def _inverted(rows: Sequence[_Row]) -> list[tuple[str, str]]:
    """Pairs (better, worse) by the paper that ours has strictly the other way round."""
    names = [row.name for row in rows]
    published = [-(row.published.samples_per_second or 0.0) for row in rows]
    predicted = [-row.predicted * 0.999 for row in rows]
    return [
        (a, b)
        for a, b in inversions(names, published, predicted)
        if predicted[names.index(a)] > predicted[names.index(b)]
    ]


def _agrees(rows: Sequence[_Row]) -> bool:
    return not _inverted(rows)


def _differs(label: str, rows: Sequence[_Row]) -> str:
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


def _listed(layers: Sequence[int]) -> str:
    return " ".join(str(count) for count in layers)
