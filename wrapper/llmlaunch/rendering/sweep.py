"""A sweep's directory: the run directories of its variants, what belongs together, and the array's script."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from llmlaunch.documents.writing import new_place, write_whole
from llmlaunch.errors import UserError
from llmlaunch.rendering.array_script import array_script

__all__ = ["render_sweep", "run_names"]

SCHEMA = 1


def run_names(names: Sequence[str]) -> list[str]:
    """The directories of runs, by the names of their recipes: numbered, so that none is there twice."""
    width = len(str(len(names) - 1))
    return [f"{index:0{width}}-{name}" for index, name in enumerate(names)]


def render_sweep(
    directory: Path,
    name: str,
    how: str,
    runs: Mapping[str, Callable[[Path], None]],
    described: Sequence[Mapping[str, object]],
    limit: int | None = None,
) -> list[Path]:
    """Write `directory` with one run directory for each of `runs`, each by its own function, and `sweep.json`; where
    `how` is array, also the array's job.sbatch. The run directories, in order.

    Raises UserError where the directory holds something, one of the runs cannot be written, or the runs cannot be one
    array; then nothing is left behind.
    """
    target = new_place(directory)
    try:
        target.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        raise UserError(f"{target}: exists already; name a new directory for the sweep") from None
    except OSError as error:
        raise UserError(f"{target}: the sweep cannot be written: {error.strerror}") from error
    try:
        for run, write in runs.items():
            write(target / run)
        if how == "array":
            scripts = {run: (target / run / "job.sbatch").read_text(encoding="utf-8") for run in runs}
            write_whole(target / "job.sbatch", array_script(name, scripts, limit))
        listed = [{"directory": run, **words} for run, words in zip(runs, described, strict=True)]
        sweep = {"schema": SCHEMA, "name": name, "how": how, "runs": listed}
        write_whole(target / "sweep.json", json.dumps(sweep, indent=2) + "\n")
    except OSError as error:
        shutil.rmtree(target, ignore_errors=True)
        raise UserError(f"{target}: the sweep cannot be written: {error.strerror}") from error
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise
    return [target / run for run in runs]
