"""Keys of kept measurements: what they depend on besides the worker's image, the layers and the nodes.

An image is known by its digest only once a pod ran, a report holds several layers, and links between some nodes hold for
fewer of them: these are compared one by one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal

from trainwright import documents
from trainwright.bounds import OMITTED_DEFAULT
from trainwright.cluster import Accelerator
from trainwright.document_kind import document
from trainwright.layer import Dtype, LayerKind
from trainwright.measurement.link_kinds import Pair
from trainwright.model import Model
from trainwright.profiles import LayerProfile, LayerTooLarge
from trainwright.worker_api import LinkTask, ProfilingReport, ProfilingTask

_DIGEST_LENGTH: Final = 12
_WITHOUT_EFFECT: Final = frozenset(
    {
        *("layers", "decoder_layers", "depth", "expert_every", "kinds", "vocabulary_size", "classes"),
        *("checks", "min_rows", "whole_batch"),
        *("rotary_base", "rotary_scaling", "norm_epsilon", "balance_loss_weight"),
    }
)
"""Fields of families that say how many layers of which kinds there are, or that show in the weights of a kind; those of
a user's model that change no layer; and those that change values alone, neither time nor memory.
"""


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """Key of profiles: all that the figures of a layer depend on besides the layer and the image.

    Attributes:
        accelerator: without its price.
        pods: digest of what `worker.podTemplate` gives the pods.
    """

    accelerator: Accelerator
    driver: str
    dtype: Dtype
    tensor_degree: int
    optimizer: str
    warmup_iterations: int
    iterations: int
    pods: str

    @classmethod
    def of(cls, task: ProfilingTask, accelerator: Accelerator, driver: str, pods: str) -> ProfileKey:
        return cls(
            replace(accelerator, price_per_hour=None),
            driver,
            task.model.dtype,
            task.tensor_degree,
            task.optimizer,
            task.warmup_iterations,
            task.iterations,
            pods,
        )


@dataclass(frozen=True, slots=True)
class LinkKey:
    """Key of links: all that they depend on besides their nodes and the image.

    Attributes:
        pairs: empty where all pairs were measured.
        overlap_dtype: None where overlap was not measured.
        backend: of torch.distributed.
        pods: digest of what `worker.podTemplate` gives the pods.
    """

    backend: Literal["gloo", "nccl"]
    message_bytes: tuple[int, ...]
    repeats: int
    collective_bytes: tuple[int, ...]
    overlap_dtype: Dtype | None
    pairs: tuple[Pair, ...]
    pods: str
    all_to_all: Annotated[bool, OMITTED_DEFAULT] = False

    @classmethod
    def of(cls, task: LinkTask, pods: str) -> LinkKey:
        dtype = task.overlap_dtype if task.overlap else None
        return cls(
            task.gang.backend,
            task.message_bytes,
            task.repeats,
            task.collective_bytes,
            dtype,
            task.pairs or (),
            pods,
            task.all_to_all,
        )


@dataclass(frozen=True, slots=True)
class MeasuredNode:
    """Node of measured links.

    Attributes:
        uid: of its object: a machine that took over the name of another is a new one.
        slots: of its measured devices.
        location: its machine and its place in the topology.
        network: network devices of its pod, by resource.
    """

    name: str
    uid: str
    slots: tuple[int, ...]
    driver: str
    location: str
    network: Annotated[tuple[tuple[str, int], ...], OMITTED_DEFAULT] = ()


@document("KeptProfile")
@dataclass(frozen=True, slots=True)
class KeptProfile:
    """Key of a kept `ProfilingReport`.

    Attributes:
        layers: kinds by name, each with its digest.
        node: name of the node that was measured, and uid of its object.
    """

    key: ProfileKey
    layers: tuple[tuple[str, str], ...]
    node: tuple[str, str]


@document("KeptLinks")
@dataclass(frozen=True, slots=True)
class KeptLinks:
    """Key of a kept `LinkReport`, and the nodes that it is about."""

    key: LinkKey
    nodes: tuple[MeasuredNode, ...]

    def covers(self, nodes: Iterable[MeasuredNode]) -> bool:
        """Return whether the report holds for these nodes; samples stand for the links of exactly their own."""
        node_names, measured = set(nodes), set(self.nodes)
        return node_names == measured if self.key.pairs else node_names <= measured


def digest(*parts: Any) -> str:
    """Return a digest of plain data, dataclasses and texts, fit for the name of an object."""
    text = json.dumps([_plain(part) for part in parts], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_LENGTH]


def _plain(part: Any) -> Any:
    return (
        documents.adapter(type(part)).dump_python(part, mode="json") if hasattr(part, "__dataclass_fields__") else part
    )


def layer_digest(model: Model, kind: LayerKind) -> str:
    """Return a digest of a layer kind: of its operators, and of its family's fields, of which operators may not tell."""
    fields = _plain(model.family)
    return digest({name: value for name, value in fields.items() if name not in _WITHOUT_EFFECT}, kind)


def known_layers(
    report: ProfilingReport, kind: str, rows: Iterable[int]
) -> tuple[tuple[LayerProfile, ...], tuple[LayerTooLarge, ...]] | None:
    """Return a kind's profiles at these rows, and from which rows it did not fit; None where one of them is unknown."""
    row_set = set(rows)
    too_large = tuple(entry for entry in report.out_of_memory if entry.kind == kind)
    most = min((entry.rows for entry in too_large), default=max(row_set) + 1)
    profiles = tuple(layer for layer in report.layers if layer.kind == kind and layer.rows in row_set)
    is_complete = {profile.rows for profile in profiles} >= {row for row in row_set if row < most}
    return (profiles, too_large) if is_complete else None
