"""User model as layers: plain torch modules in sequence, each replicated over its tensor group.

An entry point is a function without arguments, written `package.module:function`, that returns a `CustomModel`:

    def resnet() -> CustomModel:
        blocks = [partial(BasicBlock, 64, 64) for _ in range(4)]
        return CustomModel(layers=[Stem, *blocks, Head], rows=rows)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from trainwright.quantity import format_bytes
from trainwright_worker.layers.custom_boundaries import Float32Outputs, HandedOn
from trainwright_worker.layers.custom_checks import (
    check_boundary,
    check_buffers,
    check_float32_fields,
    check_least_rows,
    check_losses,
    check_makers,
    check_parameters,
    check_rows,
    check_weights_are_new,
)
from trainwright_worker.layers.custom_errors import describe_error, format_value, model_error
from trainwright_worker.layers.custom_layer import CustomLayer
from trainwright_worker.layers.custom_makers import LayerMakers, host_bytes, processes_of_host
from trainwright_worker.layers.custom_names import WholeNames
from trainwright_worker.layers.custom_sharing import replace_weight, shared_weights_of
from trainwright_worker.layers.layer import Boundary, Layer, SharedWeights
from trainwright_worker.layers.tensor_parallel import TensorShard
from trainwright_worker.synthetic_data import weight_generator

TARGETS = "targets"

_MIN_PROBED_ROWS = 2
"""Rows of a probe: with 1 a dimension of size 1 could pass for the rows, and batch normalisation needs more than one."""


class Rows(Protocol):
    """Training data of a user model."""

    def __call__(self, *, seed: int, iteration: int, first: int, count: int) -> Mapping[str, Tensor]:
        """Return rows `first … first + count - 1` of an iteration's batch, by field; first dimension `count`.

        They must depend only on seed, iteration and row, so that every plan trains on the same rows.
        """


@dataclass(frozen=True, slots=True)
class CustomModel:
    """Model that an entry point returns.

    Attributes:
        layers: functions without arguments (classes, partials, lambdas), each of which builds one layer, a separate torch
            module. A layer takes the tensor or dict of tensors, or those of the tuple, that the previous layer returned. The first layer
            takes all fields of the rows except `targets`, in their order; the last takes `targets` as an additional last
            argument and returns each row's mean loss, shape (rows,); or a tuple of each row's sum of losses and its weight,
            without a gradient, such as the number of its tokens that count: the training's loss is the sum over the batch of
            the one divided by that of the other. Only tensors of floats, bool, int32 and int64 whose first dimension counts
            the rows can pass between layers. Before a layer is built, torch's CPU random numbers are
            seeded from the seed and the layer's index: weights drawn from them are the same under every plan, and each rank
            builds only its layers.
            Before each forward torch's CPU and GPU random numbers are seeded from the seed, the iteration, the first row
            and the layer's index: dropout differs between rows and replicas, and a recomputed forward repeats it.
        rows: training data; `targets` is one of its fields.
        min_rows: rows that one replica computes at once at least, such as those that batch normalisation needs.
        whole_batch: a batch is computed by one replica at once, as a loss over all of its rows needs.
        keep_float32: fields of the rows that stay float32 in half formats; buffers stay as the layers make them anyway.
        build: makes the whole model if the layers are parts of it: it is called once in a process, on the CPU, after one
            seed, and each function of `layers` takes what it returned, so that weights are those of the whole model.
        shared_weights: weights that are another layer's, `{"13.head.weight": "0.embedding.weight"}`, by layer and name in its
            state_dict; the second one's first values count. Any number of layers can share a weight, but a layer only one.
            Parts of the whole model that share one there need none of this.
    """

    layers: Sequence[Callable[..., nn.Module]]
    rows: Rows
    min_rows: int = 1
    whole_batch: bool = False
    keep_float32: Sequence[str] = ()
    build: Callable[[], nn.Module] | None = None
    shared_weights: Mapping[str, str] | None = None

    @property
    def mixes_rows(self) -> bool:
        """True if a row's result may depend on the rows that are computed with it."""
        return self.whole_batch or self.min_rows > 1


class _ProbedBoundary(NamedTuple):
    """Tensors after a layer.

    Attributes:
        shapes: for one row.
        integers: those of the probed rows, without values if they were probed on the meta device; None for floats.
    """

    shapes: tuple[tuple[int, ...], ...]
    integers: tuple[Tensor | None, ...]


class CustomLayers:
    """Layers of a user model.

    Attributes:
        parameters: number of parameter values, by layer.
        frozen: number of those that are not trained, by layer.
        shared_weights: the weight that a layer shares with others, by layer.
        copied_weights: likewise those that are not trained: each of their layers has a copy, which stays equal.
        weight_shapes, frozen_names: by layer and the user's name.
        whole_names: what the layers have of the whole model.
        handed_on: arguments that each layer hands on.
        weighs_rows: whether the last layer returns weights beside its losses.
    """

    def __init__(self, name: str, model: CustomModel) -> None:
        self.name = name
        self.model = model
        self.makers = LayerMakers(model)
        self._float32_outputs = Float32Outputs(self)
        check_makers(self)
        check_least_rows(self)
        probed = self._rows(seed=0, iteration=0, first=0, count=self.probed_rows)
        if TARGETS not in probed:
            raise self.error(f"rows() has no field {TARGETS!r} (it has {', '.join(probed)}); add one")
        check_rows(self, probed, [1])
        check_float32_fields(self, probed)
        self._inputs = tuple(field for field in probed if field != TARGETS)
        self.parameters: tuple[int, ...] = ()
        self.frozen: tuple[int, ...] = ()
        self.weighs_rows = False
        self.weight_shapes: list[dict[str, tuple[int, ...]]] = []
        self.frozen_names: list[set[str]] = []
        self.whole_names = WholeNames()
        self.handed_on: list[HandedOn] = []
        try:
            self._boundaries = self._probe(probed, torch.device("meta"))
        except ValueError:  # deliberate: what the meta device lacks runs on the CPU; a user's error fails there, too
            self._boundaries = self._probe(probed, torch.device("cpu"))
        self.whole_names = self.makers.whole_names()
        self.shared_weights, self.copied_weights = shared_weights_of(self)

    def __len__(self) -> int:
        return len(self.model.layers)

    @property
    def probed_rows(self) -> int:
        """Rows that are computed together to see what the layers do."""
        return max(self.model.min_rows, _MIN_PROBED_ROWS)

    def make(self, layer: int, *, seed: int, shard: TensorShard, shared: SharedWeights) -> Layer:
        """Build the layer on the CPU, where a user's module draws its weights; only its buffers move to the current device."""
        del shard
        device = torch.get_default_device()
        made = _drawn(self, layer, seed)
        if (sharing := self.shared_weights.get(layer)) is not None:
            if sharing.name not in shared:
                owner = made if sharing.owner == layer else _drawn(self, sharing.owner, seed)
                shared[sharing.name] = owner.weights()[sharing.name_in_owner]
            made.share(sharing.own_name, sharing.name, shared[sharing.name])
        elif (copied := self.copied_weights.get(layer)) is not None and copied.owner != layer:
            values = _drawn(self, copied.owner, seed).weights()[copied.name_in_owner]
            replace_weight(made.module, made.weights()[copied.own_name], values)
        for module in made.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))
        return made

    def boundary(self, layer: int) -> tuple[tuple[int, ...], ...]:
        return self._boundaries[layer].shapes

    def formats(self, layer: int, dtype: torch.dtype = torch.float32) -> tuple[torch.dtype, ...]:
        """Return the format of each tensor after a layer where a plan computes in `dtype`."""
        if layer < 0:
            return ()
        integers = self._boundaries[layer].integers
        stays = (False,) * len(integers) if dtype is torch.float32 else self._float32_outputs.of(layer)
        floats = [torch.float32 if is_kept else dtype for is_kept in stays]
        return tuple(own if value is None else value.dtype for own, value in zip(floats, integers, strict=True))

    def integers(self, layer: int, rows: int, device: torch.device) -> tuple[Tensor | None, ...]:
        """Return what a layer hands on for the first rows, over and over; None for floats.

        Only these are sure to be valid, such as indices. They have no values on the meta device.
        """
        if device.type != "meta" and any(
            value is not None and value.is_meta for value in self._boundaries[layer].integers
        ):
            self._boundaries = self._probe(self.fields(0, self.probed_rows), device)
        chosen = torch.arange(rows, device=device) % self.probed_rows
        return tuple(value if value is None else value.to(device)[chosen] for value in self._boundaries[layer].integers)

    def example(self, layer: int, rows: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
        """Return a boundary on torch's current device: random floats, which have gradients, and a layer's own integers."""
        if layer < 0:
            return ()
        integers = self.integers(layer, rows, torch.get_default_device())
        return tuple(
            torch.randn(rows, *shape, dtype=own, requires_grad=True) if value is None else value
            for shape, own, value in zip(self.boundary(layer), self.formats(layer, dtype), integers, strict=True)
        )

    def rows(self, fields: tuple[str, ...], *, seed: int, iteration: int, first: int, count: int) -> dict[str, Tensor]:
        """Return these fields of the user's rows, which are not asked for where there are none.

        Layers are made by then, and their whole model is freed.
        """
        self.makers.forget()
        if not fields:
            return {}
        tensors = self._rows(seed=seed, iteration=iteration, first=first, count=count)
        return {field: tensors[field] for field in fields}

    def fields(self, first: int, count: int) -> dict[str, Tensor]:
        """Return all fields of some rows of the first batch, on the CPU."""
        return dict(self._rows(seed=0, iteration=0, first=first, count=count))

    def error(self, what: str) -> ValueError:
        """Return the error that states what to change in the model."""
        return model_error(self.name, what)

    def _rows(self, *, seed: int, iteration: int, first: int, count: int) -> Mapping[str, Tensor]:
        return read_user_rows(self.name, self.model.rows, seed=seed, iteration=iteration, first=first, count=count)

    def make_module(self, layer: int) -> CustomLayer:
        """Build the layer on torch's current device, with weights of its current random generator."""
        try:
            module = self.makers.make(layer)
        except Exception as error:
            raise self.error(f"layer {layer} cannot be made: {describe_error(error)}") from error
        if not isinstance(module, nn.Module):
            raise self.error(f"layer {layer} must be made as a torch module, got {type(module).__name__}")
        check_parameters(self, layer, module)
        is_last = layer == len(self) - 1
        reads = (self._inputs if layer == 0 else ()) + ((TARGETS,) if is_last else ())
        return CustomLayer(
            layer,
            module,
            reads,
            self.whole_names,
            takes=self.handed_on[layer - 1] if layer else HandedOn(),
            hands_on=self.handed_on[layer] if layer < len(self.handed_on) else None,
            is_last=is_last,
        )

    def _probe(self, rows: Mapping[str, Tensor], device: torch.device) -> list[_ProbedBoundary]:
        """Return the boundary after every layer, by running the layers in sequence; each is then freed."""
        data = {field: value.to(device) for field, value in rows.items()}
        boundary: Boundary = ()
        self.handed_on = []
        boundaries, parameters, frozen, shapes, frozen_names = [], [], [], [], []
        with torch.random.fork_rng(devices=[]), device, torch.no_grad():
            for layer in range(len(self)):
                layer_module = self.make_module(layer)
                check_weights_are_new(self, layer_module)
                arguments = (*boundary, *(data[field] for field in layer_module.reads))
                buffers = dict(layer_module.module.named_buffers())
                try:
                    result = layer_module.call(arguments)
                except Exception as error:
                    raise self.failure(layer_module, arguments, error) from error
                check_buffers(self, layer_module, buffers)
                if layer_module.is_last:
                    check_losses(self, result)
                    self.weighs_rows = isinstance(result, tuple)
                    boundary = ()
                else:
                    boundary = check_boundary(self, layer, result)
                self.handed_on.append(HandedOn() if layer_module.is_last else HandedOn.of(result))
                boundaries.append(
                    _ProbedBoundary(
                        tuple(tuple(value.shape[1:]) for value in boundary),
                        tuple(None if value.is_floating_point() else value for value in boundary),
                    )
                )
                weights = layer_module.weights()
                parameters.append(sum(parameter.numel() for parameter in layer_module.parameters()))
                frozen.append(sum(weight.numel() for weight in layer_module.parameters() if not weight.requires_grad))
                shapes.append({name: tuple(weight.shape) for name, weight in weights.items()})
                frozen_names.append({name for name, weight in weights.items() if not weight.requires_grad})
        self.parameters, self.frozen = tuple(parameters), tuple(frozen)
        self.weight_shapes, self.frozen_names = shapes, frozen_names
        if is_without_backward(self, len(self) - 1):
            raise self.error("no layer has a weight to train; leave requires_grad of some")
        return boundaries

    def failure(
        self,
        layer: CustomLayer,
        arguments: Sequence[Tensor],
        error: Exception,
        *,
        when: str = "",
        otherwise: str = "correct it or the one before it",
    ) -> ValueError:
        """Return the error of a layer whose forward fails on these arguments."""
        given = ", ".join(format_value(argument) for argument in arguments)
        way = describe_error(error, otherwise=otherwise)
        return self.error(f"{layer.label} fails{when} on {given}: {way}")


def check_memory(layers: CustomLayers) -> None:
    """Check that this host can hold the whole model in each of its processes. Raises ValueError with the way out."""
    needed, processes, available = layers.makers.whole_bytes(), processes_of_host(), host_bytes()
    if processes * needed > available:
        each = "in a process" if processes == 1 else f"in each of {processes} processes"
        raise layers.error(
            f"build() makes {format_bytes(needed)} of weights and buffers {each}, but this host has "
            f"{format_bytes(available)}; leave build out, and let each function of layers make its own modules, such as "
            "lambda: Block(WIDTH)"
        )


@contextmanager
def made_on(layers: CustomLayers, layer: int, device: str, seed: int = 0) -> Iterator[CustomLayer]:
    """Make a layer on a device, which is torch's current one inside; its weights follow from the seed, and random numbers leave no trace."""
    with torch.random.fork_rng(devices=[]), torch.device(device):
        generator = weight_generator(seed, f"layer {layers.makers.seed_of(layer)}")
        torch.default_generator.manual_seed(generator.initial_seed())
        yield layers.make_module(layer)


def read_user_rows(  # noqa: PLR0913 (which rows, and whose)
    where: str, rows: Rows, *, seed: int, iteration: int, first: int, count: int
) -> Mapping[str, Tensor]:
    """Return what a user's function returns; raises ValueError that begins with `where` and states what to change."""
    try:
        with torch.device("cpu"):  # a data loader draws and indexes there, whatever device the layers are on
            tensors = rows(seed=seed, iteration=iteration, first=first, count=count)
    except Exception as error:
        raise model_error(where, f"rows() fails for {count} rows: {describe_error(error)}") from error
    if not isinstance(tensors, Mapping):
        raise model_error(where, f"rows() must return a dict of tensors, got {type(tensors).__name__}")
    for field, value in tensors.items():
        if not isinstance(value, Tensor) or value.shape[:1] != (count,):
            raise model_error(
                where,
                f"field {field!r} of rows() must be a tensor whose first dimension is the count {count}, "
                f"got {format_value(value)}",
            )
    return tensors


def _drawn(layers: CustomLayers, layer: int, seed: int) -> CustomLayer:
    """Make a layer on the CPU, with the weights of the training's seed."""
    with made_on(layers, layer, "cpu", seed) as made:
        return made


def is_without_backward(layers: CustomLayers, layer: int) -> bool:
    """Return whether a layer and all before it have no weights to train."""
    return layers.parameters[: layer + 1] == layers.frozen[: layer + 1]


def custom_layers(entrypoint: str) -> CustomLayers:
    """Return the layers of an entry point's model; raises ValueError that states what to change."""
    return CustomLayers(f"entry point {entrypoint}", load_model(entrypoint))


def load_model(entrypoint: str) -> CustomModel:
    """Return what an entry point returns, whose layers are not checked yet; raises ValueError that states what to change."""
    module_name, _, name = entrypoint.partition(":")
    if not module_name or not name:
        raise ValueError(f"entry point {entrypoint!r} must be written package.module:function")
    where = f"entry point {entrypoint}"
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            what = f"{module_name} imports {error.name}, which this worker has not; install that in the worker's image"
            raise model_error(where, what) from error
        raise model_error(
            where,
            f"this worker has no module {error.name}; bring it into the worker's image or into a volume that is on "
            "its PYTHONPATH, or change the name before the colon",
        ) from error
    except Exception as error:
        raise model_error(
            where, f"importing {module_name} fails: {describe_error(error, otherwise='correct that module')}"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise model_error(where, f"module {module_name} has no function {name}; change the name after the colon")
    try:
        model = function()
    except Exception as error:
        raise model_error(where, f"{name}() fails: {describe_error(error)}") from error
    if not isinstance(model, CustomModel):
        raise model_error(where, f"{name}() must return a CustomModel, got {type(model).__name__}")
    return model
