"""Training in one process, layer by layer on the whole batch: the reference for every plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from row_groups import normalise_in_groups
from torch import Tensor

from trainwright.model import Model
from trainwright.plan import Plan
from trainwright_worker.layers.layer import Layer
from trainwright_worker.layers.registry import make_family_layers
from trainwright_worker.layers.tensor_parallel import TensorShard


@dataclass
class OneProcess:
    """Unsharded model with torch's own optimizer."""

    model: Model
    seed: int
    layers: list[Layer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.family = make_family_layers(self.model)
        self.shared: dict = {}
        self.layers = [
            self.family.make(layer, seed=self.seed, shard=TensorShard(), shared=self.shared)
            for layer in range(len(self.model.layers))
        ]

    def named(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters that are trained by their names in the executor's flat parameters."""
        return {name: parameter for name, parameter in self._named() if parameter.requires_grad}

    def frozen(self) -> dict[str, Tensor]:
        """Return the parameters that are not, by their names."""
        return {name: parameter.detach() for name, parameter in self._named() if not parameter.requires_grad}

    def _named(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for number, layer in enumerate(self.layers):
            for name, parameter in layer.named_parameters():
                yield layer.shared_weights.get(name) or layer.checkpoint_name(number, name), parameter

    def named_buffers(self) -> dict[str, Tensor]:
        """Return the persistent buffers by their names in checkpoints."""
        return {
            layer.checkpoint_name(number, name): buffer.detach()
            for number, layer in enumerate(self.layers)
            for name, buffer in layer.persistent_buffers()
        }

    def loss(self, iteration: int, rows: int, plan: Plan | None = None, *, seed: int | None = None) -> Tensor:
        """Return the mean loss over the batch, by weight where rows have some.

        With a plan, every layer computes each replica's rows separately; where operators are sharded, each batch
        normalisation does.
        `seed`: of the rows, where it is another than the model's.
        """
        fields = tuple(dict.fromkeys(name for layer in self.layers for name in layer.reads))
        seed = self.seed if seed is None else seed
        data = self.family.rows(fields, seed=seed, iteration=iteration, first=0, count=rows)
        if plan is not None:
            self._normalise_in_groups(plan)
        total, weights = torch.zeros(()), list[Tensor]()
        boundary: tuple[Tensor, ...] = ()
        for number, layer in enumerate(self.layers):
            outputs = []
            for start, stop in pieces(plan, number) if plan else ((0, rows),):
                part = tuple(tensor[start:stop] for tensor in boundary)
                outputs.append(layer(part, {name: data[name][start:stop].clone() for name in layer.reads}))
            total = total + sum(output.loss for output in outputs if output.loss is not None)
            weights += [output.weight for output in outputs if output.weight is not None]
            boundary = tuple(torch.cat(tensors) for tensors in zip(*(one.boundary for one in outputs), strict=True))
        return total / (torch.stack(weights).sum().float() if weights else rows)

    def _normalise_in_groups(self, plan: Plan) -> None:
        sharded = [stage.operators for stage in plan.pipelines[0].stages if stage.operators is not None]
        for specs in sharded:
            for layer, layer_specs in specs.each_layer():
                normalise_in_groups(self.layers[layer], layer_specs, specs.mesh_shape)


def pieces(plan: Plan, layer: int) -> list[tuple[int, int]]:
    """Return the row intervals that are computed separately at a layer, in order: each replica's of each micro-batch."""
    found, first = [], 0
    for pipeline in plan.pipelines:
        stage = next(stage for stage in pipeline.stages if stage.first <= layer < stage.end)
        run = next(run for run in stage.layers if run.first <= layer < run.end)
        for _ in range(pipeline.micro_batches):
            for rows in run.rows if stage.operators is None else (sum(run.rows),):
                found.append((first, first + rows))
                first += rows
    return found
