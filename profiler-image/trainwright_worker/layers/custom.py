"""A user's own model as layers: plain torch modules in a row, each computed whole.

An entry point is a function without arguments, written `package.module:function`, that returns a `CustomModel`:

    def resnet() -> CustomModel:
        blocks = [partial(BasicBlock, 64, 64) for _ in range(4)]
        return CustomModel(layers=[Stem, *blocks, Head], rows=rows)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trainwright_worker.batches import weight_generator
from trainwright_worker.layers.layer import Boundary, Data, Layer, Output, SharedWeights
from trainwright_worker.layers.tensor_parallel import TensorShard

TARGETS = "targets"
_PROBED_ROWS = 2
"""Not 1: a size that is 1 by chance is told from the number of rows, and one row is too few for batch normalisation."""


class Rows(Protocol):
    """Training data."""

    def __call__(self, *, seed: int, iteration: int, first: int, count: int) -> Mapping[str, Tensor]:
        """Rows `first … first + count - 1` of an iteration's batch, by field; first dimension `count`.

        They must follow from seed, iteration and row alone, so that every plan trains on the same rows.
        """


@dataclass(frozen=True, slots=True)
class CustomModel:
    """What an entry point returns.

    Attributes:
        layers: functions without arguments (classes, partials, lambdas), each of which makes one layer, a torch module
            of its own. A layer takes the tensor or the tensors of the tuple that the one before it returned, as
            arguments. The first takes all fields of the rows but `targets`, in their order; the last takes `targets`
            too, as its last argument, and returns each row's mean loss, shape (rows,). Only float tensors whose first
            dimension counts the rows can pass from layer to layer. A layer is made after torch's random numbers on the
            CPU were set from the seed and the layer's place: so weights are the same under every plan as long as they
            are drawn from those, and no layer is made where it is not needed.
        rows: the training data; `targets` is one of its fields.
    """

    layers: Sequence[Callable[[], nn.Module]]
    rows: Rows


class CustomLayer(Layer):
    """A user's module, whole on every rank of a tensor group.

    Attributes:
        reads: fields that follow the boundary as the module's arguments.
    """

    def __init__(self, module: nn.Module, reads: tuple[str, ...], *, is_last: bool) -> None:
        super().__init__()
        self.module = module
        self.reads = reads  # type: ignore[misc] # a user's fields are known when his model is
        self.is_last = is_last

    def forward(self, boundary: Boundary, data: Data) -> Output:
        made = self.module(*boundary, *(data[field] for field in self.reads))
        if self.is_last:
            return Output((), made.sum(dtype=torch.float32))
        return Output(made if isinstance(made, tuple) else (made,))


class CustomLayers:
    """The layers of a user's model; `len` counts them.

    Attributes:
        parameters: values of every layer's weights.
    """

    def __init__(self, name: str, model: CustomModel) -> None:
        self.name = name
        self.model = model
        self._check_layers()
        probed = self._rows(seed=0, iteration=0, first=0, count=_PROBED_ROWS)
        if TARGETS not in probed:
            raise self._wrong(f"rows() has no field {TARGETS!r} (it has {', '.join(probed)}); add one")
        self._check_rows(probed)
        self._inputs = tuple(field for field in probed if field != TARGETS)
        self.parameters: tuple[int, ...] = ()
        try:
            self._shapes = self._probe(probed, "meta")
        except ValueError:  # not every operation can do without values: what fails on the CPU, too, is the user's
            self._shapes = self._probe(probed, "cpu")

    def __len__(self) -> int:
        return len(self.model.layers)

    def make(self, layer: int, *, seed: int, shard: TensorShard, shared: SharedWeights) -> Layer:
        del shard, shared
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(weight_generator(seed, f"layer {layer}").initial_seed())
            return self._made(layer)

    def boundary(self, layer: int) -> tuple[tuple[int, ...], ...]:
        return self._shapes[layer]

    def rows(self, fields: tuple[str, ...], *, seed: int, iteration: int, first: int, count: int) -> dict[str, Tensor]:
        """These fields of the user's rows."""
        found = self._rows(seed=seed, iteration=iteration, first=first, count=count)
        return {field: found[field] for field in fields}

    def _wrong(self, what: str) -> ValueError:
        return _wrong(self.name, what)

    def _check_layers(self) -> None:
        layers = self.model.layers
        if not isinstance(layers, Sequence) or not layers:
            raise self._wrong(f"layers must be a list of at least one function, got {layers!r}")
        for place, make in enumerate(layers):
            if isinstance(make, nn.Module):
                kind = type(make).__name__
                raise self._wrong(
                    f"layer {place} is a module ({kind}), whose weights do not follow from the seed; "
                    f"give a function that makes it, such as lambda: {kind}(…)"
                )
            if not callable(make):
                raise self._wrong(f"layer {place} must be a function that makes a module, got {make!r}")

    def _rows(self, *, seed: int, iteration: int, first: int, count: int) -> Mapping[str, Tensor]:
        try:
            found = self.model.rows(seed=seed, iteration=iteration, first=first, count=count)
        except Exception as error:
            raise self._wrong(f"rows() fails for {count} rows: {_told(error)}; correct it") from error
        if not isinstance(found, Mapping):
            raise self._wrong(f"rows() must return a dict of tensors, got {type(found).__name__}")
        for field, value in found.items():
            if not isinstance(value, Tensor) or value.shape[:1] != (count,):
                raise self._wrong(
                    f"field {field!r} of rows() must be a tensor whose first dimension is the count "
                    f"{count}, got {_shown(value)}"
                )
        return found

    def _check_rows(self, probed: Mapping[str, Tensor]) -> None:
        """Which rows a rank asks for together is the plan's choice, so that a row must not depend on it."""
        alone = self._rows(seed=0, iteration=0, first=1, count=1)
        for field, value in probed.items():
            if field not in alone or not torch.equal(alone[field], value[1:2]):
                raise self._wrong(
                    f"field {field!r} of rows() has other values for row 1 when that is asked for alone; make each row "
                    "from seed, iteration and its own number (first, first + 1, …)"
                )

    def _made(self, layer: int) -> CustomLayer:
        try:
            module = self.model.layers[layer]()
        except Exception as error:
            raise self._wrong(f"layer {layer} cannot be made: {_told(error)}; correct it") from error
        if not isinstance(module, nn.Module):
            raise self._wrong(f"layer {layer} must be made as a torch module, got {type(module).__name__}")
        is_last = layer == len(self) - 1
        reads = (self._inputs if layer == 0 else ()) + ((TARGETS,) if is_last else ())
        return CustomLayer(module, reads, is_last=is_last)

    def _probe(self, rows: Mapping[str, Tensor], device: str) -> list[tuple[tuple[int, ...], ...]]:
        """Shapes behind every layer, of one row, by running all layers one after another; each is dropped again."""
        data = {field: value.to(device) for field, value in rows.items()}
        boundary: Boundary = ()
        shapes, parameters = [], []
        with torch.random.fork_rng(devices=[]), torch.device(device), torch.no_grad():
            for layer in range(len(self)):
                made = self._made(layer)
                self._check_fresh(layer, made)
                arguments = (*boundary, *(data[field] for field in made.reads))
                try:
                    result = made.module(*arguments)
                except Exception as error:
                    given = ", ".join(_shown(argument) for argument in arguments)
                    raise self._wrong(
                        f"layer {layer} fails on {given}: {_told(error)}; correct it or the one before it"
                    ) from error
                if made.is_last:
                    self._check_losses(result)
                    boundary = ()
                else:
                    boundary = self._checked(layer, result)
                shapes.append(tuple(tuple(value.shape[1:]) for value in boundary))
                parameters.append(sum(parameter.numel() for parameter in made.parameters()))
        self.parameters = tuple(parameters)
        return shapes

    def _check_fresh(self, layer: int, made: CustomLayer) -> None:
        """Weights that exist already do not follow from the seed, and may be another layer's too."""
        known = {id(parameter) for parameter in made.parameters()}
        if any(id(parameter) in known for parameter in self._made(layer).parameters()):
            raise self._wrong(
                f"layer {layer} gives the same weights whenever it is made; make its modules inside its function "
                "(weights that layers share are not supported yet)"
            )

    def _checked(self, layer: int, result: Any) -> Boundary:
        boundary = result if isinstance(result, tuple) else (result,)
        for value in boundary:
            if not isinstance(value, Tensor) or not value.is_floating_point() or value.shape[:1] != (_PROBED_ROWS,):
                raise self._wrong(
                    f"layer {layer} must return float tensors whose first dimension is that of the rows "
                    f"({_PROBED_ROWS} here), got {_shown(value)}"
                )
        return boundary

    def _check_losses(self, result: Any) -> None:
        if not isinstance(result, Tensor) or not result.is_floating_point() or result.shape != (_PROBED_ROWS,):
            raise self._wrong(
                "the last layer must return each row's mean loss, a float tensor of shape "
                f"({_PROBED_ROWS},) for {_PROBED_ROWS} rows, got {_shown(result)}"
            )


def custom_layers(entrypoint: str) -> CustomLayers:
    """The layers of the model behind an entry point; raises ValueError naming what of it has to be changed."""
    module_name, _, name = entrypoint.partition(":")
    if not module_name or not name:
        raise ValueError(f"entry point {entrypoint!r} must be written package.module:function")
    where = f"entry point {entrypoint}"
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            what = f"{module_name} imports {error.name}, which this worker has not; install that in the worker's image"
            raise _wrong(where, what) from error
        raise _wrong(
            where,
            f"this worker has no module {error.name}; bring it into the worker's image or into a volume that is on "
            "its PYTHONPATH, or change the name before the colon",
        ) from error
    except Exception as error:
        raise _wrong(where, f"importing {module_name} fails: {_told(error)}; correct that module") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise _wrong(where, f"module {module_name} has no function {name}; change the name behind the colon")
    try:
        model = function()
    except Exception as error:
        raise _wrong(where, f"{name}() fails: {_told(error)}; correct it") from error
    if not isinstance(model, CustomModel):
        raise _wrong(where, f"{name}() must return a CustomModel, got {type(model).__name__}")
    return CustomLayers(where, model)


def _wrong(where: str, what: str) -> ValueError:
    return ValueError(f"{where}: {what}")


def _told(error: Exception) -> str:
    """An error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _shown(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
