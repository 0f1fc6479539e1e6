"""The script of a job array: one set of sbatch options, one run directory for each task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llmlaunch.errors import UserError
from llmlaunch.rendering.shell import ShellText, directive, render_template

__all__ = ["array_script"]

_DIRECTIVE = "#SBATCH "
_OWN = ("--job-name", "--array")
_OUTPUT = "#SBATCH --output=slurm-%j.out"


def array_script(name: str, scripts: Mapping[str, str], limit: int | None = None) -> str:
    """`scripts` are the runs' own job.sbatch by the name of their directory, in the order of the tasks; `limit` tasks
    run at a time. All tasks of an array are asked for with the same options.

    Raises UserError where the runs do not ask SLURM for the same, or one of them asks for an array itself.
    """
    asked = {run: _directives(script) for run, script in scripts.items()}
    first, *others = asked
    for run in others:
        _refuse_difference(first, asked[first], run, asked[run])
    if any(line.startswith("#SBATCH --array") for line in asked[first]):
        raise UserError(f"{first}: slurm.array: the recipe asks for an array of its own; leave it out")
    tasks = f"0-{len(scripts) - 1}" + (f"%{limit}" if limit else "")
    lines = [directive("job-name", name), directive("array", tasks)]
    lines += [directive("output", "slurm-%A_%a.out") if line == _OUTPUT else line for line in _shared(asked[first])]
    return render_template("array.sbatch.j2", {"directives": lines, "runs": list(scripts), "last": len(scripts) - 1})


def _directives(script: str) -> list[ShellText]:
    """The `#SBATCH` lines of a rendered script, quoted as they are; sbatch, too, reads to the first command."""
    found = []
    for line in script.splitlines():
        if line.startswith(_DIRECTIVE):
            found.append(ShellText(line))
        elif line.strip() and not line.startswith("#"):
            break
    return found


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
