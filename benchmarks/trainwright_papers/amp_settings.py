"""AMP's three experiments (§4.3, appendix §6.5): clusters, models, batches and ways to assign layers to stages.

AMP ran DeepSpeed with Megatron's layers: float16, attention stored (the experiments are older than fused kernels in
PyTorch), gradients reduced after the last backward, messages between stages sent between computations.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate

from trainwright.accelerators import cluster_of, estimate_profiles
from trainwright.cluster import Cluster
from trainwright.families import Family, Gpt, TransGan
from trainwright.layer import Attention, Dtype
from trainwright.model import Model
from trainwright.plan import Plan, divisors
from trainwright.runtime import Kernels, Runtime
from trainwright.search import Problem
from trainwright.search.degrees import Degrees
from trainwright.search.uniform.placed_stages import uniform_plan
from trainwright_papers.published import AmpSetting, MeasuredPlan

GPT2 = Gpt(layers=24, hidden_size=1024, heads=16, sequence_length=1024, vocabulary_size=52256, dropout=True)
"""GPT-2 with the dropout that Megatron-LM's arguments have by default."""
TRANS_GAN = TransGan(
    layers=(12, 0, 0, 0, 0, 12), hidden_size=1024, bottom_width=9, window_size=18, dropout=True, fused_gelu=False
)
"""TransGAN with the blocks of its authors' code (VITA-Group/TransGAN): dropout after the softmax, GELU by its formula."""


@dataclass(frozen=True)
class Experiment:
    """Cluster, model and batch of one of AMP's experiments.

    Attributes:
        machines: number of machines by type.
        entries: AMP's list entry of each of our layers, the last one if there are several.
    """

    title: str
    machines: Mapping[str, int]
    family: Family
    batch: int
    entries: tuple[int, ...]


_GPT2_ENTRIES = (0, *range(2, 26), 28)
"""Entries of 30, counted from 0 as the cuts do: 2–25 are the blocks, which Megatron's cuts divide evenly, with the embedding
before and the final normalisation and head after them.
"""
_TRANS_GAN_ENTRIES = (0, *range(3, 15), 15, 20, 25, 30, 35, *range(41, 53), 54)
"""Entries of 56: 3–14 and 41–52 are the blocks (the appendix counts from 1), with upsampling between them."""

EXPERIMENTS: Mapping[AmpSetting, Experiment] = {
    "homogeneous": Experiment("GPT-2 on 4 × g4dn.12xlarge", {"g4dn.12xlarge": 4}, GPT2, 32, _GPT2_ENTRIES),
    "mixed_cluster": Experiment(
        "GPT-2 on 3 × p3.8xlarge and 1 × g4dn.12xlarge",
        {"p3.8xlarge": 3, "g4dn.12xlarge": 1},
        GPT2,
        32,
        _GPT2_ENTRIES,
    ),
    "mixed_model": Experiment(
        "TransGAN's generator on 4 × p3.8xlarge", {"p3.8xlarge": 4}, TRANS_GAN, 64, _TRANS_GAN_ENTRIES
    ),
}


TRAINER_OF_2022 = Runtime(
    overlaps_gradients=False,
    splits_boundaries=False,
    hides_transfers=False,
    sequence_parallel=False,
    keeps_gathered_weights=False,
)
"""Megatron-LM and DeepSpeed as the papers ran them, before what hides or divides communication was common."""


@cache
def amp_problem(setting: AmpSetting) -> Problem:
    """Return the planning problem of one of AMP's experiments."""
    experiment = EXPERIMENTS[setting]
    return problem_on(cluster_of(experiment.machines), experiment.family, experiment.batch)


def problem_on(cluster: Cluster, family: Family, batch: int) -> Problem:
    """Return the problem of training a model on a cluster, with tensor degrees up to the devices of a node."""
    model = Model.of(family, Dtype.FLOAT16, Attention.STORED)
    devices_per_node = max(node.devices for node in cluster.nodes)
    # Megatron-LM fuses kernels; TransGAN's generator is plain PyTorch.
    kernels = Kernels.EAGER if isinstance(family, TransGan) else Kernels.FUSED
    runtime = replace(TRAINER_OF_2022, kernels=kernels)
    profiles = estimate_profiles(
        model,
        [accelerator.name for accelerator in cluster.accelerators],
        tensor_degrees=[degree for degree in divisors(model.max_tensor_degree) if degree <= devices_per_node],
        rows=divisors(batch),
        runtime=runtime,
    )
    return Problem(cluster, model, profiles, batch, runtime=runtime)


def amp_plan(measured: MeasuredPlan) -> Plan:
    """Convert a measured plan: AMP's cuts become layer boundaries, devices follow Megatron's order."""
    experiment, problem = EXPERIMENTS[measured.setting], amp_problem(measured.setting)
    stages = len(measured.cuts) - 1
    devices = problem.cluster.devices
    degrees = Degrees(stages, len(devices) // stages // measured.tensor, measured.tensor)
    stage_ends = [bisect_left(experiment.entries, cut) for cut in measured.cuts[1:]]
    return uniform_plan(devices, degrees, measured.rows, stage_ends, global_batch_size=experiment.batch)


def split_blocks_evenly(model: Model, stages: int) -> tuple[int, ...] | None:
    """Return stage ends with equally many blocks (tensor-parallel layers) per stage, or None with too few blocks.

    Other layers join the block before them; layers before the first block join the first stage.
    """
    blocks = model.blocks
    if len(blocks) < stages:
        return None
    return (*(blocks[number * len(blocks) // stages] for number in range(1, stages)), len(model.layers))


def split_parameters_evenly(model: Model, stages: int) -> tuple[int, ...]:
    """Return stage ends that minimise the parameters of the largest stage, with at least one layer per stage."""
    layers = len(model.layers)
    parameters_before = [0, *accumulate(model.kind_of(layer).parameters for layer in range(layers))]
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for stage in range(1, stages + 1):
        best = {
            end: min(
                (max(largest, parameters_before[end] - parameters_before[first]), (*ends, end))
                for first, (largest, ends) in best.items()
                if first < end
            )
            for end in range(stage, layers - (stages - stage) + 1)
        }
    return best[layers][1]
