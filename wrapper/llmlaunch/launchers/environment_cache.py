"""What was seen once of a training environment, kept until it changes: its packages, as `llmlaunch doctor --container`
probes them, and the resident memory of a trainer that has imported everything and does nothing.

On a CPU the peak of a run is resident memory, most of which is the libraries themselves; that part depends on the
machine's own torch and DeepSpeed, so it is measured once for each interpreter.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from llmlaunch.errors import UserError
from llmlaunch.launchers.run_environment import INTERPRETER_VARIABLE
from llmlaunch.recipe.containers import Container
from llmlaunch.recipe.types import Recipe
from llmlaunch.rundir.values import count_above_zero
from llmlaunch.trainers import TRAINER, TRAINER_MODULES
from llmlaunch.user_data import with_home

MOST_KEPT = 100
_DIGEST = re.compile(r"@(sha256:[0-9a-f]{64})$")
_VERSIONS = (
    "import importlib.metadata as m, json, sys;"
    "print(json.dumps([sys.version] + [m.version(n) for n in ('torch', 'deepspeed', 'transformers')]))"
)
_SECONDS = 300


def environment_key(container: Container | None, python: str | None) -> str | None:
    """Names one state of a training environment: an image by its digest, or its path and when it was written; an
    interpreter by its path and when a package was last put beside it. None where a recipe names neither."""
    if container is not None:
        digest = _DIGEST.search(container.image)
        inside = f" {python}" if python else ""
        return f"image {digest[1] if digest else container.image + _written(Path(container.image))}{inside}"
    if python is None:
        return None
    packages = sorted(Path(python).parent.parent.glob("lib/python3*/site-packages"))
    return f"python {python}" + "".join(_written(folder) for folder in packages[:1])


def _written(path: Path) -> str:
    with contextlib.suppress(OSError, ValueError):
        state = path.stat()
        return f" {state.st_mtime_ns} {state.st_size}"
    return ""


def probed_packages(recipe: Recipe) -> Mapping[str, str] | None:
    """The versions of the packages in the recipe's environment by name, where it was probed."""
    python = recipe.python if recipe.container else recipe.python or os.environ.get(INTERPRETER_VARIABLE)
    key = environment_key(recipe.container, python)
    entry = None if key is None else cached_probe(key)
    return None if entry is None else entry["packages"]


def cached_probe(key: str) -> dict[str, Any] | None:
    """What `cache_probe` kept under the key; None where there is nothing, or nothing that can be read."""
    from llmlaunch.rundir.files import read_object

    entry = (read_object(_cache("frameworks.json")) or {}).get(key)
    if not isinstance(entry, dict) or not isinstance(entry.get("packages"), dict):
        return None
    sound = all(isinstance(version, str) for version in entry["packages"].values())
    return dict(entry) if sound else None


def cache_probe(key: str, record: Mapping[str, Any]) -> None:
    """Raises OSError where the cache cannot be written."""
    from llmlaunch.rundir.files import read_object, replace_json

    path = _cache("frameworks.json")
    entries = {name: value for name, value in (read_object(path) or {}).items() if name != key}
    replace_json(path, dict([*entries.items(), (key, dict(record))][-MOST_KEPT:]), lasting=False)


def measured_baseline(python: str, say: Callable[[str], None]) -> int:
    """Resident bytes of the idle trainer under `python`, from the cache or measured now.

    Raises:
        UserError: the interpreter lacks torch, deepspeed or transformers, or the measuring run fails.
    """
    source = b"".join(path.read_bytes() for path in TRAINER_MODULES)
    key = f"{_versions(python)} {hashlib.sha256(source).hexdigest()[:12]}"
    from llmlaunch.rundir.files import read_object, replace_json

    path = _cache("baseline.json")
    table = {name: size for name, size in (read_object(path) or {}).items() if count_above_zero(size)}
    if key not in table:
        say("Measuring an idle trainer once, so that the prediction counts what its libraries take...")
        table[key] = _measure(python)
        with contextlib.suppress(OSError):  # where it cannot be written, the next run measures again
            replace_json(path, table, lasting=False)
    return int(table[key])


def _cache(name: str) -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or with_home("~/.cache"))
    # without a home directory nothing is kept: below a file nothing can be read or written
    return (folder if folder.is_absolute() else Path(os.devnull)) / "llmlaunch" / name


def _versions(python: str) -> str:
    import subprocess  # late: most who plan measure nothing

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
