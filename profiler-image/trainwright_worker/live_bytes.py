"""Peak of a process's bytes: by a GPU's counters, or on the CPU by the lifetimes of storages."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class AllocationTracker(TorchDispatchMode):
    """Tracker of live and peak bytes: of given tensors, and of those that operations allocate while it is active.

    Works across micro-batches and in the backward, since on the CPU autograd runs on the caller's thread. It slows
    operations down several times, so use it in an untimed iteration.
    """

    def __init__(self, existing: Iterable[Tensor]) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._storage_bytes: dict[int, int] = {}
        self._original_resize = torch.UntypedStorage.resize_
        self._finalizers: list[weakref.finalize[Any, Any]] = []
        for tensor in existing:
            self._track(tensor)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, Tensor):
                self._track(value)
        return result

    def _track(self, tensor: Tensor) -> None:
        if tensor.layout is not torch.strided:
            return  # it has no storage of its own
        storage = tensor.untyped_storage()
        key = storage._cdata  # noqa: SLF001 (identifies the storage; the address of an empty one is 0)
        if key in self._storage_bytes:
            return
        size = self._storage_bytes[key] = storage.nbytes()
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self._finalizers.append(weakref.finalize(storage, self._release, key))

    def _release(self, key: int) -> None:
        self.live_bytes -= self._storage_bytes.pop(key, 0)

    def _record_resize(self, storage: torch.UntypedStorage) -> None:
        """Record that sharded weights were gathered into, or freed from, a storage that persists."""
        key = storage._cdata  # noqa: SLF001
        if key in self._storage_bytes:
            self.live_bytes += storage.nbytes() - self._storage_bytes[key]
            self._storage_bytes[key] = storage.nbytes()
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def __exit__(self, *exception: object) -> None:
        torch.UntypedStorage.resize_ = self._original_resize  # type: ignore[method-assign]
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        for finalizer in self._finalizers:
            finalizer.detach()

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        original = self._original_resize

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            self._record_resize(storage)
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]
        return self


def passed_on(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the floats among a layer's inputs that it hands on as it takes them: what a stage holds once."""
    storages = {storage_id(value) for value in outputs}
    return [value for value in inputs if value.is_floating_point() and storage_id(value) in storages]


def storage_id(tensor: Tensor) -> int:
    """Return an identifier of a tensor's storage among live ones; on the meta device addresses do not identify it."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - there is no public name for it


def measure_peak_bytes(work: Callable[[], object], existing: Iterable[Tensor], device: torch.device) -> int:
    """Return the peak of live bytes during some work, by the device's memory counter or by tracking storages."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        work()
        return torch.cuda.max_memory_allocated(device)
    with AllocationTracker(existing) as tracker:
        work()
    return tracker.peak_bytes


def measure_process_peak_bytes(work: Callable[[], object], existing: Iterable[Tensor], device: torch.device) -> int:
    """Return the peak bytes that a process takes of its device during some work.

    On a GPU that is what the allocator reserved, since fragments are nobody else's, and what the process holds besides.
    """
    if device.type != "cuda":
        return measure_peak_bytes(work, existing, device)
    torch.cuda.empty_cache()  # what was reserved before is not the work's
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_reserved(device) + (bytes_beside_tensors(device) or 0)


def bytes_beside_tensors(device: torch.device) -> int | None:
    """Return what is taken of a GPU besides the allocator's reserve: context, libraries, buffers; None on other devices."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return max(total - free - torch.cuda.memory_reserved(device), 0)
