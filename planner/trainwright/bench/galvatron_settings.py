"""Galvatron-BMW's experiments (§VII-A, table I): models, clusters and budgets, with profiles from data sheets.

PyTorch on float32 (in TF32 on A100, PyTorch's default at the time), attention stored, Adam. Activations of the blocks
are scaled to what table I states for a sample: the paper's models keep dropout's masks and outputs, and T5 copies in
float32, which ours leave out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from trainwright.accelerators import data_sheet, estimate_profiles
from trainwright.bench.figures import galvatron_figures
from trainwright.cluster import Accelerator, Cluster, Node, Port
from trainwright.families import T5, Bert, Family, Swin, Vit
from trainwright.layer import Attention, Dtype
from trainwright.model import Model
from trainwright.profiles import Profiles
from trainwright.runtime import Runtime
from trainwright.search import Problem

GIBIBYTE = 2**30

_HEADS = (8, 16, 32, 64)
"""Of Swin's stages: 40 values each. The usual 32 would leave 10 heads, which eight devices cannot share."""

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
"""Sequences of 512 tokens and images of 224 × 224: with these, parameters are table I's within 0.5 %."""


INFINIBAND = Port(15e-6, 12.5e9)
"""100 Gbit/s."""


@dataclass(frozen=True, slots=True)
class Machines:
    """Equal machines of eight devices.

    Attributes:
        inside: what a ring inside one reaches: 0.39 of PCIe 3.0, as data passes through the host (TITAN RTX has no
            peer access), or 0.77 of NVLink, the shares that our data sheets of machines take throughout.
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
        """The machines, whose devices may fill so many gibibytes."""
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

RUNTIME = Runtime(overlaps_gradients=True, constant_bytes=GIBIBYTE)
"""Gradients are summed while the last backward still runs, as PyTorch's DDP does; both slow down by 1.3 (§V).

A gibibyte of each budget goes to CUDA's context, NCCL's buffers and fragmentation. The paper does not say; of the round
figures this one agrees best with what its tables have out of memory.
"""

_ROWS = tuple(2**power for power in range(11))


def galvatron_problem(machines: Machines, model: str, budget: int, batch: int) -> Problem:
    """A model of table I on those machines."""
    return Problem(
        machines.cluster(budget), _model(model), _profiles(machines.accelerator, model), batch, runtime=RUNTIME
    )


@cache
def _model(name: str) -> Model:
    return Model.of(MODELS[name], Dtype.FLOAT32, Attention.STORED)


def block_activation_ratio(name: str) -> float:
    """By how much the blocks keep more for the backward than our operators say, by table I."""
    model = _model(name)
    inside = outside = 0.0
    for layer in range(len(model.layers)):
        kind = model.kind_of(layer)
        if kind.is_tensor_parallel:
            inside += kind.saved_bytes_per_row(model.dtype)
        else:
            outside += kind.saved_bytes_per_row(model.dtype)
    return (galvatron_figures().models[name].activation_megabytes * 1e6 - outside) / inside


@cache
def _profiles(accelerator: str, name: str) -> Profiles:
    model, ratio = _model(name), block_activation_ratio(name)
    degrees = [2**power for power in range(5) if model.max_tensor_degree % 2**power == 0]
    in_tensor_cores = data_sheet(accelerator).tensor_float32_flops_per_second is not None
    estimated = estimate_profiles(
        model, [accelerator], tensor_degrees=degrees, rows=_ROWS, tensor_float32=in_tensor_cores
    )
    layers = tuple(
        replace(layer, activation_bytes=round(layer.activation_bytes * ratio))
        if model.kind(layer.kind).is_tensor_parallel
        else layer
        for layer in estimated.layers
    )
    return Profiles(layers, origin="estimated")
