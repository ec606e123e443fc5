"""Errors in a user's model: what fails, in one sentence with the way out."""

from __future__ import annotations

import re
from typing import Any, Final

from torch import Tensor

from trainwright_worker.gang.errors import one_line
from trainwright_worker.layers.layer import dtype_name

_NEEDS_GPU = re.compile(r"cuda|CUDA|triton|Triton|GPU|NVIDIA|'(Meta|CPU)' backend|fake impl|on device type")
_LACKS_FORMAT = re.compile(r"not implemented for '(Half|BFloat16)'|Unsupported dtype|type c10::(Half|BFloat16)")
"""Words of PyTorch's own failures."""
_MAX_TEXT: Final = 240
"""Most characters of a failure's own text: reports keep 600 of a sentence, and the way out follows."""

_WAYS: Final = (
    (
        re.compile(r"leaf Variable that requires grad|modified by an inplace operation"),
        "it changes its input in place, which the layer before it still needs: take inplace=False, x * 2 for x.mul_(2)",
    ),
    (
        re.compile(r"out of meta tensor|device meta is not on the expected device"),
        (
            "it takes a tensor that another layer or another forward left in a global, an attribute or a cache, where processes of "
            "other stages and recompute have none: hand it on, make it in this layer's own function as a buffer, or give a cached "
            "function (functools.cache) the device, too"
        ),
    ),
    (
        re.compile(r"reshape is not implemented for sparse tensors"),
        "its gradients are sparse, which no plan sums: leave sparse=True out of the embedding",
    ),
    (
        re.compile(r"Sparse\w*TensorImpl"),
        "keep the indices and values of a sparse matrix as buffers (index_add), or the dense one",
    ),
    (re.compile(r"[qQ]uantized"), "keep the integers and the scales of a quantized tensor as buffers of their own"),
)
"""Ways out of failures, by their words."""


class ModelError(ValueError):
    """Error that states what to change in a user's model."""


def model_error(where: str, what: str) -> ModelError:
    """Return the error of an entry point."""
    return ModelError(f"{where}: {what}")


def describe_error(error: Exception, *, otherwise: str = "correct it") -> str:
    """Return a failure of the user's code in one line, with the way out."""
    failure_text = shorten(error)
    if isinstance(error, ModuleNotFoundError):
        return f"{failure_text}; install {error.name} here and in the worker's image"
    if needs_gpu(error):
        otherwise = (
            "a kernel for GPUs alone needs a function that states the shapes of its result "
            "(torch.library.custom_op and register_fake)"
        )
    way = next((way for words, way in _WAYS if words.search(str(error))), otherwise)
    return f"{failure_text}; {way}"


def shorten(error: Exception) -> str:
    """Return a failure of the user's code in one line, short enough for the way out that follows to be read."""
    return one_line(f"{type(error).__name__}: {error}", limit=_MAX_TEXT)


def needs_gpu(error: Exception) -> bool:
    """Return whether a failure says that something runs on a GPU alone."""
    failure_text = f"{type(error).__name__}: {error}"
    return _NEEDS_GPU.search(failure_text) is not None and _LACKS_FORMAT.search(failure_text) is None


def lacks_format(error: Exception) -> bool:
    """Return whether a failure says that the CPU has no kernel in a number format."""
    return _LACKS_FORMAT.search(str(error)) is not None


def format_value(value: Any) -> str:
    """Return a tensor's number format and shape, those of a tuple of tensors, or another value's type."""
    if isinstance(value, tuple):
        return f"({', '.join(map(format_value, value))})"
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{dtype_name(value.dtype)} {tuple(value.shape)}"
