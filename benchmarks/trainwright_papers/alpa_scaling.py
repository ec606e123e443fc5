"""Alpa's weak scaling (§8.1): the models of its tables 6–8, planned on the paper's machines.

The paper draws these results (figure 7) and prints few of their numbers, which stand in the notes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from trainwright.accelerators import cluster_of, estimate_profiles
from trainwright.cluster import Cluster
from trainwright.families import Family, Gpt, Moe, WideResnet
from trainwright.layer import Attention, Dtype
from trainwright.model import Model
from trainwright.plan import divisors
from trainwright.search import Candidate, Limits, NoFeasiblePlan, Problem, run
from trainwright.throughput import flops_per_row
from trainwright_papers.amp_settings import TRAINER_OF_2022
from trainwright_papers.comparison import Comparison, Grid, Record, ReportProgress, format_figure
from trainwright_papers.published import OUT_OF_MEMORY, alpa_figures

MACHINE, DEVICES_PER_NODE = "p3.16xlarge", 8
EXPERT_WIDTH_RATIO = 8
"""Width of an expert over the hidden size: with it the parameters of table 7 come out."""
HEADINGS = ("model", "GPUs", "Alpa", "of linear", "one stage", "without operators", "search", "plan")


@dataclass(frozen=True)
class ScaledModel:
    """Model of one size, and the number of devices that train it."""

    name: str
    family: Family
    devices: int


@dataclass(frozen=True)
class Experiment:
    """One kind of model in all of its sizes (table 4 has batch and format).

    Attributes:
        stated: what the text says of the results.
    """

    table: str
    title: str
    models: Callable[[], tuple[ScaledModel, ...]]
    batch: int
    dtype: Dtype
    stated: str


def _gpts() -> tuple[ScaledModel, ...]:
    return tuple(
        ScaledModel(name, Gpt(size.layers, size.hidden_size, size.heads, 1024, 51200), size.devices)
        for name, size in alpa_figures().gpt.items()
    )


def _mixtures() -> tuple[ScaledModel, ...]:
    return tuple(
        ScaledModel(
            name,
            Moe(
                size.layers,
                size.hidden_size,
                size.heads,
                1024,
                32000,
                experts=size.experts,
                expert_every=2,
                intermediate_size=EXPERT_WIDTH_RATIO * size.hidden_size,
                gated=False,
                tied_embeddings=True,
            ),
            size.devices,
        )
        for name, size in alpa_figures().moe.items()
    )


def _wide_resnets() -> tuple[ScaledModel, ...]:
    return tuple(
        ScaledModel(
            name,
            WideResnet(size.depth, size.width_factor, widened="second", base_channels=size.base_channels, classes=1024),
            size.devices,
        )
        for name, size in alpa_figures().wide_resnet.items()
    )


EXPERIMENTS: Mapping[str, Experiment] = {
    "alpa-6": Experiment(
        "6",
        "GPT",
        _gpts,
        1024,
        Dtype.FLOAT16,
        "The paper: Megatron-LM and Alpa scale better than linearly to 64 GPUs, and intra-operator parallelism alone "
        "performs poorly on more than 16; the search of GPT-39B took 2,393 s, of which 1.65 s were the dynamic program (table 5).",
    ),
    "alpa-7": Experiment(
        "7",
        "mixture of experts (GShard)",
        _mixtures,
        1024,
        Dtype.FLOAT16,
        "The paper: 3.5 times DeepSpeed, which has experts and ZeRO but no pipeline, on two nodes and 9.7 times on four; "
        "linear scaling to 16 GPUs.",
    ),
    "alpa-8": Experiment(
        "8",
        "Wide-ResNet",
        _wide_resnets,
        1536,
        Dtype.FLOAT32,
        "The paper: 80 % of linear scaling on 32 GPUs; without operators of its own (pipeline and data parallelism alone) "
        "large models run out of memory.",
    ),
}
SETTINGS = (
    "V100 of 16 GB, eight a node, 25 Gbit/s between nodes; attention stored, nothing overlapped. `of linear`: TFLOP/s over "
    "those of the smallest model. `one stage`: Alpa without a pipeline, the paper's intra-operator parallelism alone. "
    "`without operators`: the best plan of one pipeline with data parallelism alone. FLOPs are those of three passes, without recompute; the paper's PFLOPS are of all GPUs together."
)


@dataclass(frozen=True)
class _Row:
    model: ScaledModel
    flops: float
    best: Candidate | None
    one_stage: Candidate | None
    data_only: Candidate | None
    search_seconds: float

    def teraflops(self, candidate: Candidate | None) -> float | None:
        """Return 10¹² model FLOPs that each device does in a second; None if nothing fits."""
        if candidate is None:
            return None
        return self.flops / candidate.estimate.iteration_seconds / self.model.devices / 1e12

    def record(self) -> Record:
        return {
            "model": self.model.name,
            "devices": self.model.devices,
            "alpa_teraflops": self.teraflops(self.best),
            "one_stage_teraflops": self.teraflops(self.one_stage),
            "without_operators_teraflops": self.teraflops(self.data_only),
            "search_seconds": self.search_seconds,
            "plan": None if self.best is None else self.best.plan.summary(),
        }


def scaling_table(name: str, *, report_progress: ReportProgress) -> Comparison:
    """Plan all models of one of the tables 6–8."""
    experiment = EXPERIMENTS[name]
    models = experiment.models()
    rows = []
    for finished, model in enumerate(models):
        report_progress(f"{experiment.title} {model.name}", finished / len(models))
        rows.append(_row(experiment, model))
    return Comparison(
        name=name,
        title=f"Alpa, table {experiment.table}: {experiment.title}, TFLOP/s of each GPU",
        records=tuple(row.record() for row in rows),
        grids=(Grid(experiment.title, HEADINGS, tuple(_cells(rows))),),
        notes=(experiment.stated, SETTINGS),
    )


def _row(experiment: Experiment, scaled: ScaledModel) -> _Row:
    problem = _problem(experiment, scaled)
    began = time.perf_counter()
    best = _best("alpa", problem, Limits())
    seconds = time.perf_counter() - began
    return _Row(
        scaled,
        experiment.batch * flops_per_row(problem.model),
        best,
        _best("alpa", problem, Limits(max_pipeline_degree=1)),
        _best("amp", problem, Limits(max_tensor_degree=1)),
        seconds,
    )


def _problem(experiment: Experiment, scaled: ScaledModel) -> Problem:
    cluster = _cluster(scaled.devices)
    model = Model.of(scaled.family, experiment.dtype, Attention.STORED)
    profiles = estimate_profiles(
        model,
        [accelerator.name for accelerator in cluster.accelerators],
        tensor_degrees=[degree for degree in divisors(model.max_tensor_degree) if degree <= DEVICES_PER_NODE],
        rows=divisors(experiment.batch),
        runtime=TRAINER_OF_2022,
    )
    return Problem(cluster, model, profiles, experiment.batch, runtime=TRAINER_OF_2022)


def _cluster(devices: int) -> Cluster:
    """Return the paper's machines with this number of devices; fewer than a machine has are of one machine."""
    cluster = cluster_of({MACHINE: max(devices // DEVICES_PER_NODE, 1)})
    return replace(cluster, nodes=tuple(replace(n, devices=min(devices, DEVICES_PER_NODE)) for n in cluster.nodes))


def _best(planner: str, problem: Problem, limits: Limits) -> Candidate | None:
    try:
        return run(planner, replace(problem, limits=limits), top=1)[0]
    except NoFeasiblePlan:
        return None


def _cells(rows: list[_Row]) -> Iterator[tuple[str, ...]]:
    first = rows[0].teraflops(rows[0].best)
    for row in rows:
        best = row.teraflops(row.best)
        linear = None if first is None or best is None else best / first
        yield (
            row.model.name,
            str(row.model.devices),
            _figure(best),
            "" if linear is None else f"{linear:.0%}",
            _figure(row.teraflops(row.one_stage)),
            _figure(row.teraflops(row.data_only)),
            f"{row.search_seconds:.0f} s",
            "" if row.best is None else row.best.plan.summary().partition(" [")[0],
        )


def _figure(teraflops: float | None) -> str:
    return OUT_OF_MEMORY if teraflops is None else format_figure(teraflops)
