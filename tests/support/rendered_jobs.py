"""A rendered run directory, read again as the script of a person: what its job does to start the trainer."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from llmlaunch.command_lines.command import ScriptContainer, TrainerCommand
from llmlaunch.command_lines.sbatch import Options, sbatch_options


@dataclass(frozen=True)
class RenderedJob:
    """What job.sbatch and train.sh of a run directory say. `setup` are the setup lines, `container` has the image and
    its mounts but for that of the run directory, `workdir` is the folder in which the trainers start."""

    command: TrainerCommand
    setup: tuple[str, ...]
    directives: Options
    container: ScriptContainer | None
    workdir: str | None
    python: str | None


def rendered_job(run: Path) -> RenderedJob:
    """Read the rendered job of a run directory."""
    job, train = (run / "job.sbatch").read_text("utf-8"), (run / "train.sh").read_text("utf-8")
    directives, notes = sbatch_options(job, lambda: None)
    assert notes == ()
    setup = re.search(r"^trap 'say \"setup: .*\n((?:.*\n)*?)trap - ERR$", job, re.MULTILINE)
    program = re.search(r"^program=\((.*)\)$", train, re.MULTILINE)
    assert program is not None
    words = [word.replace("${LLMLAUNCH_RUN_DIR}", str(run)) for word in shlex.split(program[1])]
    exports = [shlex.split(line) for line in re.findall(r"^export ([A-Za-z]\w*=[^\n\"$]*)$", train, re.MULTILINE)]
    environment = dict(words[0].split("=", 1) for words in exports if len(words) == 1)
    size = re.search(r"--nnodes=(\d+) --nproc_per_node=(\d+)", train)
    assert size is not None
    workdir = re.search(r"^  cd -- (.*?) \|\| die .cannot enter the folder", train, re.MULTILINE)
    python = re.search(r"^recipe_python=(.*)$", train, re.MULTILINE)
    command = TrainerCommand(
        words[1],
        tuple(words[2:]),
        launcher="torchrun",
        nodes=int(size[1]),
        devices_per_node=int(size[2]),
        environment=environment,
        slurm=directives,
        folder=run,
        place="train.sh",
    )
    return RenderedJob(
        command,
        tuple(setup[1].splitlines()) if setup is not None else (),
        directives,
        _container(job),
        None if workdir is None else shlex.split(workdir[1])[0],
        None if python is None or python[1] in ("''", "") else shlex.split(python[1])[0],
    )


def _container(job: str) -> ScriptContainer | None:
    pyxis = re.search(r"^ *--container-image=(.*)$", job, re.MULTILINE)
    apptainer = re.search(r'^ *step=\("\$\{enter\[@\]\}" (.*) "\$\{step\[@\]\}"\)$', job, re.MULTILINE)
    image = pyxis or apptainer
    if image is None:
        return None
    mounts = re.search(r'^mounts=\("\$run_dir:\$run_dir"(.*)\)$', job, re.MULTILINE)
    assert mounts is not None
    runtime = "pyxis" if pyxis else "apptainer"
    return ScriptContainer(shlex.split(image[1])[0], tuple(shlex.split(mounts[1])), runtime)
