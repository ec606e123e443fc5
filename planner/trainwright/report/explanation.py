"""Explanation of a plan's iteration time, as sentences and by stage."""

from __future__ import annotations

from dataclasses import dataclass, fields

from rich.console import Group
from rich.text import Text

from trainwright.cost.estimate import Estimate
from trainwright.cost.memory import MemoryParts
from trainwright.plan import Plan, Stage
from trainwright.quantity import format_bytes
from trainwright.report import plan_summary, units
from trainwright.report.breakdown import COMMUNICATION, PART_WORDS
from trainwright.report.iteration_chart import Track, stage_tracks
from trainwright.report.tables import add_row, new_table, origin_words, rows_per_second, titled
from trainwright.search import Problem

MAX_PIPELINES = 6
"""Maximum number of pipelines whose shares are listed."""


@dataclass(frozen=True, slots=True)
class StageMemoryRow:
    """Fullest device of a stage, by the share of its memory."""

    device: str
    held_bytes: int
    memory_bytes: int

    @property
    def spare_bytes(self) -> int:
        return self.memory_bytes - self.held_bytes

    @property
    def held_share(self) -> float:
        return self.held_bytes / self.memory_bytes


@dataclass(frozen=True)
class Explanation:
    """Plan with its estimate, and the activity and memory of each stage."""

    problem: Problem
    plan: Plan
    estimate: Estimate
    tracks: tuple[Track, ...]
    memory: tuple[StageMemoryRow, ...]

    @classmethod
    def of(cls, problem: Problem, plan: Plan, estimate: Estimate) -> Explanation:
        bytes_of_device = dict(estimate.memory_by_device)
        cluster = problem.cluster
        memory = []
        for stage in plan.stages:
            rows = [
                StageMemoryRow(str(device), bytes_of_device[device], cluster.accelerator_of(device).memory_bytes)
                for device in stage.devices
            ]
            memory.append(max(rows, key=lambda row: row.held_share))
        return cls(problem, plan, estimate, stage_tracks(plan, problem.cost_context), tuple(memory))

    @property
    def bottleneck(self) -> int:
        """Number of the longest-busy stage, counted over all pipelines."""
        return max(range(len(self.tracks)), key=lambda number: self.tracks[number].busy_seconds)

    def sentences(self) -> list[str]:
        """Return the sentences on bottleneck, bubble, communication, memory and unused devices."""
        return [
            self._whole(),
            *self._operators(),
            *self._pipelines(),
            self._pace(),
            *self._bubble(),
            self._communication(),
            *self._memory(),
            *self._unused(),
        ]

    def _whole(self) -> str:
        seconds = self.estimate.iteration_seconds
        rate = units.rate(rows_per_second(self.plan, self.estimate))
        saved = plan_summary.savings(self.plan)
        return (
            f"{plan_summary.degrees(self.plan)}: an iteration of {self.plan.global_batch_size} rows takes "
            f"{units.seconds(seconds)}, {rate} rows a second{origin_words(self.problem)}."
            + (f" It saves memory by {saved}." if saved else "")
        )

    def _operators(self) -> list[str]:
        named = [
            f"stage {number} on a mesh of {' × '.join(map(str, stage.operators.mesh_shape))}"
            for number, stage in enumerate(self.plan.stages)
            if stage.operators is not None
        ]
        if not named:
            return []
        listed = ", ".join(named[:MAX_PIPELINES]) + (", …" if len(named) > MAX_PIPELINES else "")
        return [f"Operators have shardings of their own ({listed}); the degrees come nearest to them."]

    def _pipelines(self) -> list[str]:
        if len(self.plan.pipelines) == 1:
            return []
        rows = [pipeline.micro_batches * pipeline.micro_batch_size for pipeline in self.plan.pipelines]
        parts = [
            f"{count} rows ({units.share(count, sum(rows))}) on {_counted(len(pipeline.devices), 'device')}"
            for count, pipeline in zip(rows, self.plan.pipelines, strict=True)
        ]
        shares = ", ".join(parts[:MAX_PIPELINES]) + (", …" if len(parts) > MAX_PIPELINES else "")
        return [f"{len(rows)} pipelines share the batch: {shares}."]

    def _pace(self) -> str:
        track, stage = self.tracks[self.bottleneck], self.plan.stages[self.bottleneck]
        whole = self.estimate.iteration_seconds
        where = (
            f"{_place(track, self.plan)} ({_counted(stage.end - stage.first, 'layer')} on {self._accelerators(stage)})"
        )
        busy = f"{units.seconds(track.busy_seconds)}, {units.share(track.busy_seconds, whole)} of the iteration"
        if len(self.tracks) == 1:
            return f"There is one stage and so no bubble: {where} is busy for {busy}."
        others = [track.busy_seconds for number, track in enumerate(self.tracks) if number != self.bottleneck]
        shares = dict.fromkeys(units.share(pace, whole) for pace in (min(others), max(others)))
        return (
            f"{where[0].upper()}{where[1:]} sets the pace: it is busy for {busy}; the "
            f"{'other' if len(others) == 1 else 'others'} for {' to '.join(shares)}."
        )

    def _bubble(self) -> list[str]:
        deep = [pipeline for pipeline in self.plan.pipelines if len(pipeline.stages) > 1]
        if not deep:
            return []
        whole = self.estimate.iteration_seconds
        idle = sum(track.idle_seconds for track in self.tracks) / len(self.tracks)
        transit = sum(track.transit_seconds for track in self.tracks) / len(self.tracks)
        pipeline = max(
            deep, key=lambda pipeline: (len(pipeline.stages) - 1) / (pipeline.micro_batches + len(pipeline.stages) - 1)
        )
        stages, batches = len(pipeline.stages), pipeline.micro_batches
        sentence = (
            f"Bubble: a stage waits {units.share(idle + transit, whole)} of the iteration, on average: "
            f"{units.share(idle, whole)} for work and {units.share(transit, whole)} for messages in transit. Filling and "
            f"draining {stages} equal stages with {_counted(batches, 'micro-batch')} would take "
            f"{units.share(stages - 1, batches + stages - 1)}; the difference comes from unequal stages, messages in "
            "transit and work after the last backward."
        )
        return [sentence]

    def _communication(self) -> str:
        parts, whole = self.estimate.breakdown, self.estimate.iteration_seconds
        spent = {part: getattr(parts, part) for part in COMMUNICATION}
        shares = [f"{units.share(seconds, whole)} {PART_WORDS[part]}" for part, seconds in spent.items() if seconds > 0]
        device = self.estimate.critical_device
        if not shares:
            return f"Communication takes no time on {device}, the last device to finish."
        return f"Communication on {device}, the last device to finish: {', '.join(shares)}."

    def _memory(self) -> list[str]:
        if self.estimate.reason is not None:
            return [f"Memory: it does not fit{self.problem.limits.headroom_words}: {self.estimate.reason}."]
        number = max(range(len(self.memory)), key=lambda place: self.memory[place].held_share)
        fullest = self.memory[number]
        parts = self.estimate.memory_parts[[str(d) for d in self.plan.devices].index(fullest.device)]
        sentence = (
            f"Memory: {fullest.device} in {_place(self.tracks[number], self.plan)} is the fullest: it holds "
            f"{format_bytes(fullest.held_bytes)} of {format_bytes(fullest.memory_bytes)}, "
            f"{units.share(fullest.spare_bytes, fullest.memory_bytes)} is free; most of it is {_largest_parts(parts)}."
        )
        return [sentence]

    def _unused(self) -> list[str]:
        unused = set(self.problem.cluster.devices) - set(self.plan.devices)
        if not unused:
            return []
        cluster = self.problem.cluster
        types = plan_summary.count_accelerators(sorted(unused), cluster)
        are = "is" if len(unused) == 1 else "are"
        return [f"Of the cluster's {len(cluster.devices)} devices, {len(unused)} {are} not used: {types}."]

    def _accelerators(self, stage: Stage) -> str:
        return plan_summary.count_accelerators(stage.devices, self.problem.cluster)

    def _devices(self, stage: Stage) -> str:
        """Return the accelerators of a stage, and where there are several nodes their names."""
        cluster, accelerators = self.problem.cluster, self._accelerators(stage)
        if len(cluster.nodes) == 1:
            return accelerators
        return f"{accelerators}, {plan_summary.node_names(stage.devices, cluster)}"

    def stage_table(self) -> Group:
        """Return the stages as a table of their figures and one of their degrees and devices."""
        heading = "pipeline.stage" if len(self.plan.pipelines) > 1 else "stage"
        figures = new_table(
            [
                (heading, "left"),
                ("layers", "right"),
                ("busy", "right"),
                ("waits", "right"),
                ("memory", "right"),
                ("free", "right"),
            ]
        )
        plans = new_table([(heading, "left"), ("degrees", "left"), ("devices", "left")])
        whole = self.estimate.iteration_seconds
        for number, (track, stage, memory) in enumerate(zip(self.tracks, self.plan.stages, self.memory, strict=True)):
            name = f"{track.pipeline}.{track.stage}" if len(self.plan.pipelines) > 1 else str(track.stage)
            style = "bold" if number == self.bottleneck else ""
            add_row(
                figures,
                name,
                str(stage.end - stage.first),
                units.share(track.busy_seconds, whole),
                units.share(track.idle_seconds + track.transit_seconds, whole),
                format_bytes(memory.held_bytes),
                units.share(memory.spare_bytes, memory.memory_bytes),
                style=style,
            )
            add_row(plans, name, plan_summary.strategies(stage), self._devices(stage), style=style)
        return Group(titled("Stages", figures), plans, Text())


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "es" if what.endswith("ch") else "s")


def _place(track: Track, plan: Plan) -> str:
    return f"stage {track.stage}" + (f" of pipeline {track.pipeline}" if len(plan.pipelines) > 1 else "")


def _largest_parts(parts: MemoryParts) -> str:
    """Name the two largest parts with their bytes."""
    part_bytes = {field.name: getattr(parts, field.name) for field in fields(MemoryParts)}
    largest = sorted(part_bytes, key=lambda part: -part_bytes[part])[:2]
    return " and ".join(f"{memory_words(part)} ({format_bytes(part_bytes[part])})" for part in largest)


def memory_words(part: str) -> str:
    """Name a field of MemoryParts: `weights`, `optimizer state`."""
    return part.removesuffix("_bytes").replace("optimizer", "optimizer state")
