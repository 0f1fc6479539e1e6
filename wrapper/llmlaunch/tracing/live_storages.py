"""What is alive on the device: every storage of a fake `cuda` tensor, from the operator that made it to its death."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from fake_dispatch import bare
from trace_checks import FRAMEWORKS

ALLOCATION_BYTES = 512  # c10 CUDACachingAllocator kMinBlockSize: every request is rounded up to this
MODULES = ("megatron/core/transformer/", "megatron/core/models/", "megatron/core/ssm/", "transformers/models/")


@dataclass(frozen=True)
class Birth:
    """Where and as what a storage came to life: `site` is the innermost line of the frameworks' own Python that ran,
    `module` the innermost function of Megatron's layers and models (none in a backward pass). `role` is what it is to
    the rank, where somebody has marked it, and `until` the phase in which it was let go of."""

    bytes: int
    phase: str
    operator: str
    site: str
    module: str
    shape: tuple[int, ...]
    dtype: str
    role: str = ""
    until: str = ""


def _site_and_module() -> tuple[str, str]:
    """As "transformer_engine/pytorch/module/base.py:140 get_dummy_wgrad" and "transformer/mlp.py MLP.forward"."""
    frame: FrameType | None = sys._getframe(2)
    site = module = ""
    while frame is not None and not module:
        code = frame.f_code
        _, _, path = code.co_filename.rpartition("/site-packages/")
        if path.startswith(FRAMEWORKS):
            site = site or f"{path}:{frame.f_lineno} {code.co_qualname}"
            if path.startswith(MODULES):
                module = f"{path.removeprefix('megatron/core/')} {code.co_qualname}"
        frame = frame.f_back
    return site, module


@bare
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
        storage.live_key = key
        size = -(-storage.nbytes() // ALLOCATION_BYTES) * ALLOCATION_BYTES
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._births[key] = Birth(size, self.phase, operator, *_site_and_module(), tuple(tensor.shape), dtype)
        self._references[key] = weakref.ref(storage, partial(self._die, key))
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

    def _die(self, key: int, reference: Any = None) -> None:
        self._references.pop(key, None)
        if self._pending is not None and key in self._pending:
            self._pending.discard(key)
        elif key in self._live:
            self._live.discard(key)
            self._log.append(-key)
            birth = self._births[key]
            self._births[key] = replace(birth, until=self.phase)
            self.now_bytes -= birth.bytes

    def release(self, storage: torch.UntypedStorage) -> None:
        """The framework gives a storage's memory back while tensors still name it."""
        key = getattr(storage, "live_key", None)
        if key is not None:
            self._die(key)
            storage.live_key = None

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

    def events(self) -> Iterator[tuple[int, int]]:
        """In order: (key, bytes) for a storage that is made, (key, 0) for one that is let go of."""
        return ((key, self._births[key].bytes) if key > 0 else (-key, 0) for key in self._log)

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

    def mark(self, tensors: Iterable[torch.Tensor], role: str) -> int:
        """Notes what the distinct live storages behind these tensors are. Gives their bytes."""
        keys = self._live & {getattr(tensor.untyped_storage(), "live_key", 0) for tensor in tensors}
        for key in keys:
            self._births[key] = replace(self._births[key], role=role)
        return sum(self._births[key].bytes for key in keys)


STORAGES = LiveStorages()  # of this process


def tensors_in(value: Any, visited: set[int]) -> Iterator[torch.Tensor]:
    """All tensors inside nested collections; `visited` are the collections already looked into."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple | set) and id(value) not in visited:
        visited.add(id(value))
        for item in [*value.values()] if isinstance(value, dict) else value:
            yield from tensors_in(item, visited)


def _parts(optimizer: Any) -> Iterator[Any]:
    """The optimizers of a chain, and of the chains in it."""
    chain = getattr(optimizer, "chained_optimizers", None)
    if chain is None:
        yield optimizer
    else:
        for each in chain:
            yield from _parts(each)


def _optimizer_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """Main parameters and states of every optimizer in the chain; the model's own parameters are not among them."""
    for part in _parts(optimizer):
        for name in ("shard_fp32_from_float16_groups", "fp32_from_float16_groups"):
            yield from tensors_in(getattr(part, name, []), set())
        if part.optimizer is not None:
            for state in part.optimizer.state.values():
                yield from tensors_in(state, set())


def stateless_of(optimizer: Any) -> int:
    """Tensors that an optimizer steps and keeps no state of."""
    return sum(
        not part.optimizer.state.get(tensor)
        for part in _parts(optimizer)
        if part.optimizer is not None
        for group in part.optimizer.param_groups
        for tensor in group["params"]
    )


def state_of(model: list[Any], optimizer: Any) -> dict[str, Any]:
    """How much lasts, and marks it as what it is."""
    buffers = [buffer for chunk in model for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    parameters = [parameter.data for chunk in model for parameter in chunk.parameters()]
    gradients = [buffer.grad_data for buffer in buffers]
    states = list(_optimizer_tensors(optimizer))
    sizes = {
        "parameters": STORAGES.mark(parameters, "parameters"),
        "gradients": STORAGES.mark(gradients, "gradients"),
        "optimizer": STORAGES.mark(states, "optimizer_states"),
    }
    return {
        "parameter_count": sum(parameter.numel() for parameter in parameters),
        "padded_count": sum(buffer.grad_data.numel() for buffer in buffers),
        "optimizer_state_count": sum(tensor.numel() for tensor in states),
        "bytes": {**sizes, "other": STORAGES.now_bytes - sum(sizes.values())},
    }


def grouped(births: list[Birth]) -> list[dict[str, Any]]:
    """Largest first, births that differ in nothing but time together."""
    groups = Counter(births)
    rows = [
        {**vars(birth), "bytes": birth.bytes * count, "count": count, "shape": list(birth.shape)}
        for birth, count in groups.items()
    ]
    return sorted(rows, key=lambda row: -row["bytes"])
