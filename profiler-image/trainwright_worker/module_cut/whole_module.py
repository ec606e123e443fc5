"""A user's whole module, cut into layers and written as a Python module that is the user's own."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from trainwright_worker.layers.custom import TARGETS, Rows
from trainwright_worker.layers.custom_errors import ModelError, describe_error, model_error
from trainwright_worker.module_cut.forward_calls import CutError, Recording
from trainwright_worker.module_cut.layer_cut import cut
from trainwright_worker.module_cut.layer_source import LayerSource, Traces, layer_source
from trainwright_worker.module_cut.opened_modules import opened_modules
from trainwright_worker.module_cut.recorder import Recorder, line_of_error

_ROWS: Final = 5, 7
"""Rows of the two runs, of which the numbers that follow from the rows are those of no other size."""


@dataclass(frozen=True, slots=True)
class WholeModule:
    """Module of a user's Python file, with what trains it.

    Attributes:
        module, function: Python module, and its function that makes the whole torch module.
        loss: takes what the module returns and the targets, and returns each row's loss; None if the module does.
    """

    module: str
    function: str
    build: Callable[[], nn.Module]
    rows: Rows
    loss: Callable[[Any, Tensor], Tensor] | None = None

    @classmethod
    def load(cls, place: str) -> WholeModule:
        """Load `file.py:function`. Raises ValueError that says what to change."""
        file, _, function = place.rpartition(":")
        path = Path(file)
        if path.suffix != ".py" or not function:
            raise ValueError(f"{place}: must be written file.py:function, such as my.py:build")
        if not path.is_file():
            raise ValueError(f"{place}: there is no file {file}; change what is before the colon")
        sys.path.insert(0, str(path.parent.resolve()))
        try:
            module = import_module(path.stem)
        except Exception as error:
            raise ValueError(f"{place}: importing {file} fails: {describe_error(error)}") from error
        for name, what in ((function, "makes your torch module"), ("rows", "returns the rows to train on")):
            if not callable(getattr(module, name, None)):
                sentence = f"{place}: {file} has no function {name}(), which {what}; add it"
                raise ValueError(sentence)  # noqa: TRY004 - of the user's input
        whole = cls(path.stem, function, getattr(module, function), module.rows, getattr(module, "loss", None))
        if whole.loss is not None and not _can_take(inspect.signature(whole.loss), "output", TARGETS):
            raise ValueError(
                f"{place}: loss{inspect.signature(whole.loss)} is called with the module's output and the field targets; put "
                "all that it compares with into targets, such as lengths in one more column"
            )
        return whole

    def error(self, what: str) -> ModelError:
        """Return the error that says what to change."""
        return model_error(f"{self.module}:{self.function}", what)

    def source(self, command: str) -> LayerSource:
        """Return the layers as Python. Raises ValueError that names the line of what cannot be cut."""
        try:
            return self._source(command, FakeTensorMode(allow_non_fake_inputs=True))
        except ModelError:
            raise
        except Exception as error:  # noqa: BLE001 - deliberate: some modules read values
            without_values = error
        try:
            return self._source(command, nullcontext())
        except CutError as error:
            raise self.error(str(error)) from error
        except Exception as error:  # noqa: BLE001 - deliberate: whatever the user's code raises
            raise self.error(f"{line_of_error(error)}: {describe_error(error)}") from without_values

    def _source(self, command: str, mode: AbstractContextManager[Any]) -> LayerSource:
        traces = self._traces(mode)
        layers = cut(traces.first, traces.other_rows)
        return layer_source(layers, traces, module=self.module, function=self.function, command=command)

    def _traces(self, mode: AbstractContextManager[Any]) -> Traces:
        fewer, more = _ROWS
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            whole = self._whole(mode)
            with mode:
                with torch.no_grad():
                    opened = opened_modules(whole, lambda rows: self.losses(whole, rows), self._fields(fewer))
                first = self._record(whole, opened, self._fields(fewer))
                other = self._record(whole, opened, self._fields(more))
                try:
                    _replace_tensors(whole, lambda value: value.to(torch.bfloat16), buffers=False)
                    in_half = self._record(whole, opened, self._fields(fewer, torch.bfloat16))
                except (RuntimeError, ValueError):  # deliberate: it computes in float32 alone, as its checks say
                    in_half = None
        return Traces(first, other, in_half)

    def _whole(self, mode: AbstractContextManager[Any]) -> nn.Module:
        """Make the whole module, of tensors without values in a mode of these."""
        try:
            with mode:
                whole = self.build()
        except RuntimeError:  # deliberate: it reads values as it is made
            whole = self.build()
            if isinstance(mode, FakeTensorMode):
                _replace_tensors(whole, mode.from_tensor)
        if not isinstance(whole, nn.Module):
            raise self.error(f"it must return a torch module, got {type(whole).__name__}")
        return whole

    def _record(self, whole: nn.Module, opened: set[nn.Module], rows: Mapping[str, Tensor]) -> Recording:
        recorder = Recorder(whole, opened, self.loss)
        return recorder.record(lambda fields: self.losses(whole, fields, recorder.call_loss), rows)

    def losses(self, whole: nn.Module, rows: Mapping[str, Tensor], loss: Callable[..., Any] | None = None) -> Any:
        """Return each row's loss."""
        signature = inspect.signature(whole.forward)
        parameters, inputs = signature.parameters, dict(rows)
        if self.loss is not None or len(parameters) < len(rows):
            del inputs[TARGETS]
        if not set(inputs) <= set(parameters) and not _can_take(signature, *inputs):
            raise self.error(
                f"the fields of rows() are {', '.join(rows)}, but forward takes ({', '.join(parameters)}), without targets where "
                "there is a function loss(); give rows() the fields that it takes, and put all that the loss compares with into "
                "targets"
            )
        output = whole(**inputs) if set(inputs) <= set(parameters) else whole(*inputs.values())
        return output if self.loss is None else (loss or self.loss)(output, rows[TARGETS])

    def _fields(self, count: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        try:
            with unset_fake_temporarily(), torch.device("cpu"):
                rows = self.rows(seed=0, iteration=0, first=0, count=count)
        except Exception as error:
            raise self.error(f"rows() fails for {count} rows: {describe_error(error)}") from error
        if not isinstance(rows, Mapping) or not isinstance(rows.get(TARGETS), Tensor):
            raise self.error(f"rows() must return a dict of tensors, of which one is {TARGETS!r}")
        mode = active_fake_mode()
        return {
            name: (value if mode is None else mode.from_tensor(value)).to(dtype if value.is_floating_point() else None)
            for name, value in rows.items()
        }


def _can_take(signature: inspect.Signature, *arguments: object) -> bool:
    """Return whether a function can be called with these arguments."""
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True


def _replace_tensors(whole: nn.Module, replace: Callable[[Tensor], Tensor], *, buffers: bool = True) -> None:
    """Replace the weights and buffers of a module; those of several names stay one."""
    replaced: dict[int, Tensor] = {}
    for module in whole.modules():
        for name, weight in list(module._parameters.items()):  # noqa: SLF001 - named_parameters leaves out ties
            if weight is not None:
                new = replaced.setdefault(
                    id(weight), nn.Parameter(replace(weight.detach()), requires_grad=weight.requires_grad)
                )
                module._parameters[name] = new  # type: ignore[assignment] # noqa: SLF001
        for name, buffer in list(module._buffers.items()) if buffers else []:  # noqa: SLF001
            if buffer is not None:
                module._buffers[name] = replaced.setdefault(id(buffer), replace(buffer))  # noqa: SLF001
