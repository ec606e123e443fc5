"""The most bytes that live at once on a device without a counter of its own: every storage, from birth to death."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors that exist before and those that operations make while it is active.

    Works across micro-batches and in the backward (on the CPU autograd runs on the caller's thread). It slows
    operations several times over, so it belongs into an iteration that nobody times.
    """

    def __init__(self, existing: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now_bytes = 0
        self.peak_bytes = 0
        self._known: dict[int, int] = {}
        self._resize = torch.UntypedStorage.resize_
        self._finalizers: list[weakref.finalize[Any, Any]] = []
        for tensor in existing:
            self._watch(tensor)

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
                self._watch(value)
        return result

    def _watch(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata  # noqa: SLF001 (the storage's identity; its address would be 0 for empty ones)
        if key in self._known:
            return
        size = self._known[key] = storage.nbytes()
        self.now_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)
        self._finalizers.append(weakref.finalize(storage, self._forget, key))

    def _forget(self, key: int) -> None:
        self.now_bytes -= self._known.pop(key, 0)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        """Sharded weights are collected into, and let go from, a storage that lives on."""
        key = storage._cdata  # noqa: SLF001
        if key in self._known:
            self.now_bytes += storage.nbytes() - self._known[key]
            self._known[key] = storage.nbytes()
            self.peak_bytes = max(self.peak_bytes, self.now_bytes)

    def __exit__(self, *exception: object) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        for finalizer in self._finalizers:
            finalizer.detach()

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        original = self._resize

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            self._resized(storage)
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]
        return self


def peak_bytes(work: Callable[[], object], existing: Iterable[Tensor], device: torch.device) -> int:
    """The most bytes that live at once during some work: by the device's own counter, or storage by storage."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        work()
        return torch.cuda.max_memory_allocated(device)
    with LiveBytes(existing) as live:
        work()
    return live.peak_bytes
