"""The resident memory of a trainer that has imported everything and does nothing, measured on this machine.

On a CPU the peak of a run is resident memory, most of which is the libraries themselves; that part depends on the
machine's own torch and DeepSpeed, so it is measured once for each interpreter and kept in the cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from llmlaunch.backends.deepspeed.arguments import CPU_ACCELERATOR, MALLOC
from llmlaunch.errors import UserError
from llmlaunch.trainers import TRAINER, TRAINER_MODULES

__all__ = ["measured_baseline"]

_VERSIONS = (
    "import importlib.metadata as m, json, sys;"
    "print(json.dumps([sys.version] + [m.version(n) for n in ('torch', 'deepspeed', 'transformers')]))"
)
_SECONDS = 300


def measured_baseline(python: str, say: Callable[[str], None]) -> int:
    """Bytes of the idle trainer under `python`, from the cache or measured now.

    Raises:
        UserError: the interpreter lacks torch, deepspeed or transformers, or the measuring run fails.
    """
    source = b"".join(path.read_bytes() for path in TRAINER_MODULES)
    key = f"{_versions(python)} {hashlib.sha256(source).hexdigest()[:12]}"
    path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llmlaunch" / "baseline.json"
    table = _read(path)
    if key in table:
        return table[key]
    say("Measuring an idle trainer once, so that the prediction counts what its libraries take...")
    measured = _measure(python)
    _write(path, {**table, key: measured})
    return measured


def _versions(python: str) -> str:
    try:
        answer = subprocess.run([python, "-c", _VERSIONS], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as failure:
        raise UserError(
            f"{python}: cannot be run ({failure}); name another interpreter (python: in the recipe)"
        ) from None
    if answer.returncode != 0:
        missing = answer.stderr.strip().splitlines()[-1] if answer.stderr.strip() else "it failed"
        raise UserError(
            f"{python}: lacks what the training needs ({missing}); install llmlaunch[local] there, or name another "
            "interpreter (python: in the recipe)"
        )
    return f"{python} {answer.stdout.strip()}"


def _measure(python: str) -> int:
    command = [python, "-m", "torch.distributed.run", "--nnodes=1", "--nproc_per_node=1", "--node_rank=0"]
    command += ["--rdzv_backend=static", "--master_addr=127.0.0.1", f"--master_port={_free_port()}"]
    command += [str(TRAINER), "--measure-baseline"]
    environment = {**os.environ, **CPU_ACCELERATOR, **MALLOC, "OMP_NUM_THREADS": "1"}
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, env=environment)
    except subprocess.TimeoutExpired:
        raise UserError(f"{python}: an idle trainer did not come up within {_SECONDS} s; try again") from None
    for line in answer.stdout.splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return int(json.loads(line)["resident_peak_bytes"])
    tail = "\n".join(answer.stderr.strip().splitlines()[-5:])
    raise UserError(f"{python}: an idle trainer failed with exit code {answer.returncode}:\n{tail}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _read(path: Path) -> dict[str, int]:
    try:
        table = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(table, dict):
        return {}
    return {str(k): v for k, v in table.items() if isinstance(v, int) and not isinstance(v, bool) and v > 0}


def _write(path: Path, table: dict[str, int]) -> None:
    """A cache: where it cannot be written, the next run measures again."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(table, file, indent=1)
        Path(name).replace(path)
