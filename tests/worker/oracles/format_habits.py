"""Entry points whose layers have a habit of formats, sizes or devices each."""

from __future__ import annotations

from functools import partial

import torch
from plain_model import WIDTH, linear, model, rows
from torch import Tensor, nn

from trainwright_worker.layers.custom import CustomModel


def spectral_norm() -> CustomModel:
    """Its vectors are buffers, which follow from the weights and stay in float32."""
    return model(lambda: nn.utils.parametrizations.spectral_norm(linear()))


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))

    def forward(self, values: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(values.float()) * self.filter, n=WIDTH).to(values.dtype)


def complex_weights() -> CustomModel:
    return model(Spectral)


class Double(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, values: Tensor) -> Tensor:
        return (values * self.weight).to(values.dtype)


def double_weights() -> CustomModel:
    return model(Double)


class Embed(nn.Module):
    """Makes float32 of whole numbers, whatever format its weights are in."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        return self.inner(torch.arange(WIDTH, device=values.device) * 0.1 + values.float())


def float32_inside() -> CustomModel:
    return model(Embed)


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        return self.inner(values).bfloat16()


def hands_on_bfloat16() -> CustomModel:
    return model(Autocast)


def steps(*, seed: int, iteration: int, first: int, count: int) -> dict[str, Tensor]:
    return {
        **rows(seed=seed, iteration=iteration, first=first, count=count),
        "targets": torch.full((count, WIDTH), 999.0),
    }


class ByStep(nn.Module):
    def forward(self, made: Tensor, targets: Tensor) -> Tensor:
        return (made - targets / 1000).square().mean(1)


def rounded_field() -> CustomModel:
    return model(rows=steps, head=ByStep)


def kept_field() -> CustomModel:
    return model(rows=steps, head=ByStep, keep_float32=["targets"])


def large_targets(**which: int) -> dict[str, Tensor]:
    return {**rows(**which), "targets": torch.full((which["count"], WIDTH), 70_000.0)}


def infinite_field() -> CustomModel:
    return model(rows=large_targets)


def large_field_in_float32() -> CustomModel:
    return model(rows=large_targets, head=ByStep, keep_float32=["targets"])


def lazy() -> CustomModel:
    return model(lambda: nn.LazyLinear(WIDTH))


class Flash(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        import flash_attention_of_nobody

        return flash_attention_of_nobody.forward(values)


def missing_module() -> CustomModel:
    return model(Flash)


@torch.library.custom_op("trainwright_habits::double", mutates_args=(), device_types="cuda")
def _double(values: Tensor) -> Tensor:
    return values * 2


@torch.library.custom_op("trainwright_habits::known_double", mutates_args=(), device_types="cuda")
def _known_double(values: Tensor) -> Tensor:
    return values * 2


_known_double.register_fake(torch.empty_like)


_known_double.register_autograd(lambda context, gradient: gradient * 2)


class Kernel(nn.Module):
    def __init__(self, operator) -> None:
        super().__init__()
        self.operator = operator

    def forward(self, values: Tensor) -> Tensor:
        return self.operator(values)


def gpu_kernel() -> CustomModel:
    return model(lambda: Kernel(_double))


def gpu_kernel_with_shapes() -> CustomModel:
    return model(lambda: Kernel(_known_double))


@torch.library.custom_op("trainwright_habits::half_double", mutates_args=())
def _half_double(values: Tensor, mixes_rows: bool) -> Tensor:
    if values.dtype is torch.float32:
        raise RuntimeError("attention only supports fp16 and bf16")
    return values * 2 + values.roll(1, 0) if mixes_rows else values * 2


_half_double.register_fake(lambda values, _mixes_rows: torch.empty_like(values))
_half_double.register_autograd(lambda _context, gradient: (gradient * 2, None))


def half_kernel(*, mixes_rows: bool = False) -> CustomModel:
    """Return a model with a kernel in half formats alone, such as flash attention."""
    return model(lambda: Kernel(partial(_half_double, mixes_rows=mixes_rows)))


def half_kernel_that_mixes_rows() -> CustomModel:
    return half_kernel(mixes_rows=True)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mask = torch.arange(WIDTH) % 2 == 0

    def forward(self, values: Tensor) -> Tensor:
        return torch.where(self.mask, values * 2, values)


def tensor_that_is_no_buffer() -> CustomModel:
    return model(Masked)


class Edges(nn.Module):
    """A graph whose edges are read off a matrix as the layer is made."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("edges", torch.eye(WIDTH).roll(1, 0).nonzero().T)

    def forward(self, values: Tensor) -> Tensor:
        source, target = self.edges
        return values.index_add(1, target, values[:, source])


def reads_values_as_it_is_made() -> CustomModel:
    return model(Edges)


class SparseGraph(nn.Module):
    def __init__(self, layout: torch.layout = torch.sparse_coo) -> None:
        super().__init__()
        self.register_buffer("matrix", torch.eye(WIDTH).to_sparse(layout=layout))

    def forward(self, values: Tensor) -> Tensor:
        return torch.sparse.mm(self.matrix, values.T).T


def sparse_matrix() -> CustomModel:
    return model(SparseGraph)


def sparse_rows() -> CustomModel:
    return model(partial(SparseGraph, torch.sparse_csr))


class SparseGradients(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, WIDTH, sparse=True)

    def forward(self, values: Tensor) -> Tensor:
        return values + self.table((values[:, 0] > 0).long())


def sparse_gradients() -> CustomModel:
    return model(SparseGradients)


class HandsOnSparse(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return values.to_sparse()


def sparse_between_layers() -> CustomModel:
    return model(HandsOnSparse)


class Quantized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("matrix", torch.quantize_per_tensor(torch.eye(WIDTH), 0.1, 0, torch.qint8))

    def forward(self, values: Tensor) -> Tensor:
        return values @ self.matrix.dequantize()


def quantized_matrix() -> CustomModel:
    return model(Quantized)


class LateBuffer(nn.Module):
    """Makes its buffer in its first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", None)

    def forward(self, values: Tensor) -> Tensor:
        self.mean = values.detach().mean(0) if self.mean is None else 0.9 * self.mean
        return values * 2


def late_buffer() -> CustomModel:
    return model(LateBuffer)


class Queue(nn.Module):
    """Appends to its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(1, WIDTH))

    def forward(self, values: Tensor) -> Tensor:
        self.rows = torch.cat([self.rows, values.detach()])
        return values * 2


def growing_buffer() -> CustomModel:
    return model(Queue)


class Passing(nn.Module):
    """Counts in a buffer that its state_dict leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, values: Tensor) -> Tensor:
        self.seen += 1
        return values * 2


def buffer_that_is_not_persistent() -> CustomModel:
    return model(Passing)


class InAutocast(nn.Module):
    """Multiplies in bfloat16 whatever the plan's format, and hands that on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            *(nn.Linear(width, after) for width, after in ((WIDTH, 512), (512, 512), (512, WIDTH)))
        )

    def forward(self, values: Tensor) -> Tensor:
        with torch.autocast(values.device.type if values.device.type != "meta" else "cpu", torch.bfloat16):
            return self.inner(values).to(values.dtype)


def multiplies_in_autocast() -> CustomModel:
    return model(InAutocast)


class Aligned(nn.Module):
    """Adds the loss of an alignment, for which the CPU has no kernels in half formats."""

    def forward(self, values: Tensor) -> Tensor:
        letters = torch.stack([values, -values], -1).transpose(0, 1).log_softmax(-1)
        rows, length = values.shape
        text = torch.ones(rows, 2, dtype=torch.int64, device=values.device)
        losses = nn.functional.ctc_loss(letters, text, (length,) * rows, (2,) * rows, reduction="none")
        return values + losses[:, None]


def without_half_kernels() -> CustomModel:
    return model(Aligned)
