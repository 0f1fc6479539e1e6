"""A run directory with the hook and the probe, and trainers with the real torch below the real rank wrapper."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.rundir import file_names
from llmlaunch.rundir.probe_files import TorchPeaks, largest_peaks, read_probe_file
from llmlaunch.trainers import HOOK, MEMORY_PROBE
from support.node_rig import ATTEMPT, NodeRig, archive  # noqa: F401

HERE = Path(__file__).parent
GIB = 2**30
BEGIN = "import torch, fake_allocator as fake\nfrom fake_allocator import GIB, hold, release\nfake.install()\n"
# As much of torch as the probe meets, for what need not wait for the real one's import.
SMALL_CUDA = """
import types, torch
_queued_calls = []
def _lazy_call(call):
    _queued_calls.append(call)
def init():
    for call in _queued_calls:
        call()
def set_device(index):
    torch._C._cuda_setDevice(index)
def reset_peak_memory_stats(index):
    torch._C._cuda_resetPeakMemoryStats(index)
def get_device_properties(index):
    return types.SimpleNamespace(total_memory=80 * 2**30)
"""
SMALL_C = """
def _cuda_getDeviceCount():
    return 1
def _cuda_getAllocatorBackend():
    return "native"
def _cuda_memoryStats(index):
    every = {"all": {"current": 2**30, "peak": 2**30}}
    names = ("allocated_bytes", "active_bytes", "reserved_bytes")
    return {**dict.fromkeys(names, every), "num_alloc_retries": 0, "num_ooms": 0}
"""


def probe_peaks(paths: Iterable[Path]) -> tuple[TorchPeaks, ...]:
    """What these files say together; none is damaged."""
    files = [file for file in map(read_probe_file, paths) if file is not None]
    assert not any(file.damaged for file in files)
    return largest_peaks(files)


class ProbeRig(NodeRig):
    """One run directory whose trainers have the probe."""

    def __init__(self, node_side: Path, directory: Path, driver: Path) -> None:
        super().__init__(node_side, directory, directory)
        for source, name in ((HOOK, "sitecustomize.py"), (MEMORY_PROBE, "llmlaunch_memory_probe.py")):
            place = self.run_directory / "hook" / name
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, place)
        self.driver = driver

    def train(self, text: str, *words: str, rank: int = 0, **environment: str) -> Any:
        """Start a trainer of this text; `words` are Python's own."""
        script = self.run_directory.with_name(f"trainer_{rank}.py")
        script.write_text(text)
        more = {"FAKE_LIBCUDA": str(self.driver), "OMP_NUM_THREADS": "1"}
        path = ":".join(part for part in (environment.pop("PYTHONPATH", ""), str(HERE)) if part)
        words = (sys.executable, *words, str(script))
        return self.rank(*words, rank=rank, PYTHONPATH=path, **{**more, **environment})

    def trained(self, text: str, *words: str, code: int = 0, **more: Any) -> str:
        """What a trainer said that ended with `code`."""
        process = self.train(text, *words, **more)
        said, errors = process.communicate(timeout=300)
        assert process.returncode == code, errors
        return str(said)

    @property
    def files(self) -> list[Path]:
        folder = file_names.attempt_folder(self.run_directory, ATTEMPT) / file_names.PROBES
        return sorted(folder.glob("*.jsonl"))

    def accounts(self) -> list[dict[str, Any]]:
        """The last account of each process, in the order of their first."""
        last = {}
        for path in self.files:
            for line in path.read_text().split("\n"):
                with contextlib.suppress(ValueError):
                    account = json.loads(line)
                    last[account["rank"], account["pid"]] = account
        return list(last.values())

    def peaks(self, device: int = 0) -> TorchPeaks:
        """What was written of rank 0."""
        (peaks,) = (peaks for peaks in probe_peaks(self.files) if peaks.device == device and peaks.rank == 0)
        return peaks


def build_libcuda(folder: Path, *defines: str) -> Path:
    """The stand-in of the driver's library, compiled."""
    compiler = shutil.which("cc")
    assert compiler, "no C compiler for the stand-in driver: apt-get install gcc libc6-dev"
    library = folder / "libcuda.so.1"
    flags = ["-std=gnu11", "-Wall", "-Wextra", "-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", *defines]
    subprocess.run([compiler, *flags, "-o", str(library), str(HERE / "fake_libcuda.c")], check=True)
    return library


@pytest.fixture(scope="session")
def fake_libcuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_libcuda(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def probed(archive: Path, fake_libcuda: Path, tmp_path: Path) -> Iterator[ProbeRig]:  # noqa: F811
    rig = ProbeRig(archive, tmp_path, fake_libcuda)
    yield rig
    rig.close()


@pytest.fixture
def small_torch(tmp_path: Path) -> Path:
    """A folder with a package that stands in for torch."""
    package = tmp_path / "site" / "torch"
    (package / "cuda").mkdir(parents=True)
    (package / "__init__.py").write_text("from torch import _C, cuda\n")
    (package / "_C.py").write_text(SMALL_C)
    (package / "cuda" / "__init__.py").write_text(SMALL_CUDA)
    return package.parent
