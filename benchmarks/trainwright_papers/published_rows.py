"""Rows of a table of published throughputs, and the plan, cluster and model that each states.

A table is a CSV file whose header names columns: fields of `PublishedRow`, and fields of Runtime that are one value.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from types import NoneType
from typing import Any, Final, Literal, get_args, get_type_hints

from pydantic import ValidationError

from trainwright.accelerators import cluster_of, data_sheet, machine
from trainwright.cluster import Cluster, Device, Port
from trainwright.documents import adapter
from trainwright.families import Bert
from trainwright.families.blocks import HEAD
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.plan import LayerRun, Pipeline, Plan, Stage, split_rows
from trainwright.runtime import Runtime
from trainwright.strategy import Sharding, Strategy
from trainwright_papers.published_models import NamedModel, first_refusal
from trainwright_papers.published_sources import row_sources

_GPU = re.compile(r"(?P<card>.+?)(?:_(?P<watts>\d+)W)?")
"""Name of a GPU, and its power limit if it is not the card's own: `h100_96gb_500W`."""
_MEMORY = re.compile(r"_(?P<gigabytes>\d+)gb")
MASKED_OF_512 = 80
"""Positions of 512 that BERT predicts at most (max_predictions_per_seq); 20 of 128."""
_BYTES_PER_GBIT = 1e9 / 8

RUNTIME_COLUMNS: Final = frozenset(
    each.name
    for each in fields(Runtime)
    if each.name != "trainer" and (each.default is None or isinstance(each.default, bool | int | float | str))
)
"""Fields of Runtime that a column may have the name of: those of one value."""
_OPTIONAL: Final = frozenset(name for name, hint in get_type_hints(Runtime).items() if NoneType in get_args(hint))
"""Fields of Runtime for which `none` in a cell is None."""


class Head(StrEnum):
    """Positions for which a BERT computes logits: all, the masked ones, or none (fine-tuning without them)."""

    ALL = "all"
    MASKED = "masked"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """One published throughput.

    Attributes:
        machine: whose network and number of devices are taken.
        micro_batch: rows of one replica.
        recompute: share of the layers that are recomputed.
        sequence: tokens of a row; 1 where throughput counts images.
        compiled: kernels between the products, in the source's words.
        measured_memory_gib: on the fullest device.
        preset: of the runtime; None: by the plan.
        attention: whether scores are kept from memory or stored; None: as the preset has it.
        dropout: None: as the model's paper trains it.
        network_gbit_per_second: of each node's cards together, in one direction, in place of the machine's.
        runtime: fields of Runtime that differ from the preset.
    """

    source: str
    model: str
    gpu: str
    gpus: int
    machine: str
    tp: int
    pp: int
    dp: int
    sharding: Sharding
    micro_batch: int
    global_batch: int
    dtype: str
    recompute: float
    sequence: int = 1
    compiled: str = ""
    measured_tokens_per_second_per_gpu: float | None = None
    measured_images_per_second_per_gpu: float | None = None
    measured_memory_gib: float | None = None
    preset: str | None = None
    attention: Literal["fused", "stored"] | None = None
    dropout: bool | None = None
    head: Head = Head.ALL
    gpus_per_node: int | None = None
    network_gbit_per_second: float | None = None
    note: str = ""
    runtime: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rates = (self.measured_tokens_per_second_per_gpu, self.measured_images_per_second_per_gpu)
        if sum(rate is not None for rate in rates) != 1:
            raise ValueError(
                "give one of measured_tokens_per_second_per_gpu and measured_images_per_second_per_gpu, the other stays empty"
            )

    @property
    def measured(self) -> float:
        """Measured tokens, or images, per second and GPU."""
        return self.measured_tokens_per_second_per_gpu or self.measured_images_per_second_per_gpu or 0.0

    @property
    def gpu_name(self) -> str:
        """Name of the card's data sheet."""
        return _sheet_name(self.card)

    @property
    def card(self) -> str:
        found = _GPU.fullmatch(self.gpu)
        return found["card"] if found else self.gpu

    @property
    def power_watts(self) -> int | None:
        """Power limit if the row states one."""
        found = _GPU.fullmatch(self.gpu)
        return int(found["watts"]) if found and found["watts"] else None

    @property
    def number_format(self) -> Dtype:
        if self.dtype == "tf32":
            return Dtype.FLOAT32
        if self.dtype not in set(Dtype):
            raise ValueError(f"dtype: {self.dtype!r} cannot be planned; the formats are tf32, {', '.join(Dtype)}")
        return Dtype(self.dtype)

    def model_of(self, named: NamedModel, *, drops: bool) -> Model:
        """Return the model with the row's sequence, format and head."""
        family = named.of_tokens(self.sequence, drops=drops)
        made = Model.of(family, self.number_format)
        if isinstance(family, Bert) and self.head is not Head.ALL:
            return _with_shorter_head(made, family, MASKED_OF_512 if self.head is Head.MASKED else 0)
        return made

    def cluster(self) -> Cluster:
        """Return as many of the machines as the GPUs need, with the row's card, GPUs and network."""
        sheet = machine(self.machine)
        devices = min(self.gpus, self.gpus_per_node or sheet.devices)
        machines = cluster_of({sheet.name: -(-self.gpus // devices)})
        memory = int(data_sheet(self.gpu_name).memory_bytes.value)
        stated = _MEMORY.search(self.card)
        if stated is not None:
            # What the runtime reports of other sizes of the same card: the same share of what is installed.
            nominal = _MEMORY.search(_sheet_size(self.gpu_name))
            memory = (
                memory
                * int(stated["gigabytes"])
                // (int(nominal["gigabytes"]) if nominal else int(stated["gigabytes"]))
            )
        accelerator = replace(machines.accelerators[0], name=self.gpu_name, memory_bytes=memory)
        nodes = (
            replace(node, accelerator=self.gpu_name, devices=devices, network=self._network(node.network))
            for node in machines.nodes
        )
        return Cluster((accelerator,), tuple(nodes))

    def _network(self, nominal: Port | None) -> Port | None:
        """Return the port to other nodes; the row's network is what is reached, of which a stream takes the machine's share."""
        if self.network_gbit_per_second is None or nominal is None:
            return nominal
        reached = self.network_gbit_per_second * _BYTES_PER_GBIT
        flow = nominal.flow_bytes_per_second
        share = None if flow is None else reached * flow / nominal.bandwidth_bytes_per_second
        return Port(nominal.latency_seconds, reached, share)

    def plan(self, layers: int, cluster: Cluster, *, sequence_parallel: bool = False) -> Plan:
        """Return the plan: neighbouring GPUs share a layer, then come replicas, then stages of equally many blocks."""
        devices = tuple(Device(node.name, slot) for node in cluster.nodes for slot in range(node.devices))[: self.gpus]
        if self.tp * self.pp * self.dp != self.gpus:
            raise ValueError(f"tp × pp × dp must be gpus, got {self.tp} × {self.pp} × {self.dp} for {self.gpus}")
        micro_batches = max(round(self.global_batch / (self.micro_batch * self.dp)), 1)
        rows = self.micro_batch * self.dp
        width, first, stages = self.tp * self.dp, 0, []
        for number, blocks in enumerate(split_rows(layers - 2, self.pp)):
            count = blocks + (number == 0) + (number == self.pp - 1)
            stages.append(
                Stage(devices[number * width : (number + 1) * width], self._runs(first, count, sequence_parallel))
            )
            first += count
        return Plan(layers, micro_batches * rows, (Pipeline(micro_batches, rows, tuple(stages)),))

    def _runs(self, first: int, count: int, sequence_parallel: bool) -> tuple[LayerRun, ...]:
        """Return the layer runs of a stage: the recomputed layers, then the others."""
        recomputed = round(self.recompute * count)
        parts = ((first, recomputed, True), (first + recomputed, count - recomputed, False))
        rows = (self.micro_batch,) * self.dp
        return tuple(
            LayerRun(
                start,
                number,
                Strategy(
                    self.tp,
                    self.dp,
                    sharding=self.sharding,
                    recompute=again,
                    sequence_parallel=sequence_parallel and self.tp > 1,
                ),
                rows,
            )
            for start, number, again in parts
            if number
        )


def _with_shorter_head(model: Model, family: Bert, positions_of_512: int) -> Model:
    """Return a BERT whose head computes logits of some positions alone, at least of one."""
    positions = max(family.sequence_length * positions_of_512 // 512, 1)
    head = Model.of(replace(family, sequence_length=positions), model.dtype).kind(HEAD)
    return replace(model, kinds=tuple(head if kind.name == HEAD else kind for kind in model.kinds))


def _sheet_name(card: str) -> str:
    """Return the name of a card's data sheet; a size of memory that no sheet has leads to the card's other sheet."""
    try:
        return data_sheet(card).name
    except ValueError:
        if not _MEMORY.search(card):
            raise
        return data_sheet(_MEMORY.sub("", card)).name


def _sheet_size(name: str) -> str:
    """Return the nominal memory in a data sheet's name in the form `_80gb`; empty if it states none."""
    found = re.search(r"(\d+)GB", name)
    return f"_{found[1]}gb" if found else ""


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """Rows of a table, or sentences that say why they cannot be used, and the names of columns that nothing reads."""

    rows: tuple[PublishedRow | str, ...]
    unread_columns: tuple[str, ...] = ()


def read_table(path: Path) -> PublishedTable:
    """Read a table. Columns go before the facts of a row's source. Raises ValueError for a file that cannot be read or lacks a column."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    reader = csv.DictReader(text.splitlines())
    columns = tuple(name for name in reader.fieldnames or () if name)
    missing = [name for name in _REQUIRED if name not in columns]
    if missing:
        raise ValueError(f"{path}: the columns {', '.join(missing)} are missing; name them in the first line")
    unread = tuple(name for name in columns if name not in _COLUMNS and name not in RUNTIME_COLUMNS)
    return PublishedTable(tuple(_rows(reader)), unread)


_COLUMNS: Final = tuple(each.name for each in fields(PublishedRow) if each.name != "runtime")
_REQUIRED: Final = tuple(each.name for each in fields(PublishedRow) if each.default is each.default_factory is MISSING)


def _rows(reader: csv.DictReader[str]) -> Iterator[PublishedRow | str]:
    for record in reader:
        cells = {name: cell for name, cell in record.items() if name and cell}
        source = row_sources().get(cells.get("source", ""))
        values = {**(source.values(cells) if source else {}), **cells}
        stated = {name: _value(name, value) for name, value in values.items() if name in RUNTIME_COLUMNS}
        try:
            checked = adapter(Runtime).validate_python(stated, strict=False)
            given = {name: values[name] for name in _COLUMNS if name in values}
            row: PublishedRow = adapter(PublishedRow).validate_python(given, strict=False)
        except ValidationError as error:
            yield f"line {reader.line_num}: {first_refusal(error)}"
            continue
        yield replace(row, runtime={name: getattr(checked, name) for name in stated})


def _value(name: str, value: Any) -> Any:
    return None if value == "none" and name in _OPTIONAL else value
