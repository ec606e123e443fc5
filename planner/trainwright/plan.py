"""Training plan: one document that every search writes and the worker executes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain, groupby
from typing import Annotated, Any

from trainwright.bounds import FLAT, OMITTED_DEFAULT, OMITTED_NONE
from trainwright.cluster import Device
from trainwright.document_kind import document
from trainwright.layer import Dtype, LayerList
from trainwright.operator_shardings import Loop, SpanSpecs
from trainwright.outside.notebook import ShownInNotebooks
from trainwright.strategy import Strategy


class Schedule(StrEnum):
    """Order of forwards and backwards in a pipeline."""

    ONE_FORWARD_ONE_BACKWARD = "1f1b"
    GPIPE = "gpipe"


@dataclass(frozen=True, slots=True)
class LayerRun:
    """Consecutive layers with one strategy.

    Attributes:
        first, count: the layers `first … first + count - 1` of the model.
        strategy: documents write its fields in its place.
        rows: rows of a micro-batch by data replica; they may be uneven.
    """

    first: int
    count: int
    strategy: Annotated[Strategy, FLAT]
    rows: tuple[int, ...]

    def __post_init__(self) -> None:
        where, data = f"layers {self.first}…{self.end - 1}", self.strategy.data
        if self.first < 0 or self.count < 1:
            raise ValueError(f"a layer run needs first >= 0 and count >= 1, got first {self.first}, count {self.count}")
        if len(self.rows) != data:
            raise ValueError(
                f"{where}: rows must name one part for each of the {data} data replicas, got {len(self.rows)} parts"
            )
        if min(self.rows) < 1:
            raise ValueError(f"{where}: every data replica needs at least one row, got rows {list(self.rows)}")

    @property
    def end(self) -> int:
        """Index after the last layer."""
        return self.first + self.count

    def with_strategy(self, **changes: Any) -> LayerRun:
        """Return the run with some fields of its strategy changed."""
        return replace(self, strategy=self.strategy.replace(**changes))


def unequal_operators(plan: Plan) -> str | None:
    """Return a sentence about the first pipeline whose shardings of operators are not those of pipeline 0; None if there is none."""
    first, *others = (
        [stage.operators for stage in pipeline.stages if stage.operators is not None] for pipeline in plan.pipelines
    )
    other = next((number for number, specs in enumerate(others, start=1) if specs != first), None)
    if other is None:
        return None
    return f"operators: expected those of pipeline 0 in every pipeline, got others in pipeline {other}; make them equal"


def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def split_rows(rows: int, data: int) -> tuple[int, ...]:
    """Split rows over replicas as evenly as possible; the first ones take the remainder."""
    share, rest = divmod(rows, data)
    return tuple(share + (replica < rest) for replica in range(data))


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive layers on a set of devices, whose order determines the ranks.

    Attributes:
        layers: with operators, the degrees that come nearest to theirs: messages to other stages are divided as they say.
        operators: shardings of its operators where degrees do not say them; None where they do.
    """

    devices: tuple[Device, ...]
    layers: tuple[LayerRun, ...]
    operators: Annotated[SpanSpecs | None, OMITTED_NONE] = None

    def __post_init__(self) -> None:
        if not self.devices or not self.layers:
            raise ValueError("a stage needs at least one device and at least one layer run")
        for run in self.layers:
            strategy = run.strategy
            if strategy.width != len(self.devices):
                raise ValueError(
                    f"layers {run.first}…{run.end - 1}: {strategy.product}, but the stage has {len(self.devices)} "
                    "devices; make them equal"
                )
        for run, following in zip(self.layers, self.layers[1:], strict=False):
            if following.first != run.end:
                raise ValueError(
                    f"a stage's layer runs must be consecutive: layer {run.end} must follow, got {following.first}"
                )
        if self.operators is not None:
            self._check_operators(self.operators)

    def _check_operators(self, specs: SpanSpecs) -> None:
        """Raise ValueError unless the operators' mesh, layers and rows are those of the stage."""
        where = f"layers {self.first}…{self.end - 1}: operators"
        if specs.devices != len(self.devices):
            shape = " × ".join(map(str, specs.mesh_shape))
            raise ValueError(
                f"{where}: a mesh of {shape} has {specs.devices} devices, but the stage has {len(self.devices)}; "
                "make them equal"
            )
        if (specs.first, specs.end) != (self.first, self.end):
            raise ValueError(
                f"{where}: expected each of the stage's layers once, got layers {specs.first}…{specs.end - 1}"
            )
        for run in self.layers:
            if len(set(run.rows)) > 1:
                raise ValueError(f"{where}: expected as many rows on every replica, got rows {list(run.rows)}")
        rows = sum(self.layers[0].rows)
        for layer, operator in specs.operators():
            if rows % (parts := specs.parts(operator, Loop.BATCH)):
                raise ValueError(
                    f"{where}: {layer.where}, operator {operator.name}: {operator.algorithm} divides the batch by "
                    f"{parts}, which does not divide a micro-batch of {rows} rows"
                )

    @property
    def first(self) -> int:
        return self.layers[0].first

    @property
    def end(self) -> int:
        """Index after the stage's last layer."""
        return self.layers[-1].end


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Stages that contain the full model once, and their share of the batch.

    Attributes:
        micro_batches: per iteration.
        micro_batch_size: rows of a micro-batch, over all replicas of a stage (AMP's mbs × dp); tables and `mb` in the notation tell
            those of one replica, Megatron's micro-batch size, as `rows` does.
    """

    micro_batches: int
    micro_batch_size: int
    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        if self.micro_batches < 1 or self.micro_batch_size < 1 or not self.stages:
            raise ValueError(
                "a pipeline needs at least one stage, micro_batches >= 1 and micro_batch_size >= 1, got "
                f"{len(self.stages)}, {self.micro_batches} and {self.micro_batch_size}"
            )
        expected = 0
        for number, stage in enumerate(self.stages):
            if stage.first != expected:
                problem = "missing" if stage.first > expected else "there twice"
                raise ValueError(
                    f"stage {number} starts at layer {stage.first}, expected {expected}: "
                    f"layer {min(stage.first, expected)} is {problem}"
                )
            expected = stage.end
            for run in stage.layers:
                if sum(run.rows) != self.micro_batch_size:
                    raise ValueError(
                        f"stage {number}, layers {run.first}…{run.end - 1}: rows {list(run.rows)} sum to "
                        f"{sum(run.rows)}, but micro_batch_size is {self.micro_batch_size}; make them equal"
                    )

    @property
    def devices(self) -> tuple[Device, ...]:
        """All devices, stage by stage."""
        return tuple(chain.from_iterable(stage.devices for stage in self.stages))

    @property
    def layer_counts(self) -> tuple[int, ...]:
        """Number of layers of every stage."""
        return tuple(stage.end - stage.first for stage in self.stages)


@document("Plan")
@dataclass(frozen=True, slots=True)
class Plan(ShownInNotebooks):
    """Full training iteration: which device computes which layers on which rows of the batch.

    Attributes:
        model_layers: number of layers of the model; every pipeline has each of them exactly once.
        dtype: number format that the plan is for; None where it states none, as plans of former versions do.
    """

    model_layers: int
    global_batch_size: int
    pipelines: tuple[Pipeline, ...]
    schedule: Schedule = Schedule.ONE_FORWARD_ONE_BACKWARD
    dtype: Annotated[Dtype | None, OMITTED_DEFAULT] = None

    def __post_init__(self) -> None:
        if not self.pipelines:
            raise ValueError("a plan needs at least one pipeline")
        for number, pipeline in enumerate(self.pipelines):
            if pipeline.stages[-1].end != self.model_layers:
                raise ValueError(
                    f"pipeline {number} ends before layer {pipeline.stages[-1].end}, but the model has "
                    f"{self.model_layers} layers; every pipeline holds each layer once"
                )
        rows = sum(pipeline.micro_batches * pipeline.micro_batch_size for pipeline in self.pipelines)
        if rows != self.global_batch_size:
            raise ValueError(
                f"the pipelines take {rows} rows an iteration (micro_batches × micro_batch_size, summed), but "
                f"global_batch_size is {self.global_batch_size}; make them equal"
            )
        devices = self.devices
        if len({(device.node, device.slot) for device in devices}) < len(devices):
            twice = next(device for device, uses in Counter(devices).items() if uses > 1)
            raise ValueError(f"device {twice} is used twice; a device serves one stage of one pipeline")

    @property
    def devices(self) -> tuple[Device, ...]:
        """All devices in the order of their logical ranks."""
        return tuple(chain.from_iterable(stage.devices for stage in self.stages))

    @property
    def stages(self) -> tuple[Stage, ...]:
        """All stages, pipeline by pipeline."""
        return tuple(chain.from_iterable(pipeline.stages for pipeline in self.pipelines))

    def map_stages(self, change: Callable[[Stage], Stage]) -> Plan:
        """Return the plan with every stage changed."""
        pipelines = (replace(pipeline, stages=tuple(map(change, pipeline.stages))) for pipeline in self.pipelines)
        return replace(self, pipelines=tuple(pipelines))

    @property
    def has_operators(self) -> bool:
        """True if a stage has shardings of its operators, which degrees do not say."""
        return any(stage.operators is not None for stage in self.stages)

    @property
    def without_operators(self) -> Plan:
        """The plan of the degrees that come nearest to its shardings of operators; itself if it has none."""
        return self.map_stages(lambda stage: replace(stage, operators=None)) if self.has_operators else self

    @property
    def in_any_format(self) -> Plan:
        """The plan without its number format, as searches and trials compare plans."""
        return self if self.dtype is None else replace(self, dtype=None)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes used, in the order of their first rank."""
        return tuple(dict.fromkeys(device.node for device in self.devices))

    def slots(self, node: str) -> tuple[int, ...]:
        """Return the slots used on a node, ascending: its local processes, in order."""
        return tuple(sorted(device.slot for device in self.devices if device.node == node))

    def __repr__(self) -> str:
        return f"<Plan {self.summary()}: {len(self.devices)} devices>"

    def summary(self) -> str:
        """Format degrees, micro-batch on one replica and layers by stage, for example `pp4 dp2 tp1 mb4×4 [4 3 3 4]`.

        If stages differ, degrees follow the layers of the stages that have them, in order: `pp3 mb1–2×4 [7 dp8 tp1 | 10 9
        dp4 tp2]`. `gpipe` follows where that is the schedule of stages.
        """
        return " + ".join(_summary(pipeline) for pipeline in self.pipelines) + self.schedule_words

    @property
    def schedule_words(self) -> str:
        """Return ` gpipe` where stages follow that schedule, else an empty string."""
        is_pipelined = any(len(pipeline.stages) > 1 for pipeline in self.pipelines)
        return f" {self.schedule}" if is_pipelined and self.schedule is not Schedule.ONE_FORWARD_ONE_BACKWARD else ""


MAX_NAMED_DEGREE = 1024
"""Maximum tensor degree that is named to choose from."""


def check_plan_of_model(plan: Plan, stack: LayerList, file: str) -> None:
    """Raise ValueError for a plan of another model than that of `file`: of other layers, or of other tensor degrees."""
    if plan.model_layers != len(stack.layers):
        raise ValueError(
            f"the plan is for a model of {plan.model_layers} layers, but that of {file} has {len(stack.layers)}; give the "
            "model that the plan was made for"
        )
    for run in chain.from_iterable(stage.layers for stage in plan.stages):
        if degree := run.strategy.indivisible_degree(stack.max_tensor_degree):
            raise indivisible(f"layers {run.first}…{run.end - 1}: {degree}", stack.max_tensor_degree)


def indivisible(named: str, most: int) -> ValueError:
    """Return the error of a tensor degree, in these words, that does not divide `most`, the model's maximum."""
    *others, last = (str(degree) for degree in range(1, min(most, MAX_NAMED_DEGREE) + 1) if most % degree == 0)
    degrees = f"degrees are {', '.join(others)} and {last}" if others else "degree is 1"
    return ValueError(f"{named} does not divide the model, whose tensor {degrees}")


OPERATORS_WORD = "operators"
"""Word of a summary for stages with shardings of their operators, whose degrees are the nearest ones."""

MAX_GROUPS = 6
"""Maximum number of stage groups in a summary."""


def _summary(pipeline: Pipeline) -> str:
    batches = f"mb{format_batches(pipeline)}"
    depth = f"pp{len(pipeline.stages)}"
    groups = [
        (degrees, " ".join(str(stage.end - stage.first) for stage in stages))
        for degrees, stages in groupby(pipeline.stages, key=format_degrees)
    ]
    if len(groups) == 1:
        return f"{depth} {groups[0][0]} {batches} [{groups[0][1]}]"
    stage_texts = [f"{layers} {degrees}" for degrees, layers in groups[:MAX_GROUPS]]
    return f"{depth} {batches} [{' | '.join(stage_texts)}{' | …' if len(groups) > MAX_GROUPS else ''}]"


def format_batches(pipeline: Pipeline) -> str:
    """Format `2×16`: rows of a micro-batch on one replica (Megatron's micro-batch size) × micro-batches.

    `1–2×16` if replicas have 1 to 2 rows.
    """
    rows = format_range(rows for stage in pipeline.stages for run in stage.layers for rows in run.rows)
    return f"{rows}×{pipeline.micro_batches}"


def format_degrees(stage: Stage) -> str:
    """Format `dp2 tp1`; `dp2–4 tp1–2` where layers differ; `dp2 tp1 operators` where operators have shardings of their own."""
    return format_run_degrees(stage.layers) + (f" {OPERATORS_WORD}" if stage.operators is not None else "")


def format_run_degrees(runs: Iterable[LayerRun]) -> str:
    """Format `dp2 tp1`; `dp2–4 tp1–2` where runs differ."""
    tensor, data = zip(*(run.strategy.degrees for run in runs), strict=True)
    return f"dp{format_range(data)} tp{format_range(tensor)}"


def format_range(numbers: Iterable[int]) -> str:
    """Format the only number, or the minimum and the maximum: `2–4`."""
    distinct = set(numbers)
    return str(distinct.pop()) if len(distinct) == 1 else f"{min(distinct)}–{max(distinct)}"
