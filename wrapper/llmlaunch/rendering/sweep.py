"""A sweep's directory: the run directories of its variants, what belongs together, and the array's script."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from llmlaunch.documents.writing import new_place, write_whole
from llmlaunch.errors import UserError
from llmlaunch.rendering.shell import ShellText, directive, render_template
from llmlaunch.rundir import file_names

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
            scripts = {run: (target / run / file_names.JOB_SCRIPT).read_text(encoding="utf-8") for run in runs}
            write_whole(target / file_names.JOB_SCRIPT, array_script(name, scripts, limit))
        listed = [{"directory": run, **description} for run, description in zip(runs, described, strict=True)]
        sweep = {"schema": SCHEMA, "name": name, "how": how, "runs": listed}
        write_whole(target / file_names.SWEEP, json.dumps(sweep, indent=2) + "\n")
    except OSError as error:
        shutil.rmtree(target, ignore_errors=True)
        raise UserError(f"{target}: the sweep cannot be written: {error.strerror}") from error
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise
    return [target / run for run in runs]


_DIRECTIVE = "#SBATCH "
_OWN = ("--job-name", "--array")
_OUTPUT = "#SBATCH --output=slurm-%j.out"


def array_script(name: str, scripts: Mapping[str, str], limit: int | None = None) -> str:
    """`scripts` are the runs' own job.sbatch by the name of their directory, in the order of the tasks; `limit` tasks
    run at a time. All tasks of an array are asked for with the same options.

    Raises UserError where the runs do not ask SLURM for the same, or one of them asks for an array itself.
    """
    directives_of = {run: _directives(script) for run, script in scripts.items()}
    first, *others = directives_of
    for run in others:
        _refuse_difference(first, directives_of[first], run, directives_of[run])
    if any(line.startswith("#SBATCH --array") for line in directives_of[first]):
        raise UserError(f"{first}: slurm.array: the recipe asks for an array of its own; leave it out")
    tasks = f"0-{len(scripts) - 1}" + (f"%{limit}" if limit else "")
    lines = [directive("job-name", name), directive("array", tasks)]
    lines += [
        directive("output", "slurm-%A_%a.out") if line == _OUTPUT else line for line in _shared(directives_of[first])
    ]
    return render_template("array.sbatch.j2", {"directives": lines, "runs": list(scripts), "last": len(scripts) - 1})


def _directives(script: str) -> list[ShellText]:
    """The `#SBATCH` lines of a rendered script, quoted as they are; sbatch, too, reads to the first command."""
    lines = []
    for line in script.splitlines():
        if line.startswith(_DIRECTIVE):
            lines.append(ShellText(line))
        elif line.strip() and not line.startswith("#"):
            break
    return lines


def _shared(lines: Sequence[ShellText]) -> list[ShellText]:
    return [line for line in lines if line.removeprefix(_DIRECTIVE).partition("=")[0] not in _OWN]


def _refuse_difference(first: str, ours: Sequence[ShellText], other: str, theirs: Sequence[ShellText]) -> None:
    here, there = _shared(ours), _shared(theirs)
    mine = [line.removeprefix(_DIRECTIVE) for line in here if line not in there]
    other_s = [line.removeprefix(_DIRECTIVE) for line in there if line not in here]
    if mine or other_s:
        raise UserError(
            f"--array: all tasks of an array are asked for with the same options, but {first} has "
            f"{' '.join(mine) or 'nothing'} where {other} has {' '.join(other_s) or 'nothing'}; submit them as jobs of "
            "their own: leave out --array"
        )
