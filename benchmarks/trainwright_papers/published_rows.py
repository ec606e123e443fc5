"""Rows of a table of published throughputs, and the plan, cluster and model that each states.

A table is a CSV file whose header names the columns of `PublishedRow`; others are ignored.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

from pydantic import ValidationError

from trainwright.accelerators import cluster_of, data_sheet, machine
from trainwright.cluster import Cluster, Device
from trainwright.documents import adapter
from trainwright.families import Bert
from trainwright.families.blocks import HEAD
from trainwright.layer import Attention, Dtype
from trainwright.model import Model
from trainwright.plan import LayerRun, Pipeline, Plan, Stage, split_rows
from trainwright.strategy import Sharding, Strategy
from trainwright_papers.published_models import named_model

_GPU = re.compile(r"(?P<card>.+?)(?:_(?P<watts>\d+)W)?")
"""Name of a GPU, and its power limit if it is not the card's own: `h100_96gb_500W`."""
_MEMORY = re.compile(r"_(?P<gigabytes>\d+)gb")
MASKED_OF_512 = 80
"""Positions of 512 that BERT predicts at most (max_predictions_per_seq); 20 of 128."""

_OWN_DROPOUT = ("Megatron", "BERT")
"""Parts of the names of sources that train with dropout, as their papers do."""


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """One published throughput.

    Attributes:
        machine: whose network and number of devices are taken.
        micro_batch: rows of one replica.
        recompute: share of the layers that are recomputed.
        compiled: kernels between the products, in the source's words.
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
    sequence: int
    dtype: str
    recompute: float
    compiled: str
    measured_tokens_per_second_per_gpu: float
    note: str = ""

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

    def model_in(self, attention: Attention) -> Model:
        """Return the model with an implementation of attention."""
        drops = any(name in self.source for name in _OWN_DROPOUT)
        family = named_model(self.model).of_tokens(self.sequence, drops=drops)
        found = Model.of(family, self.number_format, attention)
        return _with_masked_head(found, family) if isinstance(family, Bert) else found

    def cluster(self) -> Cluster:
        """Return as many of the machines as the GPUs need, with the row's card."""
        sheet = machine(self.machine)
        found = cluster_of({sheet.name: -(-self.gpus // sheet.devices)})
        stated = _MEMORY.search(self.card)
        memory = int(data_sheet(self.gpu_name).memory_bytes.value)
        if stated is not None:
            # What the runtime reports of other sizes of the same card: the same share of what is installed.
            nominal = _MEMORY.search(_sheet_size(self.gpu_name))
            memory = (
                memory
                * int(stated["gigabytes"])
                // (int(nominal["gigabytes"]) if nominal else int(stated["gigabytes"]))
            )
        accelerator = replace(found.accelerators[0], name=self.gpu_name, memory_bytes=memory)
        devices = min(self.gpus, sheet.devices)
        nodes = (replace(node, accelerator=self.gpu_name, devices=devices) for node in found.nodes)
        return Cluster((accelerator,), tuple(nodes))

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


def _with_masked_head(model: Model, family: Bert) -> Model:
    """Return a BERT whose head computes the masked positions alone."""
    masked = replace(family, sequence_length=max(family.sequence_length * MASKED_OF_512 // 512, 1))
    head = Model.of(masked, model.dtype).kind(HEAD)
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


def read_rows(path: Path) -> Iterator[PublishedRow | str]:
    """Read a table: each row, or a sentence that says why it cannot be used.

    Raises ValueError for a file that cannot be read or lacks a column.
    """
    columns = [field.name for field in fields(PublishedRow)]
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    reader = csv.DictReader(text.splitlines())
    missing = [name for name in columns if name not in (reader.fieldnames or ()) and name != "note"]
    if missing:
        raise ValueError(f"{path}: the columns {', '.join(missing)} are missing; name them in the first line")
    for record in reader:
        values = {name: record[name] for name in columns if record.get(name) not in (None, "")}
        try:
            yield adapter(PublishedRow).validate_python(values, strict=False)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            yield f"line {reader.line_num}: {where}: {first['msg']}, got {first['input']!r}"
