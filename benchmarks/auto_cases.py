"""Cases on which searches are compared: a fixed random draw of clusters of one to four device types."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from trainwright.accelerators import data_sheet
from trainwright.answer.question import estimate_from_data_sheets
from trainwright.cluster import Accelerator, Cluster, Link, Node, Port
from trainwright.cost.memory_terms import ValueBytes
from trainwright.families import T5, Bert, Family, Gpt, Llama, Moe, Swin, TransGan, Vit, WideResnet
from trainwright.layer import Dtype
from trainwright.runtime import Runtime
from trainwright.search import SEARCHES, Problem, Search
from trainwright.search.alpa.search import alpa_of_degrees
from trainwright.training import Optimizer, Training

SEARCHES_OF_DEGREES: Mapping[str, Search] = {**SEARCHES, "alpa": alpa_of_degrees}
"""Searches by name; of Alpa the plans of degrees alone, which `auto` takes."""

FAST_HOST = Runtime(host_seconds_per_operator=30e-6)
"""Runtime of the cases' profiles, that of the recorded searches."""

TYPES: Mapping[str, str] = {
    "P100": "Tesla-P100-PCIE-16GB",
    "V100": "Tesla-V100-SXM2-16GB",
    "V100-32": "Tesla-V100-SXM2-32GB",
    "T4": "Tesla-T4",
    "2080Ti": "NVIDIA-GeForce-RTX-2080-Ti",
    "3090": "NVIDIA-GeForce-RTX-3090",
    "A10G": "NVIDIA-A10G",
    "L4": "NVIDIA-L4",
    "A100": "NVIDIA-A100-SXM4-40GB",
    "A100-80": "NVIDIA-A100-SXM4-80GB",
    "H100": "NVIDIA-H100-80GB-HBM3",
}
"""Short names of the cases' data sheets."""

MODELS: Mapping[str, tuple[Family, Dtype, Optimizer]] = {
    "GPT, 4 blocks": (Gpt(4, 768, 12, 512, 32000), Dtype.FLOAT16, "adam"),
    "GPT-2 small": (Gpt(12, 768, 12, 1024, 50304), Dtype.FLOAT16, "adam"),
    "GPT-2 medium": (Gpt(24, 1024, 16, 1024, 50304), Dtype.FLOAT16, "adam"),
    "GPT-2 medium, float32": (Gpt(24, 1024, 16, 1024, 50304), Dtype.FLOAT32, "adam"),
    "GPT, 256,000 words": (Gpt(12, 1024, 16, 1024, 256_000), Dtype.FLOAT16, "adam"),
    "GPT, 126 blocks": (Gpt(126, 1024, 16, 1024, 50304), Dtype.FLOAT16, "adam"),
    "GPT 1.3B": (Gpt(24, 2048, 16, 2048, 50304), Dtype.FLOAT16, "adam"),
    "GPT 6.7B": (Gpt(32, 4096, 32, 2048, 50304), Dtype.FLOAT16, "adam"),
    "GPT 39B": (Gpt(48, 8192, 64, 1024, 51200), Dtype.FLOAT16, "adam"),
    "Llama 7B": (Llama(32, 4096, 32, 2048), Dtype.FLOAT16, "adam"),
    "Llama 13B": (Llama(40, 5120, 40, 2048), Dtype.FLOAT16, "adam"),
    "BERT large": (Bert(24, 1024, 16), Dtype.FLOAT16, "adam"),
    "BERT, 48 blocks": (Bert(48, 1280, 16), Dtype.FLOAT16, "adam"),
    "ViT large": (Vit(24, 1024, 16), Dtype.FLOAT16, "adam"),
    "ViT huge": (Vit(32, 1280, 16), Dtype.FLOAT16, "adam"),
    "Swin tiny": (Swin((2, 2, 6, 2), 96), Dtype.FLOAT16, "adam"),
    "Swin large": (Swin((2, 2, 18, 2), 192), Dtype.FLOAT16, "adam"),
    "Swin, 48 blocks": (Swin((2, 2, 42, 2), 320), Dtype.FLOAT16, "adam"),
    "T5 base": (T5(12, 768, 12), Dtype.FLOAT16, "adam"),
    "T5 large": (T5(24, 1024, 16), Dtype.FLOAT16, "adam"),
    "T5, short decoder": (
        T5(24, 1024, 16, decoder_layers=6, sequence_length=1024, decoder_sequence_length=128),
        Dtype.FLOAT16,
        "adam",
    ),
    "Wide-ResNet 50": (WideResnet(50, 2), Dtype.FLOAT32, "sgd"),
    "Wide-ResNet 101": (WideResnet(101, 4), Dtype.FLOAT16, "sgd"),
    "Wide-ResNet 152": (WideResnet(152, 8), Dtype.FLOAT16, "sgd"),
    "TransGAN": (TransGan(), Dtype.FLOAT16, "adam"),
    "MoE, 16 blocks": (Moe(16, 1024, 16, 1024), Dtype.FLOAT16, "adam"),
}

NVLINK, PCIE = Port(5e-6, 1.2e11), Port(1e-5, 1.2e10)
GBITS = (10, 25, 50, 100, 200, 400)
BATCHES = (8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 2048)
SIZES = (2, 16, 3, 64, 4, 32, 8, 128, 4, 16, 6, 1024, 8, 24, 12, 48, 5, 64, 16, 256, 8, 32, 10, 512, 12, 40, 20, 64)
"""Device counts of successive cases with the same number of types, used twice."""
PER_NUMBER_OF_TYPES = 2 * len(SIZES)
SLOW_UPLINK_RATIO, SLOW_CARD_RATIO = 5, 8
MAX_LINKED_NODES = 64
"""Maximum number of nodes of topologies with explicit links."""
LOOSE_RATIO, TIGHT_RATIO = 0.35, 0.6
"""Maximum share of all memory for weights, gradients and optimizer state, normal and with tight memory."""
SHARE_TIGHT, TIGHTEST_RATIO = 0.45, 0.1
"""Probability of tight memory, and the lowest `Case.memory_ratio`."""


@dataclass(frozen=True)
class Group:
    """`nodes` equal nodes with `devices` devices of one type each."""

    type: str
    nodes: int
    devices: int

    def __str__(self) -> str:
        return f"{self.nodes}×{self.devices} {self.type}"


@dataclass(frozen=True)
class Case:
    """Comparison problem.

    Attributes:
        topology: `flat`; `slow rack`: a slow uplink connects the second half of the nodes; `slow node`: the last
            node has a slow NIC.
        memory_ratio: usable memory over the data sheets' memory.
    """

    number: int
    groups: tuple[Group, ...]
    inside: str
    gbits: int
    topology: str
    memory_ratio: float
    model: str
    batch: int

    def __str__(self) -> str:
        tight = "" if self.memory_ratio == 1 else f", {self.memory_ratio:.0%} of the memory"
        groups = " + ".join(map(str, self.groups))
        return f"{groups}, {self.inside}, {self.gbits} Gbit/s, {self.topology}{tight}; {self.model}, batch {self.batch}"

    @property
    def types(self) -> int:
        return len({group.type for group in self.groups})

    @property
    def devices(self) -> int:
        return sum(group.nodes * group.devices for group in self.groups)

    @cached_property
    def cluster(self) -> Cluster:
        names = dict.fromkeys(TYPES[group.type] for group in self.groups)
        accelerators = tuple(
            Accelerator(name, int(data_sheet(name).memory_bytes.value * self.memory_ratio)) for name in names
        )
        inside = NVLINK if self.inside == "NVLink" else PCIE
        card = Port(2e-5, self.gbits / 8 * 1e9)
        nodes = [
            Node(f"{group.type}-{at}-{number}", TYPES[group.type], group.devices, card, inside)
            for at, group in enumerate(self.groups)
            for number in range(group.nodes)
        ]
        if self.topology == "slow node":
            slow = Port(card.latency_seconds, card.bandwidth_bytes_per_second / SLOW_CARD_RATIO)
            nodes[-1] = Node(nodes[-1].name, nodes[-1].accelerator, nodes[-1].devices, slow, inside)
        links = _uplinks(nodes, card) if self.topology == "slow rack" else ()
        return Cluster(accelerators, tuple(nodes), links)

    @cached_property
    def training(self) -> Training:
        family, dtype, optimizer = MODELS[self.model]
        training = Training(self.batch, optimizer=optimizer, **{family.family: family})  # type: ignore[arg-type]
        return training.in_format(dtype)

    def problem(self) -> Problem:
        """Return a new problem with profiles from data sheets, estimated as `trainwright plan` does but for a fast host."""
        training = self.training
        names = [accelerator.name for accelerator in self.cluster.accelerators]
        profiles = estimate_from_data_sheets(training, names, devices=self.devices, runtime=FAST_HOST)
        cluster = Cluster(self.cluster.accelerators, self.cluster.nodes, self.cluster.links)
        return Problem(cluster, training.model, profiles, self.batch, optimizer=training.optimizer)


def _uplinks(nodes: Sequence[Node], card: Port) -> tuple[Link, ...]:
    half = (len(nodes) + 1) // 2
    rate = card.bandwidth_bytes_per_second / SLOW_UPLINK_RATIO
    return tuple(
        Link(*ends, 2 * card.latency_seconds, rate)
        for here in nodes[:half]
        for there in nodes[half:]
        for ends in ((here.name, there.name), (there.name, here.name))
    )


def cases() -> tuple[Case, ...]:
    """Return all cases, those of one type first. Deterministic."""
    return tuple(
        _draw(types, index, (types - 1) * PER_NUMBER_OF_TYPES + index)
        for types in (1, 2, 3, 4)
        for index in range(PER_NUMBER_OF_TYPES)
    )


def _draw(types: int, index: int, number: int) -> Case:
    pick = random.Random(f"case {number}")  # noqa: S311 - no secrets
    groups = _groups(pick, types, max(SIZES[index % len(SIZES)], types))
    devices = sum(group.nodes * group.devices for group in groups)
    nodes = sum(group.nodes for group in groups)
    topologies = ["flat", "flat", "flat"]
    topologies += ["slow node"] if nodes > 1 else []
    topologies += ["slow rack"] if 3 < nodes <= MAX_LINKED_NODES else []
    memory = sum(group.nodes * group.devices * data_sheet(TYPES[group.type]).memory_bytes.value for group in groups)
    shares = {name: _state_bytes(name) / memory for name in MODELS if _worth(name, devices)}
    tight = {name: share for name, share in shares.items() if TIGHTEST_RATIO <= share / TIGHT_RATIO <= 1}
    if pick.random() > SHARE_TIGHT:
        tight = {}
    model = pick.choice(list(tight) or [name for name, share in shares.items() if share <= LOOSE_RATIO])
    return Case(
        number,
        groups,
        pick.choice(("NVLink", "PCIe")),
        pick.choice(GBITS),
        pick.choice(topologies),
        round(shares[model] / TIGHT_RATIO, 3) if tight else 1.0,
        model,
        pick.choice([rows for rows in BATCHES if devices / 2 <= rows <= max(32, 24 * devices)]),
    )


def _groups(pick: random.Random, types: int, devices: int) -> tuple[Group, ...]:
    """Draw node groups of about `devices` devices, split unevenly over the types."""
    names = pick.sample(sorted(TYPES), types)
    weights = [pick.choice((1, 1, 2, 3)) for _ in names]
    found = []
    for name, weight in zip(names, weights, strict=True):
        part = max(round(devices * weight / sum(weights)), 1)
        size = pick.choice([size for size in (1, 2, 4, 8) if size <= part <= 64 * size] or [8])
        found.append(Group(name, max(part // size, 1), size))
    return tuple(found)


@cache
def _state_bytes(model: str) -> float:
    """Return bytes of weights, gradients and optimizer state of one copy of the model."""
    family, dtype, optimizer = MODELS[model]
    training = Training(1, optimizer=optimizer, **{family.family: family}).in_format(dtype)  # type: ignore[arg-type]
    per_value = ValueBytes.of(training.model, optimizer, Dtype.FLOAT32)
    return training.model.parameters * per_value.unsharded


def _worth(model: str, devices: int) -> bool:
    """Return whether the model is large enough for that many devices: nobody trains a tiny model on a thousand."""
    return devices <= 64 or _state_bytes(model) >= devices * 2e7
