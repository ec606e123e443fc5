"""A plan's degrees, batches and layers in the few characters of a table's cell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby

from trainwright.cluster import EMULATED_PREFIX, Cluster
from trainwright.plan import LayerRun, Pipeline, Plan, Sharding, Stage, degrees_of, spanned

DEGREES = "pp: stages, dp: replicas, tp: devices that share each layer"
BATCHES = "batches: rows of a micro-batch × micro-batches"
"""How to read the columns."""
MOST_DIFFERENT = 4
"""More different groups of stages are told by the least and the largest of their degrees."""
MOST_ROWS = 8
"""Rows of so many replicas are told one by one."""


def degrees(plan: Plan) -> str:
    """`pp4 dp2 tp1`, pipelines joined by ` + `; `pp3 dp8 tp1 | dp4 tp2` where stages differ, `dp1–8` where many do."""
    return " + ".join(_degrees(pipeline) for pipeline in plan.pipelines)


def _degrees(pipeline: Pipeline) -> str:
    told = [text for text, _ in groupby(pipeline.stages, key=degrees_of)]
    if len(told) > MOST_DIFFERENT:
        runs = runs_of(pipeline)
        told = [f"dp{spanned(run.data for run in runs)} tp{spanned(run.tensor for run in runs)}"]
    return f"pp{len(pipeline.stages)} {' | '.join(told)}"


def lines(plan: Plan, cluster: Cluster) -> tuple[str, str, str]:
    """Degrees, batches and layers for three cells side by side: a line for each group of neighbouring stages alike.

    A pipeline whose stages have the same degrees takes one line; else each line names the accelerators where the plan
    uses several.
    """
    names = short_names(cluster)
    used = {cluster.node(node).accelerator for node in plan.nodes}
    found: list[tuple[str, str, str]] = []
    for pipeline, batch in zip(plan.pipelines, batches(plan).split("\n"), strict=True):
        head = f"pp{len(pipeline.stages)}"
        if len({_told(stage) for stage in pipeline.stages}) == 1:
            found.append((f"{head} {_told(pipeline.stages[0])}", batch, _layers(pipeline.stages)))
            continue
        groups = groupby(pipeline.stages, key=lambda stage: (_told(stage), _carriers(stage, cluster, names)))
        for number, ((told, carriers), stages) in enumerate(groups):
            margin = " " * len(head) if number else head
            where = f" {carriers}" if len(used) > 1 else ""
            found.append((f"{margin} {told}{where}", "" if number else batch, _layers(list(stages))))
    first, second, third = zip(*found, strict=True)
    return "\n".join(first), "\n".join(second), "\n".join(third)


def _told(stage: Stage) -> str:
    """`dp4 tp1`, with the rows of its replicas where they differ."""
    rows = next((run.rows for run in stage.layers if len(set(run.rows)) > 1), None)
    return degrees_of(stage) + (f" rows {spanned(rows)}" if rows else "")


def _carriers(stage: Stage, cluster: Cluster, names: Mapping[str, str]) -> str:
    return "+".join(dict.fromkeys(names[cluster.node(device.node).accelerator] for device in stage.devices))


def _layers(stages: Sequence[Stage]) -> str:
    return counted([stage.end - stage.first for stage in stages])


def short_names(cluster: Cluster) -> dict[str, str]:
    """By accelerator: its model alone (`A100`, `T4`), the whole name where that would name two."""
    short = {one.name: _short(one.name) for one in cluster.accelerators}
    uses = Counter(short.values())
    return {name: text if uses[text] == 1 else name for name, text in short.items()}


def _short(name: str) -> str:
    words = name.removeprefix(EMULATED_PREFIX).split("-")
    return next((word for word in words if word[-1:].isdigit() and word[:1].isalpha()), words[-1])


def strategy(run: LayerRun) -> str:
    """`dp4 tp1`, then what is not plain: `rows 3 2 2 1`, `zero3`, `recompute`."""
    spelt = " ".join(map(str, run.rows))
    rows = spelt if run.data <= MOST_ROWS else spanned(run.rows)
    odd = [
        *([f"rows {rows}"] if len(set(run.rows)) > 1 else []),
        *([str(run.sharding)] if run.sharding is not Sharding.NONE else []),
        *(["recompute"] if run.recompute else []),
    ]
    return " ".join([f"dp{run.data} tp{run.tensor}", *odd])


def strategies(stage: Stage) -> str:
    """Those of a stage's layers; with the number of layers of each where they differ."""
    told = [(strategy(run), run.count) for run in stage.layers]
    if len({text for text, _ in told}) == 1:
        return told[0][0]
    return "\n".join(f"{count} × {text}" for text, count in told)


def batches(plan: Plan) -> str:
    """`2×16`: rows of a micro-batch × micro-batches, as in a plan's summary; pipelines one below the other."""
    return "\n".join(f"{pipeline.micro_batch_size}×{pipeline.micro_batches}" for pipeline in plan.pipelines)


def layers(plan: Plan) -> str:
    """Layers by stage, equal neighbours counted where that is shorter."""
    return "\n".join(counted([stage.end - stage.first for stage in pipeline.stages]) for pipeline in plan.pipelines)


def counted(numbers: Sequence[int]) -> str:
    """`3 3 3 1`, or `24×2 1` for long rows."""
    spelt = " ".join(map(str, numbers))
    groups = [(number, len(list(group))) for number, group in groupby(numbers)]
    short = " ".join(f"{count}×{number}" if count > 1 else str(number) for number, count in groups)
    return short if len(short) < len(spelt) and len(numbers) > 8 else spelt


def savings(plan: Plan) -> str:
    """Sharding and recompute: `zero3 10/26, recompute 26/26` (layers of all); empty where there are none."""
    runs = [run for pipeline in plan.pipelines for run in runs_of(pipeline)]
    whole = sum(run.count for run in runs)
    kinds = [kind for kind in Sharding if kind is not Sharding.NONE]
    counts = [(str(kind), sum(run.count for run in runs if run.sharding is kind)) for kind in kinds]
    counts.append(("recompute", sum(run.count for run in runs if run.recompute)))
    return ", ".join(name if count == whole else f"{name} {count}/{whole}" for name, count in counts if count)


def runs_of(pipeline: Pipeline) -> list[LayerRun]:
    """All layer runs, stage by stage."""
    return [run for stage in pipeline.stages for run in stage.layers]
