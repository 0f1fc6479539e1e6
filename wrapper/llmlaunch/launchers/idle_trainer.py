"""The resident memory of a trainer that has imported everything and does nothing.

On a CPU, the peak of a run is resident memory, and most of it is the libraries. It depends on the torch and DeepSpeed
of the machine, so it is measured once for each interpreter and kept until that changes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable

from llmlaunch.errors import UserError
from llmlaunch.launchers.environment_cache import cache_file
from llmlaunch.rundir.values import count_above_zero
from llmlaunch.trainers import TRAINER, TRAINER_MODULES

_VERSIONS = (
    "import importlib.metadata as m, json, sys;"
    "print(json.dumps([sys.version] + [m.version(n) for n in ('torch', 'deepspeed', 'transformers')]))"
)
_SECONDS = 300


def measured_baseline(python: str, say: Callable[[str], None]) -> int:
    """Return the resident bytes of an idle trainer under `python`, from the cache or from a new measurement.

    Raises:
        UserError: the interpreter lacks torch, deepspeed or transformers, or the measurement fails.
    """
    source = b"".join(path.read_bytes() for path in TRAINER_MODULES)
    key = f"{_versions(python)} {hashlib.sha256(source).hexdigest()[:12]}"
    from llmlaunch.rundir.files import read_object, replace_json

    path = cache_file("baseline.json")
    table = {name: size for name, size in (read_object(path) or {}).items() if count_above_zero(size)}
    if key not in table:
        say("Measuring an idle trainer once, so that the prediction counts what its libraries take...")
        table[key] = _measure(python)
        with contextlib.suppress(OSError):  # if the cache cannot be written, the next run measures again
            replace_json(path, table, lasting=False)
    return int(table[key])


def _versions(python: str) -> str:
    import subprocess  # imported late, because most plans measure nothing

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
    import subprocess

    from llmlaunch.frameworks.deepspeed.arguments import CPU_ACCELERATOR, MALLOC
    from llmlaunch.launchers.bandwidth import free_port

    command = [python, "-m", "torch.distributed.run", "--nnodes=1", "--nproc_per_node=1", "--node_rank=0"]
    command += ["--rdzv_backend=static", "--master_addr=127.0.0.1", f"--master_port={free_port()}"]
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
