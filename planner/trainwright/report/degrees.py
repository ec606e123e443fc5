"""A plan's degrees, batches and layers in the few characters of a table's cell."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from trainwright.plan import LayerRun, Pipeline, Plan, Sharding


def degrees(plan: Plan) -> str:
    """`pp4 dp2 tp1`, pipelines joined by `+`; `dp1–2` where layers differ."""
    return " + ".join(
        f"pp{len(pipeline.stages)} dp{common(run.data for run in runs)} tp{common(run.tensor for run in runs)}"
        for pipeline, runs in ((pipeline, runs_of(pipeline)) for pipeline in plan.pipelines)
    )


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


def common(values: Iterable[int]) -> str:
    """The one value, or the least and the largest."""
    found = set(values)
    return str(found.pop()) if len(found) == 1 else f"{min(found)}–{max(found)}"
