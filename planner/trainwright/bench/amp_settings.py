"""AMP's three experiments (§4.3, appendix §6.5): clusters, models and batches, with profiles from data sheets.

DeepSpeed with Megatron's layers: float16, attention stored (the experiments are older than fused kernels in PyTorch),
gradients summed in float16 after the last backward.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from trainwright.accelerators import cluster_of, estimate_profiles
from trainwright.bench.figures import AmpSetting, MeasuredPlan
from trainwright.cluster import Cluster
from trainwright.families import Family, Gpt, TransGan
from trainwright.layer import Attention, Dtype
from trainwright.model import Model
from trainwright.plan import Plan
from trainwright.search import Problem
from trainwright.search.degrees import Degrees, divisors
from trainwright.search.placement import uniform_plan

GPT2 = Gpt(layers=24, hidden_size=1024, heads=16, sequence_length=1024, vocabulary_size=52256)
TRANS_GAN = TransGan(layers=(12, 0, 0, 0, 0, 12), hidden_size=1024, bottom_width=9)


@dataclass(frozen=True)
class Experiment:
    """One of AMP's experiments.

    Attributes:
        machines: how many of each type.
        entries: for each of our layers, the (last) entry of AMP's list that it stands for; others are no work.
    """

    title: str
    machines: Mapping[str, int]
    family: Family
    batch: int
    entries: tuple[int, ...]


_GPT2_ENTRIES = (1, *range(3, 27), 29)
"""Of 30, 3–26 are the blocks; the embedding stands before them, the final normalisation and the head behind."""
_TRANS_GAN_ENTRIES = (0, *range(4, 16), 16, 21, 26, 31, 36, *range(42, 54), 55)
"""Of 56, 4–15 and 42–53 are the blocks; what makes the image larger stands between them."""

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


@cache
def amp_problem(setting: AmpSetting) -> Problem:
    """What AMP searched, as our searches are asked."""
    experiment = EXPERIMENTS[setting]
    return problem_on(cluster_of(experiment.machines), experiment.family, experiment.batch)


def problem_on(cluster: Cluster, family: Family, batch: int) -> Problem:
    """A model of AMP's on any cluster; tensor degrees up to the devices of a node."""
    model = Model.of(family, Dtype.FLOAT16, Attention.STORED)
    largest = max(node.devices for node in cluster.nodes)
    profiles = estimate_profiles(
        model,
        [accelerator.name for accelerator in cluster.accelerators],
        tensor_degrees=[degree for degree in divisors(model.max_tensor_degree) if degree <= largest],
        rows=divisors(batch),
    )
    return Problem(cluster, model, profiles, batch)


def amp_plan(measured: MeasuredPlan) -> Plan:
    """A measured plan in our words: AMP's cuts between our layers, devices in Megatron's order."""
    experiment, problem = EXPERIMENTS[measured.setting], amp_problem(measured.setting)
    stages = len(measured.cuts) - 1
    devices = problem.cluster.devices
    degrees = Degrees(stages, len(devices) // stages // measured.tensor, measured.tensor)
    ends = [bisect_left(experiment.entries, cut) for cut in measured.cuts[1:]]
    return uniform_plan(devices, degrees, measured.rows, ends, global_batch_size=experiment.batch)
