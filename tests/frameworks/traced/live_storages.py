"""What is alive on the device: every storage of a fake `cuda` tensor, from the operator that made it to its death."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

__all__ = ["STORAGES", "Birth", "LiveStorages"]

ALLOCATION_BYTES = 512  # c10 CUDACachingAllocator kMinBlockSize: every request is rounded up to this
FRAMEWORKS = ("megatron", "transformer_engine")


@dataclass(frozen=True)
class Birth:
    """Where and as what a storage came to life."""

    bytes: int
    phase: str
    operator: str
    site: str
    shape: tuple[int, ...]
    dtype: str


def _site() -> str:
    """The innermost line of the frameworks' own Python that is running: file, line and function."""
    frame = sys._getframe(2)
    while frame is not None:
        for framework in FRAMEWORKS:
            _, found, tail = frame.f_code.co_filename.rpartition(f"/site-packages/{framework}/")
            if found:
                return f"{framework}/{tail}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


class LiveStorages(TorchDispatchMode):
    """Counts the bytes alive on the fake device while it is entered.

    A storage is counted from the first operator that returns a tensor on it until Python lets go of its last reference.
    Inside `fused()` a storage counts only if it outlives the block: a compiler that fuses the block into one kernel
    never materialises the rest.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = "start"
        self.now_bytes = 0
        self.peak_bytes = 0
        self.peak_phase = ""
        self.peak_by_phase: dict[str, int] = {}
        self._births: dict[int, Birth] = {}
        self._live: set[int] = set()
        self._pending: set[int] | None = None
        self._references: dict[int, Any] = {}
        self._log: list[int] = []  # +key for a birth, -key for a death
        self._last_key = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in (out,) if isinstance(out, torch.Tensor) else tree_iter(out):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cuda":
                self._meet(leaf, str(func))
        return out

    def _meet(self, tensor: torch.Tensor, operator: str) -> None:
        storage = tensor.untyped_storage()
        if getattr(storage, "live_key", None) is not None or storage.nbytes() == 0:
            return
        self._last_key += 1
        key = self._last_key
        storage.live_key = key  # type: ignore[attr-defined]
        size = -(-storage.nbytes() // ALLOCATION_BYTES) * ALLOCATION_BYTES
        self._births[key] = Birth(
            size, self.phase, operator, _site(), tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        )
        self._references[key] = weakref.ref(storage, lambda _, key=key: self._die(key))
        if self._pending is not None:
            self._pending.add(key)
        else:
            self._count(key)

    def _count(self, key: int) -> None:
        self._live.add(key)
        self._log.append(key)
        self.now_bytes += self._births[key].bytes
        self.peak_by_phase[self.phase] = max(self.peak_by_phase.get(self.phase, 0), self.now_bytes)
        if self.now_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_phase = self.now_bytes, self.phase

    def _die(self, key: int) -> None:
        self._references.pop(key, None)
        if self._pending is not None and key in self._pending:
            self._pending.discard(key)
        elif key in self._live:
            self._live.discard(key)
            self._log.append(-key)
            self.now_bytes -= self._births[key].bytes

    def release(self, storage: torch.UntypedStorage) -> None:
        """The framework gives a storage's memory back while tensors still name it."""
        key = getattr(storage, "live_key", None)
        if key is not None:
            self._die(key)
            storage.live_key = None  # type: ignore[attr-defined]

    @contextmanager
    def fused(self) -> Iterator[None]:
        """A block that a compiler turns into one kernel: only what outlives it was ever in memory."""
        if self._pending is not None:  # a fused function that calls another is one kernel
            yield
            return
        self._pending = set()
        try:
            yield
        finally:
            survivors, self._pending = self._pending, None
            for key in sorted(survivors):
                self._count(key)

    def alive(self) -> list[Birth]:
        return [self._births[key] for key in sorted(self._live)]

    def alive_at_peak(self) -> list[Birth]:
        """What was alive when the most was; the first time of equals."""
        now = peak = events_until_peak = 0
        for events, key in enumerate(self._log, start=1):
            now += self._births[key].bytes if key > 0 else -self._births[-key].bytes
            if now > peak:
                peak, events_until_peak = now, events
        live: set[int] = set()
        for key in self._log[:events_until_peak]:
            if key > 0:
                live.add(key)
            else:
                live.discard(-key)
        return [self._births[key] for key in sorted(live)]

    def bytes_of(self, tensors: Iterable[torch.Tensor]) -> int:
        """Bytes of the distinct live storages behind these tensors."""
        keys = {getattr(tensor.untyped_storage(), "live_key", None) for tensor in tensors}
        return sum(self._births[key].bytes for key in keys if key in self._live)


STORAGES = LiveStorages()  # of this process
