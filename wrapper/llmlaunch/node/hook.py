"""The folder of the run directory that comes first on the trainers' PYTHONPATH, and what its parts are told."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

HOOK_FOLDER = "hook"  # its sitecustomize.py runs first in the trainer's Python
PROBE_VARIABLE = "LLMLAUNCH_PROBE"


def put_hook_first(run_directory: Path) -> bool:
    """For a trainer that is started now; false where the run directory has no hook."""
    hook = run_directory / HOOK_FOLDER
    try:
        (hook / "sitecustomize.py").stat()
    except FileNotFoundError:
        return False
    except OSError:  # a file system that is away for the moment
        pass
    others = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{hook}:{others}" if others else str(hook)
    return True


def tell_probe(run_directory: Path, attempt: str, node: str, rank: int, local_rank: int) -> None:
    """The variable that the memory probe of this rank wakes at, in the trainer and in what that starts."""
    place = {"run": str(run_directory), "attempt": attempt, "node": node, "rank": rank, "local_rank": local_rank}
    os.environ[PROBE_VARIABLE] = json.dumps(place)
