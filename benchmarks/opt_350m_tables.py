"""The public tables of OPT-350M on A100 and V100, and what they say as documents of the planner's own.

They come from the repository eth-easl/sailor (MIT licence, Copyright (c) 2023-present ETH Zurich) and are not part of
this one: `OPT_350M_TABLES` names the folder that holds them.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from trainwright.cluster import Accelerator, Cluster, Node, Port
from trainwright.families import Gpt
from trainwright.model import Model
from trainwright.profile_imports import FORMATS, ImportOptions
from trainwright.profiles import Profiles
from trainwright.runtime import Runtime
from trainwright.search import Limits, Problem

VARIABLE = "OPT_350M_TABLES"
DEVICES_PER_NODE = 4
GLOBAL_BATCH_SIZE = 1024
MODEL = Model.of(Gpt(layers=24, hidden_size=1024, heads=16, sequence_length=2048, vocabulary_size=50304))
"""OPT-350M as it was measured: its vocabulary of 50,272 padded as the embedding's 53,608,448 values tell."""
MEMORY_BYTES: Mapping[str, int] = {"A100-40": 40 * 2**30, "V100-16": 16 * 2**30}
RUNTIME_BYTES = 3 * 10**9 + 8 * sum(MODEL.kind_of(layer).parameters for layer in range(len(MODEL.layers)))
"""What Megatron and DeepSpeed hold on every device beside what we count, by the public simulator: 3 GB (2 GB without
tensor degrees), and 8 more bytes for each value; told as a constant, of the whole model, so that what fits here fits there.
"""

NETWORK_BYTES = (2e6, 64e6)
"""Messages between nodes that matter here: boundaries of one to eight rows are 8 to 67 MB, steps of rings 1 to 60."""
BUCKET_BYTES = 5e8
"""Gradients are summed in buckets of that size."""
INSIDE_BYTES = (2e6, 34e6)
"""Steps of the rings of tensor groups: boundaries of one to eight rows, a half or a quarter of them."""


@dataclass(frozen=True)
class Curve:
    """Measured bandwidth by the message's size: a x² + b x + c GB/s with x = log2 of its megabytes."""

    coefficients: tuple[float, float, float]

    def seconds(self, message_bytes: float) -> float:
        x = math.log2(message_bytes / 1e6)
        a, b, c = self.coefficients
        return message_bytes / 1e9 / (a * x * x + b * x + c)

    def port(self, sizes: tuple[float, float]) -> Port:
        """α and β nearest to the curve between two sizes: least squares of the relative error, α at least 0."""
        grid = np.geomspace(*sizes, 50)
        seconds = np.array([self.seconds(float(size)) for size in grid])
        columns = np.stack([np.ones_like(grid), grid], axis=1) / seconds[:, None]
        (alpha, per_byte), *_ = np.linalg.lstsq(columns, np.ones_like(grid), rcond=None)
        if alpha < 0:
            alpha, per_byte = 0.0, float(np.sum(columns[:, 1]) / np.sum(columns[:, 1] ** 2))
        return Port(float(alpha), 1 / float(per_byte))


def ring_seconds(message_bytes: float, members: int, curve: Curve) -> float:
    """An all-reduce in buckets: for each 2 (n − 1) messages of its n-th part, one after the other."""
    if members < 2:
        return 0.0
    full, rest = divmod(message_bytes, BUCKET_BYTES)
    seconds = full * curve.seconds(BUCKET_BYTES / members) if full else 0.0
    if rest:
        seconds += curve.seconds(rest / members)
    return 2 * (members - 1) * seconds


@dataclass(frozen=True)
class Tables:
    """The files of the folder."""

    folder: Path

    @classmethod
    def of_environment(cls) -> Tables:
        """Of the folder that the environment names. Raises ValueError where there is none."""
        named = os.environ.get(VARIABLE)
        if not named or not (Path(named) / "layers.json").is_file():
            raise ValueError(
                f"the tables of OPT-350M are not here: set {VARIABLE} to the folder with layers.json, "
                "inter_node_bandwidths.json, intra_node_bandwidths.json and a profile.json for each accelerator"
            )
        return cls(Path(named))

    def _json(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text())

    @cached_property
    def layers(self) -> Mapping[str, Mapping[str, Mapping[str, int]]]:
        """By tensor degree, by layer: values of the weights, of the output and of what the forward keeps, of one row."""
        found: Mapping[str, Mapping[str, Mapping[str, int]]] = self._json("layers.json")
        return found

    @cached_property
    def seconds(self) -> Mapping[str, Mapping[int, Mapping[int, Sequence[Sequence[float]]]]]:
        """By accelerator, tensor degree, rows: forward, backward and update of every layer."""
        found: dict[str, dict[int, dict[int, Sequence[Sequence[float]]]]] = {}
        for name in MEMORY_BYTES:
            for rows, degrees in self._json(f"{name}/profile.json").items():
                for degree, layers in degrees.items():
                    by_rows = found.setdefault(name, {}).setdefault(int(degree), {})
                    by_rows[int(rows)] = [layers[str(index)] for index in range(len(layers))]
        return found

    @cached_property
    def _between(self) -> Any:
        return self._json("inter_node_bandwidths.json")

    @cached_property
    def _inside(self) -> Any:
        return self._json("intra_node_bandwidths.json")

    def between(self, sender: str, devices: int, receiver: str, others: int) -> Curve:
        """Between two nodes of these accelerators, of which so many devices take part."""
        a, b, c = self._between[sender][str(devices)][receiver][str(others)][0]
        return Curve((a, b, c))

    def inside(self, accelerator: str) -> Curve:
        """Between the devices of one node, all of them at once."""
        a, b, c = self._inside[accelerator][str(DEVICES_PER_NODE)][0]
        return Curve((a, b, c))

    def cluster(self, devices: Mapping[str, int]) -> Cluster:
        """So many devices of each accelerator, told by ports."""
        nodes = tuple(
            Node(
                f"{name.lower()}-{number}",
                name,
                DEVICES_PER_NODE,
                network=self.network(name),
                inside=self.inside(name).port(INSIDE_BYTES),
            )
            for name, count in devices.items()
            for number in range(count // DEVICES_PER_NODE)
        )
        return Cluster(tuple(Accelerator(name, MEMORY_BYTES[name]) for name in devices), nodes)

    def network(self, name: str) -> Port:
        """A card carries what four devices reach together; a single flow a third of that."""
        together = self.between(name, DEVICES_PER_NODE, name, DEVICES_PER_NODE).port(NETWORK_BYTES)
        alone = self.between(name, 1, name, 1).port(NETWORK_BYTES)
        return Port(alone.latency_seconds, together.bandwidth_bytes_per_second, alone.bandwidth_bytes_per_second)

    @cached_property
    def profiles(self) -> Profiles:
        """The layers' tables, imported as `trainwright profiles import --format sailor` does."""
        found = [
            FORMATS["sailor"](
                [self.folder / name / "profile.json"],
                model=MODEL,
                accelerator=name,
                options=ImportOptions(
                    inside=self.inside(name).port(INSIDE_BYTES), memory_table=self.folder / "layers.json"
                ),
            )
            for name in MEMORY_BYTES
        ]
        return Profiles(tuple(layer for profiles in found for layer in profiles.layers))

    def problem(self, devices: Mapping[str, int]) -> Problem:
        """Tensor groups stay inside a node, as they were measured; the runtime is Megatron's."""
        limits = Limits(max_tensor_degree=DEVICES_PER_NODE)
        runtime = Runtime(constant_bytes=RUNTIME_BYTES, splits_boundaries=True)
        return Problem(self.cluster(devices), MODEL, self.profiles, GLOBAL_BATCH_SIZE, limits, runtime=runtime)
