"""The hook that runs first in every Python the rank wrapper starts: copied into a run directory as
hook/sitecustomize.py, a folder that the wrapper puts first on the trainer's PYTHONPATH. Python >= 3.8 and the standard
library alone; it must never harm the trainer, so each part fails alone and silently.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
from pathlib import Path

TYPE_CHECKING = False  # `typing` would be read by every Python the trainer starts
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

STACKS_VARIABLE = "LLMLAUNCH_STACKS"  # the file of this rank
PROBE_VARIABLE = "LLMLAUNCH_PROBE"  # what the memory probe is told; it stays for the processes the trainer starts
PROBE_FILE = "llmlaunch_memory_probe.py"


def write_stacks_when_asked() -> None:
    """At SIGURG all threads' Python stacks go to the file of this rank, or to its log where that cannot be opened.

    The handler is C: it also answers while another thread, or a call that never returns, holds the interpreter's lock.
    SIGURG, since nobody else sends it and the processes that the trainer starts, without this handler, ignore it.
    Only the first Python of the rank is asked; the variable does not go to the processes it starts.
    """
    path = os.environ.pop(STACKS_VARIABLE, None)
    if path is None:
        return
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        file = sys.stderr.fileno()
    faulthandler.register(signal.SIGURG, file=file, all_threads=True, chain=False)


def write_memory_peaks_when_cuda_is_used() -> None:
    """The probe is loaded when `torch.cuda` initialises CUDA: a program that never does has no thread of ours, which
    `os.fork` would mind, and reads nothing."""
    if PROBE_VARIABLE not in os.environ or not Path(__file__).with_name(PROBE_FILE).exists():
        return
    if "torch.cuda" in sys.modules:  # a .pth file was earlier
        queue_probe(sys.modules["torch.cuda"])
    else:
        sys.meta_path.insert(0, UntilTorch())


class UntilTorch:
    """First among the finders of modules until `torch.cuda` has run. It finds nothing that the others would not."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch.cuda":
            return None
        with contextlib.suppress(Exception):
            for finder in sys.meta_path:
                spec = None if finder is self else finder.find_spec(name, path, target)
                if spec is not None:
                    self.hear_of(spec.loader)
                    return spec
        return None  # whatever is wrong, the others will say it

    def hear_of(self, loader: Any) -> None:
        """The loader is this module's alone; for its one use it gets a method of its own."""
        if loader is None or isinstance(loader, type):
            return
        real = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            with contextlib.suppress(Exception):
                del loader.exec_module
            real(module)
            with contextlib.suppress(Exception):
                sys.meta_path.remove(self)
                queue_probe(module)

        loader.exec_module = exec_module


def queue_probe(cuda: Any) -> None:
    """torch keeps such calls until it initialises CUDA, and makes them then."""

    def start() -> None:
        with contextlib.suppress(Exception):
            from importlib.util import module_from_spec, spec_from_file_location

            spec = spec_from_file_location("llmlaunch_memory_probe", Path(__file__).with_name(PROBE_FILE))
            if spec is not None and spec.loader is not None:
                probe = module_from_spec(spec)
                spec.loader.exec_module(probe)
                probe.start(os.environ[PROBE_VARIABLE])

    cuda._lazy_call(start)


def run_the_shadowed_one() -> None:
    """The sitecustomize that Python would have found without this folder; what it raises is what Python reports."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    here = Path(__file__).resolve().parent
    spec = PathFinder.find_spec("sitecustomize", [place for place in sys.path if Path(place).resolve() != here])
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = module = module_from_spec(spec)
        spec.loader.exec_module(module)


with contextlib.suppress(Exception):
    write_stacks_when_asked()
with contextlib.suppress(Exception):
    write_memory_peaks_when_cuda_is_used()
run_the_shadowed_one()
