"""Galvatron-BMW's experiments (§VII-A, table I): models, clusters, memory budgets and the search of the batch size.

PyTorch in float32 (TF32 on A100, PyTorch's default at the time), attention stored, Adam. Activations of the blocks
are scaled to table I's bytes per sample: the paper's models store dropout masks and outputs, and T5 stores copies in
float32, which our operators leave out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from trainwright.accelerators import data_sheet, estimate_profiles
from trainwright.cluster import Accelerator, Cluster, Node, Port
from trainwright.families import T5, Bert, Family, Swin, Vit
from trainwright.layer import Attention, Dtype
from trainwright.model import Model
from trainwright.profiles import Profiles
from trainwright.search import Candidate, Problem
from trainwright_papers.amp_settings import TRAINER_OF_2022
from trainwright_papers.published import galvatron_figures

GIBIBYTE = 2**30

BATCH_STEP = 8
"""Batch sizes are multiples of it, as in the paper's tables."""
MAX_BATCH = 1024
MIN_THROUGHPUT_GAIN = 1.01
"""Batch sizes grow as long as throughput rises by this ratio."""

_HEADS = (8, 16, 32, 64)
"""Heads of Swin's stages, 40 values each; the usual 32 values would give 10 heads, which eight devices cannot share."""

MODELS: Mapping[str, Family] = {
    "BERT-Huge-32": Bert(layers=32, hidden_size=1280, heads=16),
    "BERT-Huge-48": Bert(layers=48, hidden_size=1280, heads=16),
    "BERT-xHuge": Bert(layers=128, hidden_size=2560, heads=32),
    "ViT-Huge-32": Vit(layers=32, hidden_size=1280, heads=16),
    "ViT-Huge-48": Vit(layers=48, hidden_size=1280, heads=16),
    "ViT-xHuge": Vit(layers=128, hidden_size=2560, heads=32),
    "T5-Large-32": T5(layers=16, hidden_size=1024, heads=16),
    "T5-Large-48": T5(layers=24, hidden_size=1024, heads=16),
    "T5-512/4-32": T5(layers=16, hidden_size=1024, heads=16, decoder_sequence_length=4),
    "T5-512/4-48": T5(layers=24, hidden_size=1024, heads=16, decoder_sequence_length=4),
    "Swin-Huge-32": Swin(layers=(2, 2, 26, 2), hidden_size=320, heads=_HEADS),
    "Swin-Huge-48": Swin(layers=(2, 2, 42, 2), hidden_size=320, heads=_HEADS),
}
"""Sequences of 512 tokens and images of 224 × 224, with which parameters match table I within 0.5 %."""

INFINIBAND = Port(15e-6, 12.5e9)
"""Network of 100 Gbit/s."""


@dataclass(frozen=True, slots=True)
class Machines:
    """Identical machines of eight devices.

    Attributes:
        inside: link within a machine, at the achievable share of our machine data sheets: 0.39 of PCIe 3.0, since data
            passes through the host (TITAN RTX has no peer access), or 0.77 of NVLink.
    """

    title: str
    accelerator: str
    count: int
    inside: Port
    network: Port = INFINIBAND

    @property
    def devices(self) -> int:
        return 8 * self.count

    def cluster(self, budget: int) -> Cluster:
        """Return the machines as a cluster whose devices have `budget` GiB of memory each."""
        accelerator = Accelerator(self.accelerator, memory_bytes=budget * GIBIBYTE)
        nodes = tuple(
            Node(f"node-{number}", self.accelerator, 8, network=self.network, inside=self.inside)
            for number in range(1, self.count + 1)
        )
        return Cluster((accelerator,), nodes)


_PCIE = Port(10e-6, 0.39 * 16e9)
_NVLINK = Port(10e-6, 0.77 * 300e9)
EIGHT_TITAN = Machines("8 × TITAN RTX, PCIe 3.0", "NVIDIA-TITAN-RTX", 1, _PCIE)
SIXTEEN_TITAN = Machines("2 × 8 TITAN RTX, 100 Gbit/s between", "NVIDIA-TITAN-RTX", 2, _PCIE)
SIXTEEN_A100 = Machines("2 × 8 A100, NVLink, 100 Gbit/s between", "NVIDIA-A100-SXM4-40GB", 2, _NVLINK)
SIXTY_FOUR_A100 = Machines("8 × 8 A100, NVLink, 100 Gbit/s between", "NVIDIA-A100-SXM4-40GB", 8, _NVLINK)

RUNTIME = replace(TRAINER_OF_2022, overlaps_gradients=True, constant_bytes=GIBIBYTE)
"""Runtime that reduces gradients during the last backward, as PyTorch's DDP does; both slow down by 1.3 (§V).

Every tensor rank is sent the whole boundary, and a stage computes nothing meanwhile (`_run_p2pops` of Hetu-Galvatron).

One GiB of each budget is reserved for CUDA's context, NCCL's buffers and fragmentation. The paper does not state it;
of the round figures, one GiB agrees best with the out-of-memory cells of its tables.
"""

_ROWS = tuple(2**power for power in range(11))


def galvatron_problem(machines: Machines, model: str, budget: int, batch: int) -> Problem:
    """Return the problem of training a model of table I on these machines."""
    return Problem(
        machines.cluster(budget), _model(model), _profiles(machines.accelerator, model), batch, runtime=RUNTIME
    )


@cache
def _model(name: str) -> Model:
    return Model.of(MODELS[name], Dtype.FLOAT32, Attention.STORED)


def block_activation_ratio(name: str) -> float:
    """Return the ratio of a block's stored activation bytes in table I to those that our operators count."""
    model = _model(name)
    in_blocks = elsewhere = 0.0
    for layer in range(len(model.layers)):
        kind = model.kind_of(layer)
        if kind.is_tensor_parallel:
            in_blocks += kind.saved_bytes_per_row(model.dtype)
        else:
            elsewhere += kind.saved_bytes_per_row(model.dtype)
    return (galvatron_figures().models[name].activation_megabytes * 1e6 - elsewhere) / in_blocks


@cache
def _profiles(accelerator: str, name: str) -> Profiles:
    model, ratio = _model(name), block_activation_ratio(name)
    degrees = [2**power for power in range(5) if model.max_tensor_degree % 2**power == 0]
    tensor_float32 = data_sheet(accelerator).tensor_float32_flops_per_second is not None
    estimated = estimate_profiles(
        model, [accelerator], tensor_degrees=degrees, rows=_ROWS, tensor_float32=tensor_float32
    )
    layers = tuple(
        replace(layer, activation_bytes=round(layer.activation_bytes * ratio))
        if model.kind(layer.kind).is_tensor_parallel
        else layer
        for layer in estimated.layers
    )
    return Profiles(layers, origin="estimated")


@dataclass(frozen=True, slots=True)
class BatchSizeSearch:
    """Search of the batch size with the best throughput, which rises with the batch until memory is full.

    Attributes:
        growth: ratio of successive batch sizes.
        bisections: bisections between the largest size that fits and the smallest that does not.
    """

    growth: int = 2
    bisections: int = 3

    def best(self, evaluate: Callable[[int], Candidate | None], *, first: int = BATCH_STEP) -> Candidate | None:
        """Return the candidate with the most samples per second, or None if no batch size fits.

        `first` is the size to start from; a size that is known to fit saves evaluations.
        """
        throughputs = _BestThroughput(evaluate)
        fitting, too_large = 0, MAX_BATCH + BATCH_STEP
        size = first
        while size <= MAX_BATCH:
            gain = throughputs.gain(size)
            if gain is None:
                too_large = size
                break
            fitting = size
            if gain < MIN_THROUGHPUT_GAIN:
                return throughputs.best
            size *= self.growth
        for _ in range(self.bisections):
            middle = (fitting + too_large) // 2 // BATCH_STEP * BATCH_STEP
            if middle <= fitting or too_large > MAX_BATCH:
                break
            if throughputs.gain(middle) is None:
                too_large = middle
            else:
                fitting = middle
        return throughputs.best


@dataclass
class _BestThroughput:
    evaluate: Callable[[int], Candidate | None]
    best: Candidate | None = None
    _rate: float = field(default=0.0)

    def gain(self, size: int) -> float | None:
        """Return the throughput of a batch size over the best so far, or None if the size does not fit."""
        candidate = self.evaluate(size)
        if candidate is None:
            return None
        rate = samples_per_second(candidate)
        gain = rate / self._rate if self._rate else float("inf")
        if gain > 1:
            self.best, self._rate = candidate, rate
        return gain


def samples_per_second(candidate: Candidate) -> float:
    """Return the predicted throughput of a candidate."""
    return candidate.plan.global_batch_size / candidate.estimate.iteration_seconds
