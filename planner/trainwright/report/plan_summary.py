"""Summary of a plan's degrees, batches and layers for table cells."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from itertools import groupby
from operator import itemgetter
from typing import Final, NamedTuple

from trainwright.cluster import EMULATED_PREFIX, Cluster, Device, is_cpu
from trainwright.plan import (
    LayerRun,
    Pipeline,
    Plan,
    Stage,
    format_batches,
    format_degrees,
    format_range,
    format_run_degrees,
)
from trainwright.report.remark import Remark
from trainwright.strategy import Sharding

DEGREES = "pp: stages, dp: replicas, tp: devices that share each layer"
BATCHES = "batches: rows of a micro-batch on one replica × micro-batches"
"""Legend of the batches column."""
MAX_DIFFERENT = 4
"""Maximum number of distinct stage groups listed; beyond it only the range of their degrees is."""
MAX_RUNS = 8
"""Maximum number of lines on the layers of a stage."""
MAX_PLACES = 4
"""Maximum number of places that are named, each of them a node or nodes of consecutive numbers."""
_NUMBERED: Final = re.compile(r"(.*?)((?<![0-9])(?:0|[1-9][0-9]{0,8}))?")
"""Name of a node, and the number that it ends with; one with leading zeros is part of the name."""
MAX_ROWS = 8
"""Maximum number of replicas whose rows are listed one by one."""


def degrees(plan: Plan) -> str:
    """Format `pp4 dp2 tp1`; `pp3 dp8 tp1 | dp4 tp2` where stages differ, `dp1–8` where many do.

    Pipelines are joined by ` + `.
    """
    return " + ".join(_degrees(pipeline) for pipeline in plan.pipelines)


def _degrees(pipeline: Pipeline) -> str:
    texts = [text for text, _ in groupby(pipeline.stages, key=format_degrees)]
    if len(texts) > MAX_DIFFERENT:
        texts = [format_run_degrees(runs_of(pipeline))]
    return f"pp{len(pipeline.stages)} {' | '.join(texts)}"


class Detail(IntEnum):
    """Detail in which a table shows the layers of a stage: as one, each with its degrees, or each with its whole strategy."""

    STAGES = 0
    DEGREES = 1
    STRATEGIES = 2


class PlanLines(NamedTuple):
    """Cells of a plan in a table, each with a line for every group of uniform neighbouring stages.

    Attributes:
        nodes: with the slots on a node whose other devices are of no such stage.
        pipelines: number as explanations count them, from 0, and its rows of an iteration.
    """

    degrees: str
    batches: str
    layers: str
    nodes: str
    pipelines: str


def lines(plan: Plan, cluster: Cluster, detail: Detail = Detail.STAGES) -> PlanLines:
    """Return the cells of a plan.

    Each line names its accelerators if the plan uses several. More than MAX_DIFFERENT groups that differ in these alone take
    one line. With more `detail`, a line tells consecutive layers of one strategy, with their number: `24 × dp16 tp1`.
    """
    names = short_names(cluster)
    used = cluster.accelerators_of(plan.nodes)
    cells: list[tuple[str, ...]] = []
    for which, (pipeline, batch) in enumerate(zip(plan.pipelines, batches(plan).split("\n"), strict=True)):
        head, rows = f"pp{len(pipeline.stages)}", pipeline.micro_batches * pipeline.micro_batch_size
        share = f"{which}: {rows} of {plan.global_batch_size} rows"
        by_kind = groupby(
            pipeline.stages,
            key=lambda stage: (_description(stage, detail), _format_accelerators(stage, cluster, names)),
        )
        groups = [
            (described, f" {accelerators}" if len(used) > 1 else "", list(stages))
            for (described, accelerators), stages in by_kind
        ]
        if len(groups) > MAX_DIFFERENT and len({described for described, _, _ in groups}) == 1:
            groups = [(groups[0][0], "", list(pipeline.stages))]
        for number, (texts, where, stages) in enumerate(groups):
            margin = " " * len(head) if number else head
            nodes = node_names([device for stage in stages for device in stage.devices], cluster)
            first = ("", "") if number else (batch, share)
            cells.append((f"{margin} {texts[0]}{where}", first[0], _layers(stages), nodes, first[1]))
            cells += [(f"{' ' * len(head)} {line}", *[""] * 4) for line in texts[1:]]
    return PlanLines(*("\n".join(column) for column in zip(*cells, strict=True)))


def node_names(devices: Sequence[Device], cluster: Cluster) -> str:
    """Format the nodes of devices, `p3-1–4, g4-1:0–1`, with the slots of a node that has other devices too."""
    slots_of: dict[str, set[int]] = {}
    for device in devices:
        slots_of.setdefault(device.node, set()).add(device.slot)
    parts: list[tuple[str, list[int], str]] = []
    for node, slots in slots_of.items():
        prefix, number = _NUMBERED.fullmatch(node).groups()  # type: ignore[union-attr] # it matches every name
        if len(slots) < cluster.node(node).devices:
            parts.append((f"{node}:", sorted(slots), ""))
        elif number and parts and parts[-1][0] == prefix and parts[-1][2] and parts[-1][1][-1] + 1 == int(number):
            parts[-1][1].append(int(number))
        else:
            parts.append((prefix, [int(number)], number) if number else (node, [], ""))
    texts = [f"{prefix}{_number_runs(numbers)}" for prefix, numbers, _ in parts]
    more = [f"{len(texts) - MAX_PLACES} more"] if len(texts) > MAX_PLACES else []
    return ", ".join([*texts[:MAX_PLACES], *more])


def _number_runs(numbers: Sequence[int]) -> str:
    """Format `0–2,5`."""
    runs = [
        [number for _, number in group] for _, group in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    ]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def _description(stage: Stage, detail: Detail) -> tuple[str, ...]:
    """Format `dp4 tp1`, with the replicas' rows where they differ; with more detail, a line for consecutive layers."""
    if detail is Detail.STAGES:
        return (format_degrees(stage) + _rows(stage.layers),)
    words = [
        strategy(run) if detail is Detail.STRATEGIES else f"{format_run_degrees([run])}{_rows([run])}"
        for run in stage.layers
    ]
    counts = [run.count for run in stage.layers]
    texts = [
        (text, sum(count for _, count in group))
        for text, group in groupby(zip(words, counts, strict=True), key=itemgetter(0))
    ]
    if len(texts) == 1:
        return (words[0],)
    listed = [f"{count} × {text}" for text, count in texts]
    return (*listed[:MAX_RUNS], *(["…"] if len(listed) > MAX_RUNS else []))


def _rows(runs: Sequence[LayerRun]) -> str:
    uneven = next((run.rows for run in runs if len(set(run.rows)) > 1), None)
    return f" rows {format_range(uneven)}" if uneven else ""


def _format_accelerators(stage: Stage, cluster: Cluster, names: Mapping[str, str]) -> str:
    return "+".join(dict.fromkeys(names[cluster.node(device.node).accelerator] for device in stage.devices))


def count_accelerators(devices: Iterable[Device], cluster: Cluster, names: Mapping[str, str] | None = None) -> str:
    """Format devices by accelerator: `4 × Tesla-T4`, joined by `and`; under other names where these are given."""
    counts = Counter(cluster.node(device.node).accelerator for device in devices)
    return " and ".join(f"{count} × {names[name] if names else name}" for name, count in counts.items())


def _layers(stages: Sequence[Stage]) -> str:
    return format_run_lengths([stage.end - stage.first for stage in stages])


def short_names(cluster: Cluster) -> dict[str, str]:
    """Map each accelerator to its model (`A100`, `T4`), or to its full name where two would share that."""
    short = {accelerator.name: _short(accelerator.name) for accelerator in cluster.accelerators}
    uses = Counter(short.values())
    return {name: text if uses[text] == 1 else name for name, text in short.items()}


def _short(name: str) -> str:
    if is_cpu(name):
        return "CPU"
    words = name.removeprefix(EMULATED_PREFIX).split("-")
    return next((word for word in words if word[-1:].isdigit() and word[:1].isalpha()), words[-1])


def strategy(run: LayerRun) -> str:
    """Format `dp4 tp1`, then what is not the default: `rows 3 2 2 1`, `zero3 kept`, `recompute`."""
    spelt = " ".join(map(str, run.rows))
    rows = spelt if run.strategy.data <= MAX_ROWS else format_range(run.rows)
    odd = [
        *([f"rows {rows}"] if len(set(run.rows)) > 1 else []),
        *([str(run.strategy.sharding)] if run.strategy.sharding is not Sharding.NONE else []),
        *(["kept"] if run.strategy.keep_gathered_weights else []),
        *(["recompute"] if run.strategy.recompute else []),
    ]
    return " ".join([format_run_degrees([run]), *odd])


def strategies(stage: Stage) -> str:
    """Format the strategies of a stage's layer runs, with layer counts where they differ."""
    texts = [(strategy(run), run.count) for run in stage.layers]
    if len({text for text, _ in texts}) == 1:
        return texts[0][0]
    return "\n".join(f"{count} × {text}" for text, count in texts)


def batches(plan: Plan) -> str:
    """Format `2×16`, rows of a micro-batch on one replica × micro-batches, and `gpipe` where it is; a pipeline per line."""
    return "\n".join(format_batches(pipeline) + plan.schedule_words for pipeline in plan.pipelines)


def layers(plan: Plan) -> str:
    """Format the stages' layer counts, one pipeline per line."""
    return "\n".join(format_run_lengths(pipeline.layer_counts) for pipeline in plan.pipelines)


def format_run_lengths(numbers: Sequence[int]) -> str:
    """Format `3 3 3 1`, or run lengths `24×2 1` where those are shorter and there are more than 8 numbers."""
    spelt = " ".join(map(str, numbers))
    groups = [(number, len(list(group))) for number, group in groupby(numbers)]
    short = " ".join(f"{count}×{number}" if count > 1 else str(number) for number, count in groups)
    return short if len(short) < len(spelt) and len(numbers) > 8 else spelt


def savings(plan: Plan) -> str:
    """Format sharding and recompute with the layers they cover: `zero3 10/26, recompute`; empty if there are none."""
    runs = [run for pipeline in plan.pipelines for run in runs_of(pipeline)]
    whole = sum(run.count for run in runs)
    kinds = [kind for kind in Sharding if kind is not Sharding.NONE]
    counts = [(str(kind), sum(run.count for run in runs if run.strategy.sharding is kind)) for kind in kinds]
    counts.append(("kept", sum(run.count for run in runs if run.strategy.keep_gathered_weights)))
    counts.append(("recompute", sum(run.count for run in runs if run.strategy.recompute)))
    return ", ".join(name if count == whole else f"{name} {count}/{whole}" for name, count in counts if count)


def name(plan: Plan) -> str:
    """Format the plan's summary with its savings."""
    return " ".join(filter(None, (plan.summary(), savings(plan))))


def legend(plans: Sequence[Plan], cluster: Cluster) -> str:
    """Return the legend of the columns of plans, with that of run lengths where there are any."""
    counts = (text for plan in plans for text in lines(plan, cluster)[2].split())
    lengths = next((text for text in counts if "×" in text), None)
    if lengths is None:
        return f"{DEGREES}; {BATCHES}"
    stages, _, size = lengths.partition("×")
    return f"{DEGREES}; {BATCHES}; {lengths} layers by stage: {stages} stages of {size} layer{'s' * (size != '1')}"


def idle_devices(plan: Plan, cluster: Cluster) -> Remark:
    """Return the number of the cluster's devices that the plan does not use; a sentence only if there are any."""
    whole = len(cluster.devices)
    idle = whole - len(plan.devices)
    are = "1 is" if idle == 1 else f"{idle} are"
    sentence = (f"The plan uses {whole - idle} of the cluster's {whole} devices; {are} idle.",) if idle else ()
    return Remark(sentence, {"idle_devices": idle})


def runs_of(pipeline: Pipeline) -> list[LayerRun]:
    return [run for stage in pipeline.stages for run in stage.layers]
