"""A CUDA device for fake tensors on a machine that has none. Import this before anything that looks at `torch.cuda`."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("fake_cuda.cpp")
TOTAL_MEMORY_BYTES = 80 * 2**30
HOPPER = types.SimpleNamespace(
    name="a fake Hopper",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=TOTAL_MEMORY_BYTES,
    L2_cache_size=50 * 2**20,
)


def library() -> Path:
    """The compiled guard beside this environment's torch; built when the source or torch is newer.

    Raises subprocess.CalledProcessError when there is no C++ compiler.
    """
    import importlib.util

    spec = importlib.util.find_spec("torch")  # found, not imported: the hooks must be registered before torch runs
    if spec is None or spec.origin is None:
        raise SystemExit(f"{sys.executable} has no torch: run this with the Python of .venv-frameworks/")
    torch = Path(spec.origin).parent
    version = (torch / "version.py").read_bytes()
    if b"cuda: Optional[str] = None" not in version and b"cuda: str | None = None" not in version:
        raise SystemExit(
            f"{torch}: this torch was built for CUDA; tracing without a GPU wants a CPU build: "
            'make install-frameworks TRACED_TORCH="--index-url https://download.pytorch.org/whl/cpu torch==2.13.0", or '
            "for DeepSpeed pip install --index-url https://download.pytorch.org/whl/cpu torch in an environment"
        )
    digest = hashlib.sha256(SOURCE.read_bytes() + version).hexdigest()[:16]
    folder = Path(sys.prefix)
    if not os.access(folder, os.W_OK):  # an environment of somebody else's
        folder = Path.home() / ".cache" / "llmlaunch"
        folder.mkdir(parents=True, exist_ok=True)
    built = folder / f"libfake_cuda-{digest}.so"
    if not built.exists():
        unfinished = built.with_suffix(f".building-{os.getpid()}")
        flags = ["-O1", "-shared", "-fPIC", "-std=c++20"]
        flags += [f"-I{torch}/include", f"-L{torch}/lib", f"-Wl,-rpath,{torch}/lib"]
        subprocess.run(["c++", *flags, str(SOURCE), "-ltorch_cpu", "-lc10", "-o", str(unfinished)], check=True)
        unfinished.rename(built)
    return built


class _Event:
    """Time does not pass on the fake device."""

    def __init__(self, *args: Any, **options: Any) -> None: ...
    def record(self, *args: Any) -> None: ...
    def wait(self, *args: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


class _Stream(_Event):
    cuda_stream = 0

    def wait_stream(self, *args: Any) -> None: ...
    def wait_event(self, *args: Any) -> None: ...
    def record_event(self, *args: Any) -> _Event:
        return _Event()


class _Generator:
    """Random numbers are never drawn on the fake device."""

    def get_state(self) -> None: ...
    def set_state(self, state: Any) -> None: ...


class _Device(contextlib.nullcontext[None]):
    """The only device is always the current one. A class, because `isinstance` is asked of it."""


def answer_torch_cuda(torch: Any) -> None:
    """What of `torch.cuda` asks a real device."""
    cuda, stream = torch.cuda, _Stream()

    def answer(value: Any) -> Callable[..., Any]:
        return lambda *args, **options: value

    answers = {
        "is_available": True,
        "is_initialized": True,
        "current_device": 0,
        "device_count": 1,
        "current_stream": stream,
        "default_stream": stream,
        "get_device_capability": (9, 0),
        "get_device_properties": HOPPER,
        "get_device_name": HOPPER.name,
        "is_current_stream_capturing": False,
        "is_bf16_supported": True,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_reserved": 0,
        **dict.fromkeys(
            (
                *("set_device", "synchronize", "empty_cache", "_lazy_init", "set_stream", "manual_seed"),
                *("manual_seed_all", "set_rng_state", "reset_peak_memory_stats", "reset_max_memory_allocated"),
            )
        ),
    }
    for name, value in answers.items():
        setattr(cuda, name, answer(value))
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.device = _Device
    cuda.default_generators = (_Generator(),)
    cuda.get_rng_state = lambda *args, **options: torch.zeros(16, dtype=torch.uint8, device="cpu")
    cuda.nvtx.range_push = cuda.nvtx.range_pop = answer(None)
    importlib.import_module("torch.cuda.graphs")._cuda_isCurrentStreamCapturing = answer(False)  # type: ignore[attr-defined]
    torch.Tensor.record_stream = answer(None)
    torch.Tensor.pin_memory = lambda self, *args: self


def install() -> None:
    """Register the device, then patch what of `torch.cuda` asks a real one."""
    guard = ctypes.CDLL(str(library()), mode=ctypes.RTLD_GLOBAL)  # its CUDAHooks must come before torch's first look
    import torch

    guard.install_fake_cuda()
    torch.autograd.set_multithreading_enabled(False)  # a backward thread would start without the tracing modes
    answer_torch_cuda(torch)
    from torch._subclasses.fake_tensor import FakeTensorMode

    FakeTensorMode.avoid_device_init = property(lambda self: True)


if __name__ == "__main__":
    print(library())
