"""Runs first in every Python the rank wrapper starts: copied into a run directory as hook/sitecustomize.py, a folder
that the wrapper puts first on the trainer's PYTHONPATH. Python >= 3.8, standard library, and never the trainer's bane:
each part fails alone and silently.
"""

import contextlib
import faulthandler
import os
import signal
import sys
from pathlib import Path

STACKS_VARIABLE = "LLMLAUNCH_STACKS"  # the file of this rank


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
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        file = sys.stderr.fileno()
    faulthandler.register(signal.SIGURG, file=file, all_threads=True, chain=False)


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
run_the_shadowed_one()
