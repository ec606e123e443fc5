"""Uniform plans and models of the comparison."""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.cluster import Device
from trainwright.families import Gpt, Llama
from trainwright.model import Model
from trainwright.plan import LayerRun, Pipeline, Plan, Stage, split_rows
from trainwright.strategy import Sharding, Strategy

MODELS = {
    "GPT": Model.of(Gpt(layers=4, hidden_size=256, heads=8, sequence_length=128, vocabulary_size=512)),
    "Llama": Model.of(
        Llama(
            layers=4, hidden_size=256, heads=8, sequence_length=128, vocabulary_size=512, intermediate_size=688,
            key_value_heads=4,
        )
    ),
}  # fmt: skip
ROWS = 16
"""Rows of the whole batch, the same under every plan."""
MICRO_BATCHES = 4
"""Micro-batches of a plan with several stages; a plan with one stage has one micro-batch."""


@dataclass(frozen=True)
class UniformPlan:
    """Plan whose stages are equal: `stages` × `data` × `tensor` processes, each with one device of one node.

    Attributes:
        along_sequence: whether tensor groups divide activations along the sequence (sequence parallelism).
    """

    stages: int
    data: int
    sharding: Sharding = Sharding.NONE
    tensor: int = 1
    along_sequence: bool = False

    def __str__(self) -> str:
        parts = [f"{self.stages} stages"] if self.stages > 1 else []
        if self.data > 1:
            parts.append(f"{self.data} replicas")
        if self.sharding is not Sharding.NONE:
            parts.append(f"ZeRO-{self.sharding[-1]}")
        if self.tensor > 1:
            parts.append(f"tensor {self.tensor}")
        if self.along_sequence:
            parts.append("sequence parallel")
        return ", ".join(parts) or "1 process"

    @property
    def processes(self) -> int:
        return self.stages * self.data * self.tensor

    @property
    def micro_batches(self) -> int:
        return MICRO_BATCHES if self.stages > 1 else 1

    @property
    def replica_rows(self) -> int:
        """Return the rows of a replica's micro-batch."""
        return ROWS // self.micro_batches // self.data

    def layers_of(self, stage: int, model: Model) -> range:
        """Return the layers of a stage; each stage has as many blocks as every other one."""
        counts = split_rows(len(model.layers) - 2, self.stages)
        first = sum(counts[:stage]) + (1 if stage else 0)
        extra = (stage == 0) + (stage == self.stages - 1)
        return range(first, first + counts[stage] + extra)

    def plan(self, model: Model) -> Plan:
        """Return the executor's plan; its ranks run over the tensor group first, then the replicas, then the stages."""
        devices, size = tuple(Device("node", slot) for slot in range(self.processes)), self.data * self.tensor
        stages = []
        for number in range(self.stages):
            layers = self.layers_of(number, model)
            rows = (self.replica_rows,) * self.data
            run = LayerRun(layers.start, len(layers), Strategy(self.tensor, self.data, sharding=self.sharding, sequence_parallel=self.along_sequence), rows)  # fmt: skip
            stages.append(Stage(devices[number * size : (number + 1) * size], (run,)))
        pipeline = Pipeline(self.micro_batches, self.replica_rows * self.data, tuple(stages))
        return Plan(len(model.layers), ROWS, (pipeline,))


DATA_PARALLEL = (Sharding.NONE, Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3)
FULLY_SHARDED = (Sharding.ZERO2, Sharding.ZERO3)
PLANS = {
    1: (UniformPlan(1, 1),),
    2: (
        *(UniformPlan(1, 2, sharding) for sharding in DATA_PARALLEL),
        UniformPlan(2, 1),
        UniformPlan(1, 1, tensor=2),
        UniformPlan(1, 1, tensor=2, along_sequence=True),
    ),
    4: (
        *(UniformPlan(1, 4, sharding) for sharding in DATA_PARALLEL),
        *(UniformPlan(2, 2, sharding) for sharding in DATA_PARALLEL),
        UniformPlan(4, 1),
        UniformPlan(1, 1, tensor=4, along_sequence=True),
        UniformPlan(1, 2, tensor=2, along_sequence=True),
        *(UniformPlan(1, 2, sharding, tensor=2, along_sequence=True) for sharding in FULLY_SHARDED),
        UniformPlan(2, 1, tensor=2),
        UniformPlan(2, 1, tensor=2, along_sequence=True),
    ),
    8: tuple(
        UniformPlan(2, 2, sharding, tensor=2, along_sequence=True) for sharding in (Sharding.NONE, *FULLY_SHARDED)
    ),
}
"""Plans by number of processes; that of one process shows how much the layers differ."""
