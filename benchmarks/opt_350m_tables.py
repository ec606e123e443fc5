"""Public tables of OPT-350M on A100 and V100, and their conversion to the planner's documents.

They come from the repository eth-easl/sailor (MIT licence, Copyright (c) 2023-present ETH Zurich) and are not part of
this one: `OPT_350M_TABLES` names their folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from trainwright.cluster import Accelerator, Cluster, Node, Port
from trainwright.families import Gpt
from trainwright.model import Model
from trainwright.profile_imports import FORMATS, ImportOptions
from trainwright.profile_imports.bandwidth_curves import BandwidthCurve
from trainwright.profiles import Profiles
from trainwright.search import Limits, Problem
from trainwright_papers.amp_settings import TRAINER_OF_2022

VARIABLE = "OPT_350M_TABLES"
DEVICES_PER_NODE = 4
GLOBAL_BATCH_SIZE = 1024
MODEL = Model.of(Gpt(layers=24, hidden_size=1024, heads=16, sequence_length=2048, vocabulary_size=50304))
"""OPT-350M as measured: the embedding's 53,608,448 values show a padded vocabulary instead of 50,272."""
MEMORY_BYTES: Mapping[str, int] = {"A100-40": 40 * 2**30, "V100-16": 16 * 2**30}
RUNTIME_BYTES = 3 * 10**9
COPIED_BYTES_PER_PARAMETER = 8.0
"""Memory of Megatron and DeepSpeed on each device beyond our estimate, by the public simulator: 3 GB (2 GB without tensor
degrees), and a communication buffer and DeepSpeed's copy, each of 4 bytes for each parameter of a rank.
"""

NETWORK_BYTES = (2e6, 64e6)
"""Message sizes between nodes: boundaries of one to eight rows are 8 to 67 MB, ring steps 1 to 60 MB."""
BUCKET_BYTES = 5e8
"""Bucket size of gradient all-reduces."""
INSIDE_BYTES = (2e6, 34e6)
"""Ring steps of tensor groups: a half or a quarter of boundaries of one to eight rows."""


def ring_seconds(message_bytes: float, members: int, curve: BandwidthCurve) -> float:
    """Return seconds of a bucketed all-reduce: for each bucket, 2 (n − 1) sequential messages of its n-th part."""
    if members < 2:
        return 0.0
    full, rest = divmod(message_bytes, BUCKET_BYTES)
    seconds = full * curve.seconds(BUCKET_BYTES / members) if full else 0.0
    if rest:
        seconds += curve.seconds(rest / members)
    return 2 * (members - 1) * seconds


@dataclass(frozen=True)
class Tables:
    """Files of the tables' folder."""

    folder: Path

    @classmethod
    def of_environment(cls) -> Tables:
        """Read the folder named by the environment. Raises ValueError if there is none."""
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
        """Return `[tensor degree][layer]` element counts: weights, and per row the output and the saved activations."""
        found: Mapping[str, Mapping[str, Mapping[str, int]]] = self._json("layers.json")
        return found

    @cached_property
    def seconds(self) -> Mapping[str, Mapping[int, Mapping[int, Sequence[Sequence[float]]]]]:
        """Return `[accelerator][tensor degree][rows][layer]` seconds of forward, backward and update."""
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

    def between(self, sender: str, devices: int, receiver: str, others: int) -> BandwidthCurve:
        """Return the curve between two nodes of these accelerators with `devices` and `others` participating devices."""
        a, b, c = self._between[sender][str(devices)][receiver][str(others)][0]
        return BandwidthCurve((a, b, c))

    def inside(self, accelerator: str) -> BandwidthCurve:
        """Return the curve between all devices of one node at once."""
        a, b, c = self._inside[accelerator][str(DEVICES_PER_NODE)][0]
        return BandwidthCurve((a, b, c))

    def cluster(self, devices: Mapping[str, int]) -> Cluster:
        """Return the cluster with `devices[name]` devices of each accelerator, its network described by ports."""
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
        """Return the card's port: its bandwidth is that of four devices together; a single flow reaches a third."""
        together = self.between(name, DEVICES_PER_NODE, name, DEVICES_PER_NODE).port(NETWORK_BYTES)
        alone = self.between(name, 1, name, 1).port(NETWORK_BYTES)
        return Port(alone.latency_seconds, together.bandwidth_bytes_per_second, alone.bandwidth_bytes_per_second)

    @cached_property
    def profiles(self) -> Profiles:
        """Return the layer profiles, imported as by `trainwright profiles import --format sailor`."""
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
        """Return the problem with Megatron's runtime; tensor groups stay inside a node, as measured."""
        limits = Limits(max_tensor_degree=DEVICES_PER_NODE)
        runtime = replace(
            TRAINER_OF_2022,
            constant_bytes=RUNTIME_BYTES,
            copied_bytes_per_parameter=COPIED_BYTES_PER_PARAMETER,
            splits_boundaries=True,
        )
        return Problem(self.cluster(devices), MODEL, self.profiles, GLOBAL_BATCH_SIZE, limits, runtime=runtime)
