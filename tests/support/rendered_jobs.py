"""A rendered run directory, read again as the script of a person: what its job does to start the trainer."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmlaunch.command_lines.command import ScriptContainer, TrainerCommand
from llmlaunch.command_lines.sbatch import Options, sbatch_options
from llmlaunch.rundir.command_file import command_words


@dataclass(frozen=True)
class RenderedJob:
    """What job.sbatch, command.txt and run.json of a run directory say. `setup` are the setup lines, `container` has
    the image and its mounts but for that of the run directory, `workdir` is the folder in which the trainers start."""

    command: TrainerCommand
    setup: tuple[str, ...]
    directives: Options
    container: ScriptContainer | None
    workdir: str | None
    python: str | None


def rendered_job(run: Path) -> RenderedJob:
    """Read the rendered job of a run directory."""
    job, described = (run / "job.sbatch").read_text("utf-8"), json.loads((run / "run.json").read_bytes())
    launch = described["launch"]
    directives, notes = sbatch_options(job, lambda: None)
    assert notes == ()
    setup = re.search(r"^trap .* ERR #.*\n((?:.*\n)*?)trap - ERR$", job, re.MULTILINE)
    words = [word.replace("$LLMLAUNCH_RUN_DIR", str(run)) for word in shown_words((run / "command.txt").read_bytes())]
    command = TrainerCommand(
        words[0],
        tuple(words[1:]),
        launcher="torchrun",
        nodes=described["nodes"],
        devices_per_node=described["devices_per_node"],
        environment={name: word for name, word in launch["environment"].items() if isinstance(word, str)},
        slurm=directives,
        folder=run,
        place="command.txt",
    )
    return RenderedJob(
        command,
        tuple(setup[1].splitlines()) if setup is not None else (),
        directives,
        _container(described["job"]["container"]),
        launch["workdir"] or None,
        launch["python"] or None,
    )


class _ByName(dict[str, str]):
    """Variables of a node, each of which is `$` and its name."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> str:
        return f"${name}"


def shown_words(command: bytes) -> list[str]:
    """The words of a command.txt; a variable of the node is shown by its name, as in arguments.json."""
    return command_words(command.decode(), _ByName())


def _container(record: dict[str, Any] | None) -> ScriptContainer | None:
    if record is None:
        return None
    return ScriptContainer(record["image"], tuple(record["mounts"]), record["runtime"])
