"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from rich.table import Table
from rich.text import Text

from trainwright.cluster import Cluster
from trainwright.cost.estimate import Breakdown, Estimate
from trainwright.plan import Plan
from trainwright.search import Candidate


def candidate_table(candidates: Sequence[Candidate], cluster: Cluster, *, planner: str) -> Table:
    """Candidates, best first, with their degrees and layers by stage; says so where devices are emulated."""
    table = Table(title=f"Candidates of {planner}{_emulated(cluster)}", title_justify="left")
    for heading in ("rank", "predicted s", "peak memory", "pp", "dp", "tp", "batches", "layers by stage"):
        table.add_column(heading, justify="left" if heading == "layers by stage" else "right", overflow="fold")
    for number, candidate in enumerate(candidates, 1):
        estimate = candidate.estimate
        table.add_row(str(number), f"{estimate.iteration_seconds:.4g}", _mebibytes(estimate), *_degrees(candidate.plan))
    return table


def breakdown_table(estimate: Estimate, plan: Plan, cluster: Cluster) -> Table:
    """Where the critical device's time goes."""
    # a Text, because a node's name may look like markup
    title = Text(f"{plan.summary()} on {estimate.critical_device}{_emulated(cluster)}", style="table.title")
    table = Table(title=title, title_justify="left")
    table.add_column("part")
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    for field in fields(Breakdown):
        seconds = getattr(estimate.breakdown, field.name)
        share = seconds / estimate.iteration_seconds if estimate.iteration_seconds else 0.0
        table.add_row(field.name.removesuffix("_seconds").replace("_", " "), f"{seconds:.4g}", f"{share:.1%}")
    table.add_section()
    table.add_row("iteration", f"{estimate.iteration_seconds:.4g}", "")
    table.add_row("peak memory", _mebibytes(estimate), "")
    return table


def _degrees(plan: Plan) -> tuple[str, str, str, str, str]:
    """Degrees, micro-batches and layers by stage, pipelines one below the other; `*` where stages differ."""
    columns: list[tuple[str, ...]] = []
    for pipeline in plan.pipelines:
        runs = [run for stage in pipeline.stages for run in stage.layers]
        columns.append(
            (
                str(len(pipeline.stages)),
                _common([run.data for run in runs]),
                _common([run.tensor for run in runs]),
                f"{pipeline.micro_batches} × {pipeline.micro_batch_size} rows",
                " ".join(str(stage.end - stage.first) for stage in pipeline.stages),
            )
        )
    pipelines, data, tensor, batches, layers = ("\n".join(column) for column in zip(*columns, strict=True))
    return pipelines, data, tensor, batches, layers


def _common(values: list[int]) -> str:
    return str(values[0]) if len(set(values)) == 1 else "*"


def _mebibytes(estimate: Estimate) -> str:
    return f"{estimate.peak_memory_bytes / 2**20:.1f} MiB"


def _emulated(cluster: Cluster) -> str:
    return " (device times emulated)" if cluster.is_emulated else ""
